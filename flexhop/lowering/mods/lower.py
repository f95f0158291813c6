"""Lower user functions: from FX graphs to Inductor buffers for the holes of templates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from flexhop.analysis import (
    INDICES,
    SELECT,
    analyse,
    copied,
    dependents,
    elements_of,
    instructions_in_asked_mask,
    instructions_in_mask,
    is_function,
    truth_of,
)
from flexhop.compat.kernels import inductor, pointwise
from flexhop.compat.kernels.pointwise import placeholder
from flexhop.lowering.mods.analysed import (
    JOINT,
    SCORE,
    SIZES,
    analyse_kernel,
    analysed,
    kernel_graph,
    per_graph,
    reads_of,
)
from flexhop.lowering.mods.arithmetic import cheaper
from flexhop.lowering.mods.bands import Band, key_band
from flexhop.lowering.mods.caps import fold_caps
from flexhop.lowering.mods.captured import follow_score, own_entries, queries_meet, read_sites
from flexhop.lowering.mods.distances import by_distance, has_distances
from flexhop.lowering.mods.indices import wrap_reads
from flexhop.lowering.mods.large import large_scores
from flexhop.lowering.mods.lines import key_line, zero
from flexhop.lowering.mods.loops import Loop, with_loops
from flexhop.lowering.mods.quotients import Position, alone, is_scattered
from flexhop.lowering.mods.rows import apart, copied_bytes, head_row_bytes, mask_rows, row_bytes
from flexhop.lowering.mods.separate import separated
from flexhop.lowering.problem import GradFacts, ModFacts
from flexhop.ops.args import Site
from flexhop.ops.graphs.picks import pick_first
from flexhop.templates.printers.holes import DISTANCE, ELEMENT, PAIRS, CopiedPairs

aten = torch.ops.aten
INDEX_NAMES = ("b", "h", "q_idx", "kv_idx")


class ModParts(NamedTuple):
    """A lowered score_mod that takes what it reads of a bias of pairs; see rows.Bias."""

    score: Any
    row: Any
    pairs: CopiedPairs


class ModBuffers(NamedTuple):
    """The user functions of one kernel, lowered: scalar buffers for the holes, and facts.

    line: the result of lower_line, for kernels that may follow it. by_distance: lowers score_mod
    once more, as a function of the distance as well, with the keyword of distances.by_distance.
    apart: lowers score_mod once more, without the bias of pairs that a kernel copies.
    reading: lowers all once more; tables of constants are then read, not computed for each score.
    """

    score: Any
    mask: Any
    facts: ModFacts
    line: tuple[Any, ...] = ()
    by_distance: Callable[..., Any] | None = None
    apart: Callable[[], ModParts | None] | None = None
    reading: Callable[[], ModBuffers] | None = None


def lower_mods(
    device: torch.device,
    mods: tuple[Any, Any],
    captures: tuple[Sequence[Any], Sequence[Any]],
    sizes: Sequence[Any] | None = None,
    *,
    cap_scale: float | None = None,
) -> ModBuffers:
    """Lower score_mod and mask_mod.

    Args:
        device: device of the call.
        mods: both, as operands.
        captures: of each, lowered.
        sizes: [B, Hq, M, N]; by default those of query and key.
        cap_scale: see `foldable_scale`; None for other kernels than forward kernels.
    """
    score_graph, mask_graph = kernel_graph(mods[0], SCORE), kernel_graph(mods[1], INDICES)
    inputs = score_inputs(device)
    # In this order: caps are found in the mod as it is, and reads are made safe on the indices
    # that the kernel computes in the end.
    fast_score = cheaper(fold_caps(score_graph, cap_scale).graph, SCORE)
    safe_score = wrap_reads(fast_score, SCORE, position_sizes(sizes))
    safe_mask = wrap_reads(_fast_mask(mask_graph, "k"), INDICES, position_sizes(sizes))
    facts = read_mods(score_graph, mask_graph, cap_scale=cap_scale)
    graphs = safe_score, safe_mask
    lowered = _lower_both(graphs, inputs, captures, facts)
    if not any(map(pointwise.is_constant, (*captures[0], *captures[1]))):
        return lowered
    reading = functools.partial(_lower_both, graphs, inputs, captures, facts, reads_constants=True)
    return lowered._replace(reading=reading)


def for_rows_of_keys(
    mods: ModBuffers, mask: Any, captures: Sequence[Any], device: torch.device
) -> ModBuffers:
    """The same functions for kernels whose threads hold rows of keys: backward kernels.

    mask: mask_mod, as an operand. captures: its own, lowered. device: of the call.
    """
    graph = kernel_graph(mask, INDICES)
    of_keys = _fast_mask(graph, "q")
    if of_keys is _fast_mask(graph, "k"):
        return mods
    inputs = [*score_inputs(device)[1:], *captures]
    safe = wrap_reads(of_keys, INDICES, position_sizes())
    return mods._replace(mask=pointwise.lower(safe, inputs, "mask_mod")[0])


def _fast_mask(mask: fx.GraphModule, position: Position) -> fx.GraphModule:
    """A mask_mod in fewer instructions; position: see `alone`."""
    return cheaper(alone(separated(mask), position), INDICES)


def _lower_both(
    graphs: tuple[fx.GraphModule, fx.GraphModule],
    inputs: Sequence[Any],
    captures: tuple[Sequence[Any], Sequence[Any]],
    facts: ModFacts,
    *,
    reads_constants: bool = False,
) -> ModBuffers:
    """Lower the graphs of score_mod and mask_mod; reads_constants: see `pointwise.lower`."""
    score, mask = graphs
    given = [*inputs, *captures[0]], [*inputs[1:], *captures[1]]
    lower = functools.partial(pointwise.lower, reads_constants=reads_constants)
    (score_buffer,) = lower(score, given[0], "score_mod")
    (mask_buffer,) = lower(mask, given[1], "mask_mod")
    again = functools.partial(_lower_by_distance, lower, score, inputs, captures[0])
    parts = functools.partial(_lower_apart, lower, score, inputs, captures[0])
    return ModBuffers(score_buffer, mask_buffer, facts, by_distance=again, apart=parts)


def _lower_by_distance(
    lower: Callable[..., list[Any]],
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    captures: Sequence[Any],
    *,
    has_others: bool,
) -> Any:
    distance = placeholder(DISTANCE, torch.int32, inductor.device_of(inputs[0]))
    given = [*inputs, distance, *captures]
    return lower(by_distance(graph, has_others=has_others), given, "score_mod")[0]


def _lower_apart(
    lower: Callable[..., list[Any]],
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    captures: Sequence[Any],
) -> ModParts | None:
    captures = inductor.realize(captures)
    bias = apart(graph, captures)
    if bias is None:
        return None
    pairs = placeholder(PAIRS, torch.float32, inductor.device_of(inputs[0]))
    (score,) = lower(bias.score, [*inputs, pairs, *captures], "score_mod")
    (row,) = lower(bias.row, [*inputs, *captures], "score_mod")
    return ModParts(score, row, bias.pairs)


def lower_line(device: torch.device, score: Any, captures: Sequence[Any]) -> tuple[Any, ...]:
    """Lower slope and bend of the line over keys that a score_mod adds; 0 if it adds none."""
    graph = kernel_graph(score, SCORE)
    parts = (part or zero(graph) for part in key_line(graph) or (None, None))
    safe_parts = [wrap_reads(part, SCORE, position_sizes()) for part in parts]
    inputs = [*score_inputs(device), *captures]
    return tuple(pointwise.lower(part, inputs, "score_mod")[0] for part in safe_parts)


def score_inputs(device: torch.device, *more: str) -> list[Any]:
    """Inputs of a function of one score: score and indices, then numbers of these names.

    The names are those of the variables in templates.
    """
    first, *rest = (placeholder(n, torch.float32, device) for n in ("score", *more))
    indices = (placeholder(name, torch.int32, device) for name in INDEX_NAMES)
    return [first, *indices, *rest]


def read_mods(
    score: fx.GraphModule, mask: fx.GraphModule, *, cap_scale: float | None = None
) -> ModFacts:
    """The facts of both user functions; cap_scale: as in `lower_mods`."""
    score, mask = kernel_graph(score, SCORE), kernel_graph(mask, INDICES)
    folded = fold_caps(score, cap_scale)
    score_reads, mask_reads = (
        reads_of(analysed(mod, roles)) for mod, roles in ((score, SCORE), (mask, INDICES))
    )
    at, mask_at = ([positions for _, positions in reads] for reads in (score_reads, mask_reads))
    score_depends, mask_depends = _depends(score, SCORE), _depends(mask, INDICES)
    asked, band = analyse_kernel(alone(mask, "k"), INDICES), key_band(mask)
    mask_cost = asked.instructions(of=instructions_in_mask)
    asked_by_keys = analyse_kernel(alone(mask, "q"), INDICES)
    asked_cost = asked.instructions(of=instructions_in_asked_mask)
    asked_grad_cost = asked_by_keys.instructions(of=instructions_in_asked_mask, rows="k")
    # A score that stays as it is would be a line of slope 0.
    line = None if is_identity(score) else key_line(score)
    return ModFacts(
        has_score_mod=not is_identity(score),
        has_mask_mod=not is_all_true(mask),
        reads_per_element=any(map(all, at)),
        reads_by_position=any(map(any, at)),
        reads_score="score" in score_depends,
        # The cost is of what a forward kernel computes, the other facts are of the mod.
        score_cost=analysed(folded.graph, SCORE).instructions(),
        takes_products=folded.takes_products,
        has_key_slope=line is not None,
        has_key_bend=line is not None and line.bend is not None,
        mask_reads=bool(mask.graph.find_nodes(op="call_function", target=aten.index.Tensor)),
        mask_reads_by_position=any(map(any, mask_at)),
        key_bytes=_read_bytes(score_reads, {(False, True)}),
        mask_key_bytes=_read_bytes(mask_reads, {(False, True), (True, True)}),
        mask_reads_per_element=any(map(all, mask_at)),
        mask_uses_batch="b" in mask_depends,
        mask_uses_head="h" in mask_depends,
        mask_uses_query="q" in mask_depends,
        mask_cost=mask_cost and mask_cost + SELECT,
        asked_cost=asked_cost and asked_cost + SELECT,
        asked_grad_cost=asked_grad_cost and asked_grad_cost + SELECT,
        mask_band=band,
        mask_keeps_own=_keeps_own(mask, band),
        mask_is_scattered=is_scattered(mask),
        pair_bytes=_pair_bytes(score_reads),
        mask_pair_bytes=_pair_bytes(mask_reads),
        mask_rows=mask_rows(mask),
        has_distances=line is None and has_distances(score),
        row_bytes=row_bytes(score),
        copied_bytes=copied_bytes(score),
        head_row_bytes=head_row_bytes(score, SCORE) + head_row_bytes(mask, INDICES),
        score_uses_keys="k" in score_depends,
        reads_captured=line is None and any(x.users for x in analysed(score, SCORE).mod.captures),
        longest_row=_longest_row(score),
        # A cap is as small as its factor, and the exponents of 2 that it returns need no factor.
        large_scores="no" if folded.takes_products else large_scores(score),
    )


def read_joint(
    joint: Any, sites: Sequence[Site] = (), sizes: Sequence[Any] | None = None
) -> GradFacts:
    """The facts of a joint graph.

    Args:
        joint: the graph.
        sites: those that get gradients.
        sizes: [B, Hq, M, N], if sites are given.
    """
    found = analysed(joint, JOINT)
    reads_score = "score" in found.forms.of_all(found.mod.results)
    is_additive = found.mod.result is found.mod.inputs["grad"]  # the derivative is 1
    return GradFacts(
        has_score_grad=not is_additive,
        grad_cost=found.instructions(),
        grad_reads_score=reads_score,
        grad_has_functions=any(map(is_function, found.mod.operators)),
        captured_reads=read_sites(joint, sites),
        queries_meet=queries_meet(joint, sites),
        own_entries=frozenset() if sizes is None else own_entries(joint, sites, sizes),
        captured_follow_score=follow_score(joint, sites),
    )


@per_graph
def _keeps_own(mask: fx.GraphModule, band: Band | None) -> bool:
    """Whether a mask_mod is True if both positions are the same; band: its `key_band`."""
    if band is not None:  # the same for all spellings
        return band.first <= 0 < band.end
    own, _ = copied(mask)
    _, _, q_idx, kv_idx, *_ = own.graph.find_nodes(op="placeholder")
    kv_idx.replace_all_uses_with(q_idx)
    own.recompile()
    found = analyse(own, INDICES, SIZES)
    return truth_of(found.forms, found.mod.result) is True


def _longest_row(score: fx.GraphModule) -> int:
    """See ModFacts.longest_row; of rows of which one element is read, only what it needs."""
    graph, _ = copied(score)
    pick_first(graph)
    operators = (node for node in graph.graph.nodes if node.op == "call_function")
    return max(map(elements_of, operators), default=1)


def _depends(mod: fx.GraphModule, roles: tuple[str, ...]) -> frozenset[str]:
    """The inputs that a user function depends on."""
    found = analysed(mod, roles)
    return found.forms.depends_on(found.mod.result)


def _read_bytes(
    reads: Sequence[tuple[fx.Node, tuple[bool, bool]]], at: set[tuple[bool, bool]]
) -> frozenset[int]:
    """Sizes of the elements that are read at such positions; see ModFacts.key_bytes."""
    found = (read for read, positions in reads if positions in at)
    return frozenset(read.meta["val"].dtype.itemsize for read in found)


def _pair_bytes(reads: Sequence[tuple[fx.Node, tuple[bool, bool]]]) -> int:
    """See ModFacts.pair_bytes."""
    pairs = [read for read, positions in reads if all(positions)]
    behind = dependents(pairs)
    return sum(read.meta["val"].dtype.itemsize for read in pairs if read not in behind)


def position_sizes(sizes: Sequence[Any] | None = None) -> dict[str, Any]:
    """The sizes of the call's indices, by name: `sizes`, or those of query and key."""
    if sizes is None:
        batch, heads, length, _ = inductor.operand_meta(0).shape
        sizes = (batch, heads, length, inductor.operand_meta(1).size(2))
    return dict(zip(INDICES, sizes, strict=True))


