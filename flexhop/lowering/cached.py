"""Lowering of `flexhop_cached_attention`: like forward.py, with keys from a cache."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from flexhop.compat.graphs import guards, inline
from flexhop.compat.kernels import gluon, inductor, pointwise, tanh
from flexhop.compat.kernels.pointwise import placeholder
from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.operators.hop import capture_like, isolated_trace
from flexhop.compat.operators.retrace import trace_callable
from flexhop.lowering import chunked, cpu
from flexhop.lowering.emission.kernel import KernelCall
from flexhop.lowering.forward import emit_forward
from flexhop.lowering.mods.caps import foldable_scale
from flexhop.lowering.mods.indices import wrap_reads
from flexhop.lowering.mods.keys import KEY_INPUTS, is_lossless, read_key_mod
from flexhop.lowering.mods.lower import lower_mods, read_mods
from flexhop.lowering.operands import (
    Sizes,
    bulk_obstacle,
    is_view_of,
    make_problem,
    show_problem,
    user_options,
)
from flexhop.lowering.problem import Cache, Device, ModFacts, Problem, read_device
from flexhop.mods.keys import noop_key
from flexhop.ops.args import CachedArgs, index_examples, index_sizes
from flexhop.ops.graphs.subgraphs import trace_key

aten = torch.ops.aten


class Readers(NamedTuple):
    """How to read a cache: the remaining mods, and the factors moved to scores and weights."""

    key: fx.GraphModule
    value: fx.GraphModule
    key_factor: fx.GraphModule | None
    value_factor: fx.GraphModule | None
    cache: Cache


def lower_cached_attention(*operands: Any) -> tuple[Any, Any, Any]:
    """Emit the kernel: (out, lse, max_scores)."""
    args = CachedArgs(*operands)
    if chunked.is_without_kernel(args.query):
        return cpu.lower_cached_attention(*args) or chunked.lower_cached_attention(*args)
    score, mask, of_key, of_value = (
        tuple(inductor.realize(group))
        for group in (
            args.score_captures, args.mask_captures, args.key_captures, args.value_captures
        )
    )  # fmt: skip
    query, key, value = inductor.realize((args.query, args.key, args.value))
    args = args._replace(
        query=query, key=key, value=value, score_captures=score, mask_captures=mask,
        key_captures=of_key, value_captures=of_value,
    )  # fmt: skip
    # Slices of a cache have strides of their own. Triton reads whole rows only if it knows them.
    guards.guard_aligned_strides((query, key, value))
    fakes = CachedArgs(*inline.fake_operands())
    readers = divide_work(args, key_dtypes(fakes))
    sizes = index_sizes(fakes)
    device = inductor.device_of(args.query)
    mods = lower_mods(
        device, (args.score_mod, args.mask_mod), (score, mask), sizes,
        cap_scale=foldable_scale(args, has_texts=tanh.has_texts(device, fakes.query.dtype)),
    )  # fmt: skip
    pages = inductor.realize(args.pages)
    subgraphs = _lower_readers(args, readers, fakes, pages)
    problem, options = _read_problem(args, readers.cache, mods.facts), user_options(args.options)
    used = [*score, *mask, *of_key, *of_value, *pages]
    call = KernelCall(problem, options, mods, used, tuple(subgraphs))
    return emit_forward(args, call) or chunked.lower_cached_attention(*operands)


def key_dtypes(args: CachedArgs) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The dtypes of query, key and value, which are tensors."""
    return args.query.dtype, args.key.dtype, args.value.dtype


def divide_work(args: CachedArgs, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]) -> Readers:
    """Split the work of k_mod and v_mod into work per element, per score and per weight."""
    dtype, key_dtype, value_dtype = dtypes
    key, value = read_key_mod(args.key_mod), read_key_mod(args.value_mod)
    # If a key is rounded on the way to the product, it must be multiplied before.
    key_factor = key.factor if is_lossless(key_dtype, dtype) else None
    value_factor = value.factor if is_lossless(value_dtype, dtype) else None
    cache = Cache(
        page_size=_page_size(args), key_dtype=key_dtype, value_dtype=value_dtype,
        has_key_mod=not (key.is_trivial or key_factor is not None),
        has_value_mod=not (value.is_trivial or value_factor is not None),
        has_key_factor=key_factor is not None, has_value_factor=value_factor is not None,
    )  # fmt: skip
    return Readers(key.graph, value.graph, key_factor, value_factor, cache)


