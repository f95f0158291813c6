"""Gradients of captured tensors: buffers that kernels add to, and their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from flexhop.compat.kernels import inductor
from flexhop.lowering.emission import exact_sums
from flexhop.lowering.mods.captured import read_by, repeats
from flexhop.ops.args import Site

_BY_PAIR = ("distance", "score")  # an entry for a pair of query and key
_MANY_READS = 64  # scores per entry of a captured tensor
_MOST_COPIES = 128  # templates/printers/holes.py: a copy by query and key
# Scores that add to one number. Copies make them fewer, but a warp's additions to neighbouring
# numbers are one access, to copies of them several.
_FEW_SCORES = 2**14


class Reads(NamedTuple):
    """The sites of a joint graph, and how a kernel calls its functions.

    first: number of the subgraph of the joint graph's first output in kernels. is_reproducible:
    whether the sums must be the same in any order. copies: of a capture's buffer, if more than
    one.
    """

    joint: Any
    sites: Sequence[Site]
    captures: Sequence[Any]
    first: int
    is_reproducible: bool
    copies: Mapping[int, int] = MappingProxyType({})


def in_copies(reads: Reads, query: Any, key: Any) -> Reads:
    """The reads, with several buffers for small tensors.

    A GPU adds to one address after the other: the scores of a layer added to a table of 16 entries
    for each head take a hundred times as long as attention. Neighbouring scores add to different
    copies, whose sum is the gradient. Scores that read an entry together, such as all keys of a
    query, are summed in registers first.
    """
    scores = inductor.hint(_scores(query, key))
    copies = {}
    for site in reads.sites:
        entries = inductor.hint(reads.captures[site.capture].get_numel())
        most = min(_MOST_COPIES, scores // (_FEW_SCORES * max(entries, 1)))
        if read_by(reads.joint, site) in _BY_PAIR and most > 1:
            copies[site.capture] = 1 << (most.bit_length() - 1)
    return reads._replace(copies=copies)


def make_sums(reads: Reads, query: Any, key: Any) -> dict[int, Any]:
    """Zero-filled buffers for the gradients, by capture: [*size, copies], or [*size] if one."""
    scores = _scores(query, key)
    buffers: dict[int, Any] = {}
    for position in sorted({site.capture for site in reads.sites}):
        like = reads.captures[position]
        size = like.get_size()
        if position in reads.copies:
            size = [*size, reads.copies[position]]
        if reads.is_reproducible:
            buffers[position] = exact_sums.make_sums(size, like.get_device())
            continue
        dtype = _sum_dtype(inductor.hint(scores), inductor.hint(like.get_numel()))
        buffers[position] = inductor.zeros(size, dtype, like.get_device())
    return buffers


def _scores(query: Any, key: Any) -> Any:
    batch, heads, length, _ = query.get_size()
    return batch * heads * length * key.get_size()[2]


def _sum_dtype(scores: int, entries: int) -> torch.dtype:
    """The accumulation dtype of a captured tensor's gradient, given its number of entries.

    If many scores read one entry, rounding after each addition would cost fp32 its last digits.
    Such a tensor is much smaller than the scores, so fp64 costs little memory.
    """
    return torch.float64 if scores >= _MANY_READS * entries else torch.float32


def scatter_sites(reads: Reads, buffers: dict[int, Any]) -> list[inductor.ScatterSite]:
    """How a kernel adds to the buffers."""
    return [_scatter_site(reads, site, buffers[site.capture]) for site in reads.sites]


def _scatter_site(reads: Reads, site: Site, buffer: Any) -> inductor.ScatterSite:
    by = read_by(reads.joint, site)
    # Exact sums have their ten integers in front, copies come last; sites index what is between.
    strides = tuple(buffer.get_stride())
    row, strides = (strides[0], strides[1:]) if reads.is_reproducible else (None, strides)
    copies = reads.copies.get(site.capture, 1)
    strides = strides[:-1] if copies > 1 else strides
    return inductor.ScatterSite(
        buffer=buffer.get_name(),
        strides=strides,
        value=reads.first + site.value,
        indices=tuple(reads.first + i for i in site.indices),
        uses_q_idx=by not in ("head", "key"),
        uses_kv_idx=by not in ("head", "query"),
        by_distance=by == "distance",
        repeats=by in ("distance", "query") and repeats(reads.joint, site),
        dtype="tl.float64" if buffer.get_dtype() == torch.float64 else "tl.float32",
        is_large=not inductor.fits_int32(buffer.get_numel()),
        row=row,
        copies=copies if by in _BY_PAIR else 1,
    )


def values_of(
    reads: Reads, buffers: dict[int, Any], fakes: Sequence[torch.Tensor]
) -> dict[int, Any]:
    """The sums in their captures' dtypes; read after the kernel, or they would be zeros.

    fakes: the captures as fake tensors.
    """
    return {i: _value(reads, i, sums, fakes[i]) for i, sums in buffers.items()}


def _value(reads: Reads, position: int, sums: Any, fake: torch.Tensor) -> Any:
    copies = reads.copies.get(position)
    if reads.is_reproducible:
        return exact_sums.lower_value(sums, fake, copies)
    if copies is not None:
        sums = inductor.call_lowering(torch.ops.aten.sum.dim_IntList, sums, [-1])
    convert = torch.ops.prims.convert_element_type.default
    return inductor.call_lowering(convert, sums, reads.captures[position].get_dtype())