class LoweredJoint(NamedTuple):
    """A joint graph, lowered.

    functions: gradient of the score, values and indices of the sites, then those of the loops.
    """

    functions: list[Any]
    loops: tuple[Loop, ...]


def lower_joint(
    device: torch.device, joint: Any, captures: Sequence[Any], sites: Sequence[Site],
    sizes: Sequence[Any] | None = None,
) -> LoweredJoint:  # fmt: skip
    """Lower the joint graph; sizes: as in `lower_mods`."""
    inputs = score_inputs(device, "grad_score")
    fast = cheaper(kernel_graph(joint, JOINT), JOINT)
    safe, loops = with_loops(wrap_reads(fast, JOINT, position_sizes(sizes), sites), sites)
    given = [*inputs, *captures]
    if loops:
        given.append(placeholder(ELEMENT, torch.int32, device))
    return LoweredJoint(pointwise.lower(safe, given, "the gradient of score_mod"), loops)


def is_identity(score: Any) -> bool:
    """Whether a score_mod, as an operand or a graph, returns its score."""
    mod = analysed(score, SCORE).mod
    return mod.result is mod.inputs["score"]


def is_all_true(mask: Any) -> bool:
    """Whether a mask_mod, as an operand or a graph, is always True."""
    found = analysed(mask, INDICES)
    return truth_of(found.forms, found.mod.result) is True
