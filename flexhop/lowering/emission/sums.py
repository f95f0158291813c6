"""Gradients of captured tensors: buffers that kernels add to, and their values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import sympy
import torch

from flexhop.analysis import INDICES
from flexhop.compat.kernels import inductor, pointwise
from flexhop.lowering.emission import exact_sums
from flexhop.lowering.emission.kernel import Captured
from flexhop.lowering.mods.captured import site_facts
from flexhop.ops.args import Site

_BY_PAIR = ("distance", "score")  # an entry for a pair of query and key
# Scores that add to one number, from which it has 64 bits. Gradients of 16-bit operands are known
# to eleven bits at most, and so many of them to a few more.
_MANY_SCORES = {2: 2**14, 4: 64, 8: 64}
_MOST_COPIES = 128  # templates/printers/holes.py: a copy by query and key
# Additions to one number. Copies make them fewer, but a warp's additions to neighbouring numbers
# are one access, to copies of them several. Scores are added many at a time, sums of rows are not.
_FEW_SCORES = 2**14
_FEW_ROWS = 2**9
_ROWS_OF_TILE = 64


class Reads(NamedTuple):
    """The sites of a joint graph, and how a kernel calls its functions.

    first: number of the subgraph of the joint graph's first output in kernels. is_reproducible:
    whether the sums must be the same in any order. copies: of a capture's buffer, if more than
    one. own: captures in which each score has an entry of its own, so that kernels store its
    gradient. visits_all: whether they visit every score.
    """

    joint: Any
    sites: Sequence[Site]
    captures: Sequence[Any]
    first: int
    is_reproducible: bool
    copies: Mapping[int, int] = MappingProxyType({})
    own: frozenset[int] = frozenset()
    visits_all: bool = False


def in_copies(reads: Reads, query: Any, key: Any) -> Reads:
    """The reads, with several buffers for small tensors.

    A GPU adds to one address after the other: the scores of a layer added to a table of 16 entries
    for each head take a hundred times as long as attention. Neighbouring scores add to different
    copies, whose sum is the gradient. So do rows: the scores of a query, or of a key, that read an
    entry together are summed in registers first.
    """
    copies: dict[int, int] = {}
    for site in reads.sites:
        entries = inductor.hint(reads.captures[site.capture].get_numel())
        additions = _additions(site_facts(reads.joint, site).by, query, key)
        most = min(_MOST_COPIES, int(additions) // max(entries, 1))
        if most > 1:
            found = 1 << (most.bit_length() - 1)
            copies[site.capture] = max(found, copies.get(site.capture, 1))
    return reads._replace(copies=copies)


def _additions(by: str, query: Any, key: Any) -> float:
    """Additions to the entries that scores read, in units of what one number bears."""
    batch, heads, queries, keys = map(inductor.hint, score_sizes(query, key))
    if by in _BY_PAIR:
        return batch * heads * queries * keys / _FEW_SCORES
    rows = batch * heads * (keys if by == "key" else queries)
    return rows / (_FEW_ROWS * (_ROWS_OF_TILE if by == "head" else 1))


def make_sums(reads: Reads, query: Any, key: Any) -> dict[int, Any]:
    """Buffers for the gradients, by capture: [*size, copies], or [*size] if one.

    They are zeros, unless every entry is stored.
    """
    scores = _scores(query, key)
    buffers: dict[int, Any] = {}
    for position in sorted({site.capture for site in reads.sites}):
        like = reads.captures[position]
        size = like.get_size()
        if position in reads.own:
            is_whole = reads.visits_all and inductor.is_known(sympy.Eq(like.get_numel(), scores))
            make = inductor.empty_contiguous if is_whole else inductor.zeros
            buffers[position] = make(size, like.get_dtype(), like.get_device())
            continue
        if position in reads.copies:
            size = [*size, reads.copies[position]]
        if reads.is_reproducible:
            buffers[position] = exact_sums.make_sums(size, like.get_device())
            continue
        numbers = _numbers(reads, position, query, key)
        dtype = _sum_dtype(inductor.hint(scores), numbers, query)
        buffers[position] = inductor.zeros(size, dtype, like.get_device())
    return buffers


def score_sizes(query: Any, key: Any) -> tuple[Any, ...]:
    """[B, Hq, M, N] of lowered operands."""
    return *query.get_size()[:3], key.get_size()[2]


def _scores(query: Any, key: Any) -> Any:
    return math.prod(score_sizes(query, key))


def _numbers(reads: Reads, position: int, query: Any, key: Any) -> int:
    """How many numbers of a capture's buffer are added to, at most."""
    sizes: dict[str, Any] = dict(
        zip(INDICES, map(inductor.hint, score_sizes(query, key)), strict=True)
    )
    sites = [site for site in reads.sites if site.capture == position]
    read = [math.prod(sizes[i] for i in site_facts(reads.joint, site).depends) for site in sites]
    entries = inductor.hint(reads.captures[position].get_numel())
    return min(entries, max(read)) * reads.copies.get(position, 1)


