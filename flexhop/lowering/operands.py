"""Operators' operands in lowerings: IR in, facts and template inputs out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.compat.graphs import inline
from flexhop.compat.kernels import gluon, inductor
from flexhop.lowering.mods.lower import ModBuffers
from flexhop.lowering.problem import (
    Device,
    GradFacts,
    MaskBlocks,
    ModFacts,
    Problem,
    float32_precision,
    read_device,
)
from flexhop.ops import wide_lse
from flexhop.ops.args import AttentionArgs, BackwardArgs, CachedArgs, RangeTensors, read_blocks
from flexhop.options import KernelOptions, debug

# Options that flexhop itself adds on the wire (ops/call.py); the others are the user's.
_OWN_OPTIONS = (
    "flexhop",
    "verify",
    "return_max",
    wide_lse.OPTION,
    "dropout_p",
    "dropout_groups",
    "deterministic",
    "sum_groups",
    "q_block_size",
    "kv_block_size",
    "has_full_blocks",
    "has_q_blocks",
    "mask_kind",
)


def user_options(wire: dict[str, Any]) -> KernelOptions:
    """The user's options among the operator's options."""
    return KernelOptions.from_wire({k: v for k, v in wire.items() if k not in _OWN_OPTIONS})


class Sizes(NamedTuple):
    """Sizes of a call at this compilation, and the multiples that its lengths always are.

    has_pages: whether all batches share the pages of a cache.
    """

    query: Sequence[int]  # [B, Hq, M, D]
    value: Sequence[int]  # [B or 1, Hkv, N, Dv]
    is_query_multiple: Callable[[int], bool]
    is_key_multiple: Callable[[int], bool]
    key_len_varies: bool = False
    has_pages: bool = False


def read_problem(args: AttentionArgs | BackwardArgs, mods: ModBuffers, **more: Any) -> Problem:
    """The facts of a call whose operands are IR.

    Args:
        args: operands.
        mods: the lowered user functions.
        **more: see `make_problem`.
    """
    hint, static = inductor.hint, inductor.static
    query: Any = args.query
    value: Any = args.value
    batch, heads, query_len, head_dim = query.get_size()
    kv_batch, kv_heads, key_len, value_dim = value.get_size()
    sizes = Sizes(
        (hint(batch), static(heads), hint(query_len), static(head_dim)),
        (hint(kv_batch), static(kv_heads), hint(key_len), static(value_dim)),
        is_query_multiple=lambda n: inductor.is_multiple(query_len, n),
        is_key_multiple=lambda n: inductor.is_multiple(key_len, n),
        key_len_varies=not inductor.is_constant(key_len),
    )
    device, dtype = read_device(query.get_device()), query.get_dtype()
    return make_problem(
        args, sizes, device, dtype, mods.facts, bulk_obstacle=bulk_obstacle(args),
        value_is_key=is_view_of(value, args.key), **more,
    )  # fmt: skip


def is_view_of(value: Any, key: Any) -> bool:
    """Whether the columns of value are the first ones of key, read from the same memory."""
    if value.get_name() != key.get_name() or value.get_dtype() != key.get_dtype():
        return False
    strides = zip(value.get_size(), value.get_stride(), key.get_stride(), strict=True)
    pairs = [(a, b) for size, a, b in strides if not inductor.is_known(size == 1)]
    pairs.append((value.get_layout().offset, key.get_layout().offset))
    return all(inductor.is_known(a == b) for a, b in pairs)


def bulk_obstacle(args: AttentionArgs | CachedArgs | BackwardArgs) -> str:
    """Why the tensor memory accelerator cannot copy the operands; empty if it can."""
    tensors = {"query": args.query, "key": args.key, "value": args.value}
    unfit = [name for name, tensor in tensors.items() if not gluon.suits_bulk_copies(tensor)]
    if not unfit:
        return ""
    return f"rows of {' and '.join(unfit)} do not start at multiples of 16 bytes"


def read_tensor_problem(
    args: AttentionArgs, device: Device, mods: ModFacts, grad: GradFacts, *, value_is_key: bool
) -> Problem:
    """The facts of a call whose operands are tensors, for the GPU `device`; lengths are static."""
    query, value = args.query, args.value
    sizes = Sizes(
        query.shape,
        value.shape,
        is_query_multiple=lambda n: query.size(2) % n == 0,
        is_key_multiple=lambda n: value.size(2) % n == 0,
    )
    return make_problem(
        args, sizes, device, query.dtype, mods, grad=grad, value_is_key=value_is_key
    )


def make_problem(
    args: AttentionArgs | CachedArgs | BackwardArgs,
    sizes: Sizes,
    device: Device,
    dtype: torch.dtype,
    mods: ModFacts,
    **more: Any,
) -> Problem:
    """Collect the facts of a call.

    Args:
        args: operands: IR or tensors.
        sizes: sizes of the operands.
        device: the GPU.
        dtype: query's dtype.
        mods: facts about the user's functions.
        **more: further fields of Problem: grad, cache, tangents, bulk_obstacle, value_is_key.
    """
    batch, heads, query_len, head_dim = sizes.query
    kv_batch, kv_heads, key_len, value_dim = sizes.value
    # A bound for every tensor that kernels address from one pointer.
    elements = batch * heads * max(query_len, key_len) * max(head_dim, value_dim)
    precision = float32_precision(user_options(args.options).float32_precision)
    return Problem(
        device=device,
        dtype=dtype,
        batch=batch,
        query_heads=heads,
        kv_heads=kv_heads,
        query_len=query_len,
        key_len=key_len,
        head_dim=head_dim,
        value_head_dim=value_dim,
        scale=float(args.scale),
        kv_batch_shared=sizes.has_pages or (kv_batch == 1 and batch != 1),
        blocks=_mask_blocks(args),
        mods=mods,
        is_lse_wide=bool(args.options.get(wide_lse.OPTION)),
        returns_max=bool(args.options.get("return_max")),
        large_output=elements >= 2**31,
        is_query_multiple=sizes.is_query_multiple,
        is_key_multiple=sizes.is_key_multiple,
        key_len_varies=sizes.key_len_varies,
        dropout_p=float(args.options.get("dropout_p", 0.0)),
        dropout_groups=int(args.options.get("dropout_groups", 0)),
        is_deterministic=bool(args.options.get("deterministic")),
        is_tf32=dtype == torch.float32 and precision == "tf32",
        **more,
    )


def show_problem(title: str, problem: Problem) -> None:
    """Print the facts, one per line, if FLEXHOP_DEBUG requests them."""
    debug.show("problem", title, lambda: _describe(problem))


def _describe(problem: Problem) -> str:
    facts: dict[str, Any] = {}
    for field in dataclasses.fields(problem):
        value: Any = getattr(problem, field.name)
        found = value._asdict() if field.name in ("mods", "grad") else {field.name: value}
        facts |= found
    return "\n".join(f"{name} = {value}" for name, value in facts.items() if not callable(value))


def _mask_blocks(args: AttentionArgs | CachedArgs | BackwardArgs) -> MaskBlocks | None:
    blocks, options = read_blocks(args), args.options
    if blocks is None:
        return None
    q_size, kv_size = int(options["q_block_size"]), int(options["kv_block_size"])
    has_full = bool(options["has_full_blocks"])
    if isinstance(blocks, RangeTensors):
        return MaskBlocks(q_size, kv_size, has_full, has_ranges=True)
    counts = (blocks.kv_num_blocks, blocks.full_kv_num_blocks)
    return MaskBlocks(
        q_size,
        kv_size,
        has_full,
        per_head=not all(_axis(lists, 1) == 1 for lists in counts),
        per_batch=not all(_axis(lists, 0) == 1 for lists in counts),
        kv_columns=_columns(blocks.kv_indices),
        q_columns=_columns(blocks.q_indices),
    )


def _columns(indices: Any) -> int | None:
    """Width of a row of a mask's lists, if that is a number; absent lists have none."""
    if indices is None:
        return None
    size = indices.shape if isinstance(indices, torch.Tensor) else indices.get_size()
    return int(size[-1]) if inductor.is_constant(size[-1]) else None