def _size(tensor: Any, dim: int) -> int:
    return (
        tensor.size(dim) if isinstance(tensor, Tensor) else inductor.static(tensor.get_size()[dim])
    )


def _page_size(args: CachedArgs) -> int:
    return _size(args.key, 2) if args.pages else 0


class _Reader(NamedTuple):
    """A function of a template: its graph, its inputs before captures, and its captures."""

    name: str
    graph: fx.GraphModule
    inputs: tuple[str, ...]
    captures: Sequence[Any] = ()


def _lower_readers(
    args: CachedArgs, readers: Readers, fakes: CachedArgs, pages: Sequence[Any]
) -> list[Any]:
    """Subgraphs 2 to 7 of the templates: k_mod, v_mod, their factors, page table, lengths."""
    batch, _, _, length = index_sizes(fakes)
    sizes = {"b": batch, "h": fakes.key.size(1), "kv_idx": length}
    found = [*_mod_readers(args, readers, fakes), *_page_readers(fakes, pages)]
    if fakes.pages:
        # The template passes the index of a page table entry as kv_idx.
        found[4:5] = [found[4]._replace(inputs=("b", "entry"))]
        sizes["entry"] = fakes.pages[0].size(1)
    return [_lower_reader(reader, sizes, inductor.device_of(args.query)) for reader in found]


def _lower_reader(reader: _Reader, sizes: dict[str, Any], device: torch.device) -> Any:
    inputs = [
        placeholder(
            "kv_idx" if name == "entry" else name,
            torch.int32 if name in sizes else torch.float32,
            device,
        )
        for name in reader.inputs
    ]
    known = {name: sizes[name] for name in reader.inputs if name in sizes}
    graph = wrap_reads(reader.graph, reader.inputs, known)
    (buffer,) = pointwise.lower(graph, [*inputs, *reader.captures], reader.name)
    return buffer


def _mod_readers(args: CachedArgs, readers: Readers, fakes: CachedArgs) -> list[_Reader]:
    unused = trace_key(noop_key, fakes.query, ())
    cache = readers.cache
    key = _Reader("k_mod", unused, KEY_INPUTS)
    value = _Reader("v_mod", unused, KEY_INPUTS)
    unused = _trace(lambda b, h, kv_idx: kv_idx, fakes, 3, ())
    key_factor = _Reader("k_mod", unused, KEY_INPUTS[1:])
    value_factor = _Reader("v_mod", unused, KEY_INPUTS[1:])
    if cache.has_key_mod:
        key = key._replace(graph=readers.key, captures=args.key_captures)
    if cache.has_value_mod:
        value = value._replace(graph=readers.value, captures=args.value_captures)
    if readers.key_factor is not None:
        key_factor = key_factor._replace(graph=readers.key_factor, captures=args.key_captures)
    if readers.value_factor is not None:
        value_factor = value_factor._replace(
            graph=readers.value_factor, captures=args.value_captures
        )
    return [key, value, key_factor, value_factor]


def _page_readers(fakes: CachedArgs, pages: Sequence[Any]) -> list[_Reader]:
    """The page of an entry of a sequence's table, and the sequence's number of keys."""
    if not pages:
        unused = _trace(lambda b: b, fakes, 1, ())
        entry = _trace(lambda b, entry: entry, fakes, 2, ())
        return [_Reader("pages", entry, ("b", "kv_idx")), _Reader("lengths", unused, ("b",))]
    page = _trace(lambda b, entry, table: table[b, entry], fakes, 2, fakes.pages[:1])
    count = _trace(lambda b, table, lengths: lengths[b], fakes, 1, fakes.pages)
    _clamp_count(count.graph, fakes)
    return [
        _Reader("pages", page, ("b", "kv_idx"), pages[:1]),
        _Reader("lengths", count, ("b",), pages),
    ]


