"""User functions as FX graphs: example inputs, hoisting, and the joint graph of score_mod.

Gradients of captured tensors do not go through autograd's own scatter. Every read of a captured
tensor that needs a gradient (a *site*) becomes an input of the differentiated function, so its
gradient is one scalar per score element, and the operator adds it at the site's indices. Work that
a mod does on captured tensors alone, such as `slopes.exp()[h]`, is hoisted out of the mod and
differentiated by autograd.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from flexhop.analysis import INDICES, dependents, is_smooth, passes_gradients
from flexhop.compat.compilation import copy_of, forms_of, is_marked, mark, once, say
from flexhop.compat.modes import DetachMode
from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.mods.own_backward import (
    deriving,
    drop_own_gradients,
    place_own_gradients,
    trace_form,
)
from flexhop.compat.operators import transforms
from flexhop.compat.operators.hop import capture_like, isolated_trace
from flexhop.compat.operators.retrace import trace_callable
from flexhop.ops.args import (
    Capture,
    index_examples,
    joint_examples,
    key_examples,
    score_dtype,
    score_examples,
)
from flexhop.ops.derivatives.smooth import smooth
from flexhop.ops.graphs.own_positions import read_at_own_positions
from flexhop.ops.graphs.picks import pick_first
from flexhop.ops.graphs.places import one_place_at_a_time
from flexhop.ops.graphs.reads import (
    NUM_SCORE_INPUTS,
    compose_reads,
    part_of,
    split_reads,
)

aten = torch.ops.aten
INPUTS = ("score", *INDICES)  # of a score_mod, before its captures


def needs_grad(captures: Sequence[Capture]) -> tuple[bool, ...]:
    """Which captures are tensors that require a gradient."""
    return tuple(isinstance(c, Tensor) and c.requires_grad for c in captures)


def may_derive(captures: Sequence[Capture]) -> tuple[bool, ...]:
    """Which captures may have derivatives, at any level; tangents are passed beside them."""
    if transforms.is_deriving():
        return tuple(map(is_smooth, captures))
    return needs_grad(captures)


def trace_score(
    score_mod: Callable[..., Tensor], query: Tensor, captures: Sequence[Capture],
    *, is_pushed: bool = False,
) -> fx.GraphModule:  # fmt: skip
    """FX graph of (score, b, h, q_idx, kv_idx, *captures) -> score; see `trace_joint`.

    The graph is not to be changed: later calls get it, too.

    is_pushed: for forward mode, which goes through `torch.no_grad()`.
    """

    def make() -> fx.GraphModule:
        stops = contextlib.nullcontext() if is_pushed else DetachMode()
        with isolated_trace(query, *captures), IndexMode(), torch.enable_grad(), stops:
            examples = score_examples(query.device, score_dtype(query))
            graph = trace_callable(score_mod, [*examples, *map(capture_like, captures)])
        place_own_gradients(graph)
        pick_first(graph)
        return graph

    with torch.enable_grad():
        key = _trace_key(score_mod, query, captures, is_pushed=is_pushed)
        return once(key, score_mod, make)


def _trace_key(
    score_mod: Callable[..., Tensor], query: Tensor, captures: Sequence[Capture],
    *, is_pushed: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    return (trace_score, _form(query, captures), is_pushed, trace_form(score_mod))


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
    hoist: Callable[[Sequence[Capture]], tuple[Capture, ...]]  # from the mod's own captures


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
    # An outer torch.func.grad may differentiate what this one does not.
    outer = needs if wanted is not None else tuple(map(transforms.is_tracked, captures))
    key = (trace_joint, _form(query, captures), needs, outer, wanted is None)
    parts = once(key, score_mod, lambda: _Parts(*_hoisted(score_mod, query, captures, outer)))
    hoisted = parts.hoist(captures)
    if parts.joint is None:
        moved = hoisted[len(parts.kept) :]
        changed = needs_grad(moved) if wanted is None else [True] * len(moved)
        with isolated_trace(query, *hoisted), IndexMode():
            inputs = list(map(capture_like, hoisted))
            parts.joint, parts.sites = _differentiate(
                parts.main, query, inputs, (*[False] * len(parts.kept), *changed)
            )
            drop_own_gradients(parts.main)
        with torch.enable_grad():  # it consists of operators: it is its own trace
            say(_trace_key(parts.main, query, hoisted), parts.main, parts.main)
    return Joint(parts.main, parts.joint, hoisted, parts.sites, parts.hoist)


class Hoisted(NamedTuple):
    """A score_mod without work that it does on captured tensors alone."""

    score_mod: Callable[..., Tensor]
    captures: tuple[Capture, ...]
    tangents: tuple[Tensor | None, ...]


def hoist_tangents(
    score_mod: Callable[..., Tensor], query: Tensor, captures: Sequence[Capture],
    tangents: Sequence[Tensor | None],
) -> Hoisted:  # fmt: skip
    """Do before attention what a mod does on captures alone, if they have tangents or gradients.

    Then these derivatives continue by autograd, as in reverse mode.
    """
    wanted = tuple(
        t is not None or transforms.is_tracked(c) for c, t in zip(captures, tangents, strict=True)
    )
    if not any(wanted):
        return Hoisted(score_mod, tuple(captures), tuple(tangents))
    key = (hoist_tangents, _form(query, captures), wanted)
    parts = once(
        key, score_mod,
        lambda: _Parts(*_hoisted(score_mod, query, captures, wanted, is_pushed=True)),
    )  # fmt: skip
    return Hoisted(parts.main, *parts.push(captures, tangents))


def _form(query: Tensor, captures: Sequence[Capture]) -> tuple[Any, ...]:
    """What a trace of a mod depends on besides the mod."""
    return (score_dtype(query), query.device, *forms_of(captures))


def joint_of(
    score_mod: Callable[..., Tensor], query: Tensor, captures: Sequence[Capture],
    wanted: Sequence[bool],
) -> tuple[fx.GraphModule, tuple[int, ...]]:  # fmt: skip
    """The joint graph of a mod as it is, and its sites; see BackwardArgs.

    Raises:
        UnsupportedFeatureError: see `trace_joint`.
    """

    def make() -> tuple[fx.GraphModule, tuple[int, ...]]:
        with deriving(in_reverse=False):
            graph = copy_of(trace_score(score_mod, query, captures))
        compose_reads(graph)
        with isolated_trace(query, *captures), IndexMode():
            return _differentiate(graph, query, list(map(capture_like, captures)), wanted)

    key = (joint_of, _form(query, captures), tuple(wanted))
    return once(key, score_mod, make)


@dataclasses.dataclass
class _Parts:
    """Parts that calls with the same mod share."""

    main: fx.GraphModule
    before: fx.GraphModule | None
    kept: list[int]
    joint: fx.GraphModule | None = None
    sites: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Note whether `before` only passes captures on."""
        self._passed = None if self.before is None else _passed_on(self.before)

    def hoist(self, captures: Sequence[Capture]) -> tuple[Capture, ...]:
        """Captures of `main`, from those of the mod."""
        if self._passed is not None:
            return tuple([captures[i] for i in (*self.kept, *self._passed)])
        moved = self.before(*captures) if self.before is not None else ()
        return (*[captures[i] for i in self.kept], *moved)

    def push(
        self, captures: Sequence[Capture], tangents: Sequence[Tensor | None]
    ) -> tuple[tuple[Capture, ...], tuple[Tensor | None, ...]]:
        """Captures of `main`, and their tangents."""
        given = [i for i, tangent in enumerate(tangents) if tangent is not None]
        if self._passed is not None or self.before is None or not given:
            passed = (*self.kept, *(self._passed or ()))
            hoisted = self.hoist(captures)
            return hoisted, tuple(tangents[i] for i in passed) if given else (None,) * len(hoisted)
        before = smooth(self.before)

        def chosen(*values: Tensor) -> tuple[Any, ...]:
            known = dict(zip(given, values, strict=True))
            return tuple(before(*(known.get(i, capture) for i, capture in enumerate(captures))))

        both: Any = (captures, tangents)
        primals, dots = (tuple(values[i] for i in given) for values in both)
        moved, changes = transforms.jvp(chosen, primals, dots)
        follows = _followers(before, given)
        found = (c if is_moved else None for c, is_moved in zip(changes, follows, strict=True))
        kept = [captures[i] for i in self.kept]
        return (*kept, *moved), (*[None] * len(kept), *found)