def _axis(counts: Any, axis: int) -> Any:
    """Size of a mask's counts [B', H', rows], which are IR or a tensor."""
    return counts.shape[axis] if isinstance(counts, torch.Tensor) else counts.get_size()[axis]


def block_inputs(
    args: AttentionArgs | CachedArgs | BackwardArgs, side: str, rank3: Any, rank4: Any
) -> list[Any]:
    """The four list tensors of one side; without a mask, unread tensors of equal rank.

    For ranges, first and end twice.

    Args:
        side: "kv" for the lists of each query block, "q" for those of each key block.
        rank3: stand-in for counts. rank4: stand-in for indices.
    """
    blocks = read_blocks(args)
    if blocks is None:
        return [rank3, rank4, rank3, rank4]
    if isinstance(blocks, RangeTensors):
        first, end = blocks[:2] if side == "kv" else blocks[2:]
        lists = (first, end, first, end)
    elif side == "kv":
        lists = (
            blocks.kv_num_blocks,
            blocks.kv_indices,
            blocks.full_kv_num_blocks,
            blocks.full_kv_indices,
        )
    else:
        lists = (
            blocks.q_num_blocks,
            blocks.q_indices,
            blocks.full_q_num_blocks,
            blocks.full_q_indices,
        )
    return inductor.realize(lists)