def _clamp_count(graph: fx.Graph, fakes: CachedArgs) -> None:
    """Clamp a number of keys to 0 and the capacity of the table."""
    output = graph.output_node()
    table = graph.find_nodes(op="placeholder")[1]
    width: Any = fakes.pages[0].size(1)
    page_size = int(fakes.key.size(2))  # a constant of the kernel; prepare_cached guards it
    with graph.inserting_before(output):
        room: Any = width * page_size
        if not isinstance(width, int):
            columns = graph.call_function(aten.sym_size.int, (table, 1))
            room = graph.call_function(operator.mul, (columns, page_size))
        count = graph.call_function(aten.maximum.default, (output.args[0], 0))
        output.args = (graph.call_function(aten.minimum.default, (count, room)),)


def _trace(
    function: Callable[..., Tensor], fakes: CachedArgs, indices: int, captures: Sequence[Tensor]
) -> fx.GraphModule:
    """FX graph of a function of indices and tensors."""
    with isolated_trace(fakes.query, *captures), IndexMode():
        examples = index_examples(fakes.query.device)[:indices]
        return trace_callable(function, [*examples, *map(capture_like, captures)])


def _read_problem(args: CachedArgs, cache: Cache, mods: ModFacts) -> Problem:
    """The facts of a call whose operands are IR."""
    hint, static = inductor.hint, inductor.static
    query: Any = args.query
    value: Any = args.value
    batch, heads, query_len, head_dim = query.get_size()
    kv_batch, kv_heads, key_len, value_dim = value.get_size()
    varies = not inductor.is_constant(key_len)
    if args.pages:
        table: Any = args.pages[0]
        width = table.get_size()[1]
        kv_batch, key_len, varies = 1, key_len * width, not inductor.is_constant(width)
    sizes = Sizes(
        (hint(batch), static(heads), hint(query_len), static(head_dim)),
        (hint(kv_batch), static(kv_heads), hint(key_len), static(value_dim)),
        is_query_multiple=lambda n: inductor.is_multiple(query_len, n),
        is_key_multiple=lambda n: not args.pages and inductor.is_multiple(key_len, n),
        key_len_varies=varies,
        has_pages=bool(args.pages),
    )
    device = read_device(query.get_device())
    # Halving symbolic strides would hide the alignment of rows from Triton.
    constant = [value.get_stride()[2], *([value.get_stride()[0]] if args.pages else ())]
    has_pairs = gluon.suits_bulk_copies(value) and all(map(inductor.is_constant, constant))
    cache = dataclasses.replace(cache, has_pairs=has_pairs)
    problem = make_problem(
        args, sizes, device, query.get_dtype(), mods, cache=cache,
        bulk_obstacle=bulk_obstacle(args), value_is_key=is_view_of(value, args.key),
    )  # fmt: skip
    show_problem("forward", problem)
    return problem


def read_cached_tensors(
    args: CachedArgs, device: Device, score: fx.GraphModule, mask: fx.GraphModule,
    *, value_is_key: bool,
) -> Problem:  # fmt: skip
    """The facts of a call of tensors and graphs."""
    readers = divide_work(args, key_dtypes(args))
    batch, heads, queries, length = index_sizes(args)
    kv_batch = 1 if args.pages else args.value.size(0)
    sizes = Sizes(
        (batch, heads, queries, args.query.size(3)),
        (kv_batch, args.value.size(1), length, args.value.size(3)),
        is_query_multiple=lambda n: queries % n == 0,
        is_key_multiple=lambda n: not args.pages and length % n == 0,
        has_pages=bool(args.pages),
    )
    *strides, last = args.value.stride()
    has_pairs = last == 1 and not any(stride % 16 for stride in strides)
    cache = dataclasses.replace(readers.cache, has_pairs=has_pairs)
    cap_scale = foldable_scale(args, has_texts=args.query.dtype.itemsize == 2)
    mods = read_mods(score, mask, cap_scale=cap_scale)
    return make_problem(
        args, sizes, device, args.query.dtype, mods, cache=cache,
        value_is_key=value_is_key,
    )  # fmt: skip
