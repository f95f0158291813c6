"""User functions as FX graphs: example inputs, hoisting, and the joint graph of score_mod.

Gradients of captured tensors do not go through autograd's own scatter. Every read of a captured
tensor that needs a gradient (a *site*) becomes an input of the differentiated function, so its
gradient is one scalar per score element, and the operator adds it at the site's indices. Work that
a mod does on captured tensors alone, such as `slopes.exp()[h]`, is hoisted out of the mod and
differentiated by autograd.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from flexhop.compat.hop import capture_like, isolated_trace, trace_callable
from flexhop.compat.indexing import IndexMode
from flexhop.compat.kept import is_marked, keeping, mark
from flexhop.errors import UnsupportedFeatureError
from flexhop.ops.args import Capture
from flexhop.ops.examples import (
    NUM_INDICES,
    index_examples,
    joint_examples,
    key_examples,
    score_dtype,
    score_examples,
)

aten = torch.ops.aten
NUM_SCORE_INPUTS = 1 + NUM_INDICES
MAX_ROW = 16  # elements of a row read at once, such as a position in space: each becomes a site


def needs_grad(captures: Sequence[Capture]) -> tuple[bool, ...]:
    """Which captures are tensors that require a gradient."""
    return tuple(isinstance(c, Tensor) and c.requires_grad for c in captures)


def trace_score(
    score_mod: Callable[..., Tensor], query: Tensor, captures: Sequence[Capture]
) -> fx.GraphModule:
    """FX graph of (score, b, h, q_idx, kv_idx, *captures) -> score; see `trace_joint`."""
    with isolated_trace(query, *captures), IndexMode():
        examples = [
            *score_examples(query.device, score_dtype(query)),
            *map(capture_like, captures),
        ]
        return trace_callable(score_mod, examples)


def trace_mask(
    mask_mod: Callable[..., Tensor], query: Tensor, captures: Sequence[Capture]
) -> fx.GraphModule:
    """FX graph of (b, h, q_idx, kv_idx, *captures) -> bool."""
    with isolated_trace(query, *captures), IndexMode():
        return trace_callable(
            mask_mod, [*index_examples(query.device), *map(capture_like, captures)]
        )


def trace_key(
    key_mod: Callable[..., Tensor], query: Tensor, captures: Sequence[Capture]
) -> fx.GraphModule:
    """FX graph of (x, b, h, kv_idx, *captures) -> x, of a key_mod or a value_mod."""
    with isolated_trace(query, *captures), IndexMode():
        examples = [*key_examples(query.device, score_dtype(query)), *map(capture_like, captures)]
        return trace_callable(key_mod, examples)


class Joint(NamedTuple):
    """The derivative of one score_mod."""

    score_mod: Callable[..., Tensor]  # over the hoisted captures
    joint: fx.GraphModule  # see BackwardArgs
    captures: tuple[Capture, ...]  # hoisted: differentiable inputs of the operator
    sites: tuple[int, ...]  # see BackwardArgs


def trace_joint(
    score_mod: Callable[..., Tensor],
    query: Tensor,
    captures: Sequence[Capture],
    wanted: Sequence[bool] | None = None,
) -> Joint:
    """Differentiate `score_mod`.

    Args:
        score_mod: (score, b, h, q_idx, kv_idx, *captures) -> score, traceable.
        query: gives the device and dtype of the trace.
        captures: the mod's captures.
        wanted: which captures get a gradient; by default those that require one.

    Raises:
        UnsupportedFeatureError: a captured tensor that needs a gradient is used in other ways than
            reading single elements or short rows.
    """
    needs = tuple(needs_grad(captures) if wanted is None else wanted)
    forms = tuple(c if not isinstance(c, Tensor) else (c.shape, c.dtype) for c in captures)
    key = (trace_joint, score_dtype(query), query.device, forms, needs, wanted is None)
    parts = keeping(key, score_mod, lambda: _Parts(*_hoisted(score_mod, query, captures, needs)))
    moved = parts.before(*captures) if parts.before is not None else ()
    hoisted = (*(captures[i] for i in parts.kept), *moved)
    if parts.joint is None:
        changed = needs_grad(moved) if wanted is None else [True] * len(moved)
        with isolated_trace(query, *hoisted), IndexMode():
            inputs = list(map(capture_like, hoisted))
            parts.joint, parts.sites = _differentiate(
                parts.main, query, inputs, (*[False] * len(parts.kept), *changed)
            )
    return Joint(parts.main, parts.joint, hoisted, parts.sites)


@dataclasses.dataclass
class _Parts:
    """Parts that calls with the same mod share."""

    main: fx.GraphModule
    before: fx.GraphModule | None
    kept: list[int]
    joint: fx.GraphModule | None = None
    sites: tuple[int, ...] = ()


def _hoisted(
    score_mod: Callable[..., Tensor], query: Tensor, captures: Sequence[Capture],
    needs: Sequence[bool],
) -> tuple[fx.GraphModule, fx.GraphModule | None, list[int]]:  # fmt: skip
    graph = trace_score(score_mod, query, captures)
    _compose_reads(graph)
    main, before, kept = _hoist(graph, needs)
    return (mark(main) if is_marked(score_mod) else main), before, kept


def _compose_reads(graph: fx.GraphModule) -> None:
    """table[b][q] -> table[b, q]: merge a chain of reads of leading dimensions into one."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.index.Tensor):
        inner = node.args[0]
        if (
            inner.target is aten.select.int
            and inner.args[1] == 0
            and isinstance(inner.args[2], int)
        ):
            with graph.graph.inserting_before(node):
                first = graph.graph.call_function(
                    aten.full.default,
                    ([], inner.args[2]),
                    {"dtype": torch.int32, "device": _device(node)},
                )
            first.meta["val"] = node.args[1][0].meta["val"]
            node.args = (inner.args[0], [first, *node.args[1]])
        elif inner.target is aten.index.Tensor and _is_scalar_read(inner):
            node.args = (inner.args[0], [*inner.args[1], *node.args[1]])
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _device(node: fx.Node) -> torch.device:
    return node.meta["val"].device