def _sum_dtype(scores: int, numbers: int, query: Any) -> torch.dtype:
    """The dtype of sums, given how many numbers scores add to.

    If many scores add to one number, rounding after each addition would cost fp32 its last digits.
    Such a buffer is much smaller than the scores, so fp64 costs little memory. But a GPU adds four
    neighbours of fp32 at once, and of fp64 only one.
    """
    is_many = scores >= _MANY_SCORES[query.get_dtype().itemsize] * numbers
    return torch.float64 if is_many else torch.float32


def _scatter_site(reads: Reads, site: Site, buffer: Any) -> inductor.ScatterSite:
    facts = site_facts(reads.joint, site)
    by = facts.by
    # Exact sums have their ten integers in front, copies come last; sites index what is between.
    strides = tuple(buffer.get_stride())
    is_own = site.capture in reads.own
    sums_exactly = reads.is_reproducible and not is_own
    row, strides = (strides[0], strides[1:]) if sums_exactly else (None, strides)
    copies = reads.copies.get(site.capture, 1)
    strides = strides[:-1] if copies > 1 else strides
    is_shared = not is_own and copies == 1
    return inductor.ScatterSite(
        buffer=buffer.get_name(),
        strides=strides,
        value=reads.first + site.value,
        indices=tuple(reads.first + i for i in site.indices),
        uses_q_idx=by not in ("head", "key"),
        uses_kv_idx=by not in ("head", "query"),
        by_distance=by == "distance",
        repeats=by in ("distance", "query") and facts.repeats,
        dtype=f"tl.{str(buffer.get_dtype()).removeprefix('torch.')}",
        is_large=not inductor.fits_int32(buffer.get_numel()),
        row=row,
        is_own=is_own,
        is_row=copies == 1 and strides[-1:] == (1,) and facts.is_row,
        copies=copies,
        shared_axis=facts.shared_axis if is_shared else None,
        shared_indices=facts.shared_indices if is_shared else (),
        groups=None if is_own else facts.groups,
        sides=facts.sides,
    )


class Gathered(NamedTuple):
    """Gradients of captured tensors, by capture: what a kernel writes, and then their values."""

    reads: Reads
    buffers: Mapping[int, Any]

    @property
    def captured(self) -> Captured:
        """What a kernel writes to, and where."""
        sites = [_scatter_site(self.reads, s, self.buffers[s.capture]) for s in self.reads.sites]
        return Captured(list(self.buffers.values()), sites)

    def values(self, fakes: Sequence[torch.Tensor]) -> dict[int, Any]:
        """The gradients in their captures' dtypes; read after the kernel, or they would be zeros.

        fakes: the captures as fake tensors.
        """
        return {i: _value(self.reads, i, sums, fakes[i]) for i, sums in self.buffers.items()}


def gather(reads: Reads, query: Any, key: Any) -> Gathered:
    """Plan the gradients of captured tensors."""
    planned = in_copies(reads, query, key)
    return Gathered(planned, make_sums(planned, query, key))


def _value(reads: Reads, position: int, sums: Any, fake: torch.Tensor) -> Any:
    copies = reads.copies.get(position)
    if reads.is_reproducible and position not in reads.own:
        return exact_sums.lower_value(sums, fake, copies)
    if copies is not None:
        sums = inductor.call_lowering(torch.ops.aten.sum.dim_IntList, sums, [-1])
    dtype = reads.captures[position].get_dtype()
    if sums.get_dtype() == dtype:  # else Inductor copies them, for nothing
        return pointwise.boxed(sums)
    return inductor.call_lowering(torch.ops.prims.convert_element_type.default, sums, dtype)
