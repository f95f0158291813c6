"""Parts of a score_mod with few distinct values: precomputed as tables that kernels read.

T5's buckets, Swin's two-dimensional bias or a decay depend only on a distance. If such a part
costs more than a read, plain operators compute it before attention, for every value of its inputs,
and Inductor compiles them. Its gradient is the gradient of a captured table and continues through
these operators by ordinary autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx

from flexhop.analysis import (
    INDICES,
    Analysis,
    Coordinate,
    analyse,
    carries_gradients,
    dependents,
    is_smooth,
)
from flexhop.compat.compilation import forms_of, once
from flexhop.compat.mods.own_backward import has_own_backward
from flexhop.compat.operators import hop, transforms
from flexhop.compat.sizes import hint_of
from flexhop.mods.bounded import BOUNDED
from flexhop.ops.args import AttentionArgs, CachedArgs, Capture, index_sizes, score_dtype
from flexhop.ops.graphs.own_positions import (
    may_have_positions,
    may_search,
    may_see_head,
    read_at_own_positions,
)
from flexhop.ops.graphs.pair_tables import choose_pairs
from flexhop.ops.graphs.subgraphs import INPUTS, may_derive, trace_mask, trace_score
from flexhop.ops.graphs.table_choice import LARGEST, Choice, Wanted
from flexhop.ops.graphs.table_costs import kernels_of
from flexhop.ops.graphs.table_entries import Extents, Maker, Sizes, Table, sizes_of
from flexhop.ops.graphs.table_reads import with_reads

aten = torch.ops.aten
_ENTRY = 4  # bytes of one


class Tabulated(NamedTuple):
    """A mod that reads tables.

    Args:
        mod: takes what the mod takes, and *captures.
        captures: captured tensors, then tables.
        sizes: size of each table.
        saved: instructions per score that the tables save.
    """

    mod: Callable[..., Tensor]
    captures: tuple[Capture, ...]
    sizes: tuple[tuple[int, ...], ...]
    saved: float


Call = TypeVar("Call", bound=AttentionArgs | CachedArgs)


def tabulate(args: AttentionArgs | CachedArgs, *, is_pushed: bool = False) -> Tabulated | None:
    """Move parts of a call's score_mod into tables if reading them is cheaper; None if none is.

    Tables are differentiable functions of the captures. Sizes may be symbols: tables then have as
    many entries as the call needs, and this compilation's sizes decide whether they pay off. A
    call that reads a cache has only those without which there would be no kernel.
    """
    mod, captures = args.score_mod, args.score_captures
    if has_own_backward(mod):  # a table's gradient is that of operators
        return None
    wanted = Wanted(
        INPUTS, kernels_of(args), _most_entries(args), _is_differentiated(args),
        bool(args.options.get("deterministic")), only_needed=isinstance(args, CachedArgs),
        is_pushed=is_pushed,
    )  # fmt: skip

    def choose(sizes: Sizes) -> _Chosen | None:
        graph = read_at_own_positions(
            trace_score(mod, args.query, captures, is_pushed=is_pushed), INPUTS
        )
        return _choose(graph, captures, sizes, wanted)

    return _tabulate(args, mod, captures, choose, wanted)


def tabulate_mask(args: AttentionArgs | CachedArgs) -> Tabulated | None:
    """The same of a mask_mod: tables of what depends on a key alone, in packed sequences.

    Other masks become bits or ranges, which read nothing per key, unless they compute with short
    rows of numbers, such as the ends of all segments: these have tables, too. Masks that heads do
    not share are evaluated for every head: they have tables of what depends on a distance.
    """
    mod, captures = args.mask_mod, args.mask_captures
    if not (may_have_positions(mod) or may_search(mod) or may_see_head(mod)):
        return None

    only_needed = isinstance(args, CachedArgs)
    wanted = Wanted(INDICES, kernels_of(args), _most_entries(args), only_needed=only_needed)

    def choose(sizes: Sizes) -> _Chosen | None:
        graph = trace_mask(mod, args.query, captures)
        own = read_at_own_positions(graph, INDICES) if may_have_positions(mod) else graph
        return _choose(own, captures, sizes, wanted._replace(only_rows=own is graph))

    return _tabulate(args, mod, captures, choose, wanted)


def _most_entries(args: AttentionArgs | CachedArgs) -> int:
    """A table may take no more memory than the operands."""
    taken = (math.prod(map(hint_of, x.shape)) * x.dtype.itemsize for x in args[:3])
    return min(LARGEST, sum(taken) // _ENTRY)


def _is_differentiated(args: AttentionArgs | CachedArgs) -> bool:
    """Whether scores have a gradient."""
    return args.query.requires_grad or args.key.requires_grad


def _tabulate(
    args: AttentionArgs | CachedArgs, mod: Any, captures: Sequence[Any],
    choose: Callable[[Sizes], _Chosen | None], wanted: Wanted,
) -> Tabulated | None:  # fmt: skip
    query = args.query
    given: dict[str, Any] = dict(zip(INDICES, index_sizes(args), strict=True))
    if not all(isinstance(c, (Tensor, int, torch.SymInt)) for c in captures):
        return None
    needs = may_derive(captures)
    forms = forms_of((*captures, *given.values()))
    key = (tabulate, score_dtype(query), query.device, forms, needs, wanted)
    choice = once(key, mod, lambda: choose(sizes_of(given)))
    if choice is None:
        return None
    extents = Extents(choice.found, given)
    maker = Maker(choice.found, captures, extents)
    made = tuple(maker.make(table) for table in choice.tables)
    shapes = tuple(tuple(table.shape) for table in made)
    firsts = (extents.of(axis) for axis in choice.moving)
    places = (-first[0] for first in firsts if first is not None)
    captures = (*(captures[i] for i in choice.kept), *places, *made)
    return Tabulated(choice.mod, captures, shapes, choice.saved)


class _Chosen(NamedTuple):
    """The tables of a mod.

    mod: reads the captures `kept`, then for each axis of `moving` where its first value is, then
    the tables. saved: see Tabulated.
    """

    found: Analysis
    tables: Sequence[Table]
    mod: fx.GraphModule
    kept: tuple[int, ...]
    moving: tuple[Coordinate, ...]
    saved: float


def _choose(
    graph: fx.GraphModule, captures: Sequence[Capture], sizes: Sizes, wanted: Wanted
) -> _Chosen | None:
    stops = _stops(graph, captures, wanted.inputs)
    # The analysis computes with concrete numbers, outside any surrounding trace.
    with hop.without_modes():
        found = analyse(graph, wanted.inputs, sizes.bounds, held=(BOUNDED,), kept=stops)
    if len(found.mod.captures) != len(captures):
        return None
    choice = Choice(found, captures, sizes, wanted)
    with hop.without_modes():
        choice.look_at(found.mod.result)
        choose_pairs(choice)
    if not choice.tables:
        return None
    rewritten = with_reads(found, choice.tables, choice.firsts)
    return _Chosen(found, choice.tables, *rewritten, choice.saved)


def _stops(
    graph: fx.GraphModule, captures: Sequence[Capture], inputs: Sequence[str]
) -> list[fx.Node]:
    """Where a mod detaches what depends on the score, or on captured tensors with gradients.

    The analysis drops other `detach`, which change nothing.
    """
    given, needs = graph.graph.find_nodes(op="placeholder"), may_derive(captures)
    roots = {n for n, need in zip(given[len(inputs) :], needs, strict=True) if need}
    roots |= {n for n, name in zip(given, inputs, strict=False) if name == "score"}
    followed = dependents(roots, carries_gradients)
    stops = graph.graph.find_nodes(op="call_function", target=aten.detach.default)
    return [node for node in stops if node in followed]


def with_tables(args: Call, *, is_pushed: bool = False) -> tuple[Call, Tabulated | None]:
    """A call whose mods read tables, and those of its score_mod; the same call and None if they
    save nothing. is_pushed: see `trace_score`."""
    score, mask = tabulate(args, is_pushed=is_pushed), tabulate_mask(args)
    if score is not None:
        args = args._replace(score_mod=score.mod, score_captures=score.captures)
    if mask is not None:
        args = args._replace(mask_mod=mask.mod, mask_captures=mask.captures)
    return args, score


def push_tables(args: AttentionArgs, moved: AttentionArgs) -> tuple[AttentionArgs, AttentionArgs]:
    """A call with tables as `with_tables` makes them, and the tangents of its captures.

    moved: tangents of the operands, or None.
    """
    given, changes = list(args.score_captures), moved.score_captures
    along = [i for i, tangent in enumerate(changes) if tangent is not None]
    fixed = {id(c) for i, c in enumerate(given) if i not in along}
    found = [args]

    def make(*tensors: Tensor) -> tuple[Tensor, ...]:
        captures = [*given]
        for i, tensor in zip(along, tensors, strict=True):
            captures[i] = tensor
        args_of_level = args._replace(score_captures=tuple(captures))
        found[0], _ = with_tables(args_of_level, is_pushed=True)
        return tuple(c for c in found[0].score_captures if is_made(c))

    def is_made(capture: Any) -> bool:
        return isinstance(capture, Tensor) and id(capture) not in fixed

    if along:
        primals, tangents = (tuple(held[i] for i in along) for held in (given, changes))
        pushed = zip(*transforms.jvp(make, primals, tangents), strict=True)
    else:
        pushed = ((made, None) for made in make())
    pairs = [next(pushed) if is_made(c) else (c, None) for c in found[0].score_captures]
    captures = tuple(capture for capture, _ in pairs)
    dots = tuple(dot if is_made(c) and is_smooth(c) else None for c, dot in pairs)
    return (
        found[0]._replace(score_captures=captures),
        moved._replace(score_captures=dots, mask_captures=(None,) * len(found[0].mask_captures)),
    )