def _passed_on(graph: fx.GraphModule) -> list[int] | None:
    """Which inputs a graph returns, if it computes nothing."""
    inputs = graph.graph.find_nodes(op="placeholder")
    outputs = graph.graph.output_node().args[0]
    is_all = isinstance(outputs, (tuple, list)) and all(node in inputs for node in outputs)
    return [inputs.index(node) for node in outputs] if is_all else None  # pyright: ignore


def _followers(graph: fx.GraphModule, given: Sequence[int]) -> list[bool]:
    """Which results of a graph have a tangent if the inputs `given` have one."""
    inputs = graph.graph.find_nodes(op="placeholder")
    moved = {inputs[i] for i in given}
    moved |= dependents(moved, passes_gradients)
    return [node in moved for node in cast("Any", graph.graph.output_node().args[0])]


def _hoisted(
    score_mod: Callable[..., Tensor], query: Tensor, captures: Sequence[Capture],
    needs: Sequence[bool], *, is_pushed: bool = False,
) -> tuple[fx.GraphModule, fx.GraphModule | None, list[int]]:  # fmt: skip
    with deriving(in_reverse=not is_pushed):
        graph = copy_of(trace_score(score_mod, query, captures, is_pushed=is_pushed))
    compose_reads(graph)
    main, before, kept = _hoist(graph, needs)
    return (mark(main) if is_marked(score_mod) else main), before, kept


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
    given = placeholders[:NUM_SCORE_INPUTS]
    trained = [c for c, want in zip(captures, wanted, strict=True) if want]
    per_element, differentiable = ({*roots, *dependents(roots)} for roots in (given, trained))
    for node in list(differentiable - per_element):
        new = one_place_at_a_time(node, per_element)
        per_element |= new
        differentiable |= new
    border = [
        node
        for node in graph.graph.nodes
        if node in differentiable
        and node not in per_element
        and node.op != "output"
        and any(user in per_element or user.op == "output" for user in node.users)
    ]
    kept = [i for i, c in enumerate(captures) if c not in differentiable and c.users]
    before = part_of(graph, captures, border) if border else None
    outputs = graph.graph.output_node().args[0]
    inputs = [*placeholders[:NUM_SCORE_INPUTS], *(captures[i] for i in kept), *border]
    main = part_of(graph, inputs, [outputs], single=True)
    return main, before, kept


def _differentiate(
    main: fx.GraphModule, query: Tensor, captures: list[Any], wanted: Sequence[bool]
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Joint graph of `main`, traced on the examples `captures`; see BackwardArgs."""
    split = split_reads(read_at_own_positions(main, INPUTS), wanted)

    def joint(*inputs: Any) -> tuple[Tensor, ...]:
        mod_inputs = (*inputs[:NUM_SCORE_INPUTS], *inputs[NUM_SCORE_INPUTS + 1 :])
        grad_score = inputs[NUM_SCORE_INPUTS]
        values, indices = split.read(*mod_inputs)
        first, *grads = _score_gradients(split.body, mod_inputs, values, grad_score)
        return (first, *split.element_grads(grads), *split.element_indices(indices))

    examples = [*joint_examples(query.device, score_dtype(query)), *captures]
    graph = trace_callable(joint, examples)
    for node in graph.graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph, split.sites


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