def seed_input(args: AttentionArgs | BackwardArgs) -> list[Any]:
    """The seed of dropout, if there is one."""
    return [inductor.alone(seed) for seed in args.dropout_seed]


def benchmark_inputs(
    inputs: Sequence[Any], first_list: int, blocks: MaskBlocks, *, has_states: bool = False
) -> dict[int, Callable[[Any], torch.Tensor]]:
    """Contents of the block lists while tiles are timed: every block partial, none full.

    Random contents would read outside the tensors. Ranges hold only the first key, because these
    tensors do not tell how many keys there are. has_states: whether a row of indices is blocks,
    then states (portable/head_lists.py).
    """
    has_ranges = blocks.has_ranges
    columns = inductor.hint(inputs[first_list + 1].get_size()[-1]) // (1 + has_states)

    def counts(buffer: Any) -> torch.Tensor:
        return _sized(buffer).fill_(0 if has_ranges else columns)

    def indices(buffer: Any) -> torch.Tensor:
        target = _sized(buffer)
        if has_ranges:
            return target.fill_(1)
        position = torch.arange(target.shape[-1], device=target.device) % columns
        return target.copy_(position.expand_as(target))

    def none(buffer: Any) -> torch.Tensor:
        return _sized(buffer).zero_()

    return {
        first_list: counts,
        first_list + 1: indices,
        first_list + 2: counts if has_ranges else none,
        first_list + 3: indices if has_ranges else none,
    }


def _sized(buffer: Any) -> torch.Tensor:
    sizes = [inductor.hint(size) for size in buffer.get_size()]
    strides = [inductor.hint(stride) for stride in buffer.get_stride()]
    return torch.empty_strided(
        sizes, strides, dtype=buffer.get_dtype(), device=buffer.get_device()
    )


def first_part_of_lse(args: BackwardArgs) -> Any:
    """The fp32 number next to lse; lse itself if it is not wide."""
    convert = torch.ops.prims.convert_element_type.default
    return inductor.call_lowering(convert, args.lse, torch.float32)


def rest_of_lse(args: BackwardArgs) -> Any:
    """What fp32 leaves of lse."""
    return _lower_lse(lambda lse: wide_lse.parts_of(lse).rest, args)


def both_parts_of_lse(args: BackwardArgs) -> Any:
    """The bits of both parts in one int64, the first part's in the upper half."""
    return _lower_lse(_bits, args)


def _bits(lse: Tensor) -> Tensor:
    first, rest = (part.view(torch.int32).to(torch.int64) for part in wide_lse.parts_of(lse))
    return (first << 32) | (rest & 0xFFFFFFFF)


def _lower_lse(formula: Callable[[Tensor], Tensor], args: BackwardArgs) -> Any:
    fake = BackwardArgs(*inline.fake_operands()).lse
    return inline.lower_formula(lambda lse: [formula(lse)], [fake], [args.lse])[0]