def _is_scalar_read(node: fx.Node) -> bool:
    indices = cast("Sequence[fx.Node | None]", node.args[1])
    return all(index is not None and index.meta["val"].dim() == 0 for index in indices)


def _hoist(
    graph: fx.GraphModule, wanted: Sequence[bool]
) -> tuple[fx.GraphModule, fx.GraphModule | None, list[int]]:
    """Split off the work that depends only on differentiable captures.

    Returns:
        The mod over (score, b, h, q_idx, kv_idx, kept captures..., hoisted tensors...); the
        function from all captures to the hoisted tensors, or None; the positions of the kept
        captures.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    captures = placeholders[NUM_SCORE_INPUTS:]
    per_element = _dependents(graph, placeholders[:NUM_SCORE_INPUTS])
    differentiable = _dependents(
        graph, [c for c, want in zip(captures, wanted, strict=True) if want]
    )
    border = [
        node
        for node in graph.graph.nodes
        if node in differentiable
        and node not in per_element
        and node.op != "output"
        and any(user in per_element or user.op == "output" for user in node.users)
    ]
    kept = [i for i, c in enumerate(captures) if c not in differentiable and c.users]
    before = _subgraph(graph, captures, border) if border else None
    outputs = graph.graph.output_node().args[0]
    inputs = [*placeholders[:NUM_SCORE_INPUTS], *(captures[i] for i in kept), *border]
    main = _subgraph(graph, inputs, [outputs], single=True)
    return main, before, kept


def _dependents(graph: fx.GraphModule, roots: Sequence[fx.Node]) -> set[fx.Node]:
    found = set(roots)
    for node in graph.graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _subgraph(
    graph: fx.GraphModule,
    inputs: Sequence[fx.Node],
    outputs: Sequence[Any],
    *,
    single: bool = False,
) -> fx.GraphModule:
    """The part of `graph` that computes `outputs` from `inputs`."""
    part = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(inputs):
        known[node] = part.placeholder(
            f"{node.name}" if node.op == "placeholder" else f"hoisted_{position}"
        )
        known[node].meta = dict(node.meta)
    for node in graph.graph.nodes:
        if node not in known and node.op not in ("placeholder", "output") and _ready(node, known):
            known[node] = part.node_copy(node, known.__getitem__)
    results = [known[o] if isinstance(o, fx.Node) else o for o in outputs]
    part.output(results[0] if single else tuple(results))
    module = fx.GraphModule(graph, part)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _ready(node: fx.Node, known: dict[fx.Node, fx.Node]) -> bool:
    return all(source in known for source in node.all_input_nodes)


def _differentiate(
    main: fx.GraphModule, query: Tensor, captures: list[Any], wanted: Sequence[bool]
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Joint graph of `main`, traced on the examples `captures`; see BackwardArgs."""
    reads = _find_reads(main, wanted)
    reader = _subgraph(main, main.graph.find_nodes(op="placeholder"), _read_outputs(reads))
    body = _with_reads_as_inputs(main, reads)

    def joint(*inputs: Any) -> tuple[Tensor, ...]:
        mod_inputs = (*inputs[:NUM_SCORE_INPUTS], *inputs[NUM_SCORE_INPUTS + 1 :])
        grad_score = inputs[NUM_SCORE_INPUTS]
        found = reader(*mod_inputs) if reads else ()
        values, indices = found[: len(reads)], found[len(reads) :]
        first, *grads = _score_gradients(body, mod_inputs, values, grad_score)
        return (first, *_element_grads(reads, grads), *_element_indices(reads, indices))

    examples = [*joint_examples(query.device, score_dtype(query)), *captures]
    graph = trace_callable(joint, examples)
    for node in graph.graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    graph.recompile()
    sites = [
        number
        for read in reads
        for element in read.elements
        for number in (read.capture, len(read.indices) + len(element))
    ]
    return graph, tuple(sites)


def _element_grads(reads: Sequence[_Read], grads: Sequence[Tensor]) -> list[Tensor]:
    """One scalar gradient per element read."""
    found = []
    for read, grad in zip(reads, grads, strict=True):
        for element in read.elements:
            value = grad
            for position in element:
                value = aten.select.int(value, 0, position)
            found.append(value)
    return found


def _element_indices(reads: Sequence[_Read], indices: Sequence[Tensor]) -> list[Tensor]:
    """The index of each element in its capture: indices of the read, then place in the row."""
    found: list[Tensor] = []
    start = 0
    for read in reads:
        own = indices[start : start + len(read.indices)]
        start += len(read.indices)
        for element in read.elements:
            places = [
                torch.full((), place, dtype=torch.int32, device=own[0].device) for place in element
            ]
            found += [*own, *places]
    return found


def _score_gradients(
    body: Callable[..., Tensor], mod_inputs: Sequence[Any], values: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of body(score, ..., *values) for score and values; zeros for unused ones."""
    with torch.enable_grad():
        leaves = [leaf.detach().requires_grad_() for leaf in (mod_inputs[0], *values)]
        result = body(leaves[0], *mod_inputs[1:], *leaves[1:])
        if not result.requires_grad:
            return tuple(torch.zeros_like(leaf) for leaf in leaves)
        grads = torch.autograd.grad(result, leaves, grad.to(result.dtype), allow_unused=True)
    return tuple(
        torch.zeros_like(leaf) if g is None else g
        for leaf, g in zip(leaves, cast("Sequence[Tensor | None]", grads), strict=True)
    )


class _Read(NamedTuple):
    capture: int
    node: fx.Node  # its value is the element, or the short row, that is read
    indices: tuple[fx.Node, ...]
    elements: tuple[tuple[int, ...], ...] = ((),)  # positions in the row; a scalar has one: ()


def _find_reads(main: fx.GraphModule, wanted: Sequence[bool]) -> list[_Read]:
    """Every read of a differentiable capture."""
    placeholders = main.graph.find_nodes(op="placeholder")[NUM_SCORE_INPUTS:]
    reads = []
    for position, (capture, want) in enumerate(zip(placeholders, wanted, strict=True)):
        if not want:
            continue
        if capture.meta["val"].dim() == 0:
            reads.append(_Read(position, capture, ()))
            continue
        for user in capture.users:
            if user.target is aten.detach.default:
                continue
            elements = _elements_read(user)
            if elements is None:
                raise UnsupportedFeatureError(
                    feature=f"score_mod applies {user.target} to a captured tensor that needs a "
                    "gradient; this",
                    reason="only indexing such as table[h, q_idx - kv_idx] has a gradient; it "
                    f"must read one element or a row of at most {MAX_ROW}",
                    mend="Index the tensor down to one element, or detach it",
                )
            reads.append(_Read(position, user, tuple(user.args[1]), elements))
    return reads


def _elements_read(user: fx.Node) -> tuple[tuple[int, ...], ...] | None:
    """Positions in the row that an index operation reads; None for any other operation."""
    if user.target is not aten.index.Tensor or not _is_scalar_read(user):
        return None
    shape = [int(size) for size in user.meta["val"].shape]  # guards on a symbolic size
    if math.prod(shape) > MAX_ROW:
        return None
    return tuple(itertools.product(*map(range, shape)))


def _read_outputs(reads: Sequence[_Read]) -> list[fx.Node]:
    return [*(read.node for read in reads), *(index for read in reads for index in read.indices)]


def _with_reads_as_inputs(main: fx.GraphModule, reads: Sequence[_Read]) -> fx.GraphModule:
    """`main` with one more input per read, whose value replaces the read."""
    copied: dict[fx.Node, fx.Node] = {}
    body = fx.Graph()
    outputs = body.graph_copy(main.graph, copied)
    last = body.find_nodes(op="placeholder")[-1]
    with body.inserting_after(last):
        inputs = [body.placeholder(f"read_{i}") for i in reversed(range(len(reads)))][::-1]
    for read, new in zip(reads, inputs, strict=True):
        old = copied[read.node]
        old.replace_all_uses_with(
            new, delete_user_cb=lambda user: user.target is not aten.detach.default
        )
    if isinstance(outputs, fx.Node):
        replaced = {copied[read.node]: new for read, new in zip(reads, inputs, strict=True)}
        outputs = replaced.get(outputs, outputs)
    body.output(outputs)
    module = fx.GraphModule(main, body)
    module.recompile()
    return module
