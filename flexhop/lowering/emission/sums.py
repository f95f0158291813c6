"""Gradients of captured tensors: buffers that kernels add to, and their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flexhop.compat import inductor
from flexhop.lowering.emission import exact
from flexhop.lowering.mods.captured import read_by, repeats
from flexhop.ops.args import Site

_MANY_READS = 64  # scores per entry of a captured tensor


class Reads(NamedTuple):
    """The sites of a joint graph, and how a kernel calls its functions.

    first: number of the subgraph of the joint graph's first output in kernels. is_exact: whether
    the sums must be the same in any order.
    """

    joint: Any
    sites: Sequence[Site]
    captures: Sequence[Any]
    first: int
    is_exact: bool


def make_sums(reads: Reads, query: Any, key: Any) -> dict[int, Any]:
    """Zero-filled buffers for the gradients, by capture."""
    batch, heads, length, _ = query.get_size()
    scores = batch * heads * length * key.get_size()[2]
    buffers: dict[int, Any] = {}
    for position in sorted({site.capture for site in reads.sites}):
        like = reads.captures[position]
        if reads.is_exact:
            buffers[position] = exact.make_sums(like.get_size(), like.get_device())
            continue
        dtype = _sum_dtype(inductor.hint(scores), inductor.hint(like.get_numel()))
        buffers[position] = inductor.zeros(like.get_size(), dtype, like.get_device())
    return buffers


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
    strides = tuple(buffer.get_stride())
    row, strides = (strides[0], strides[1:]) if reads.is_exact else (None, strides)
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
    )


def values_of(
    reads: Reads, buffers: dict[int, Any], fakes: Sequence[torch.Tensor]
) -> dict[int, Any]:
    """The sums in their captures' dtypes; read after the kernel, or they would be zeros.

    fakes: the captures as fake tensors.
    """
    if reads.is_exact:
        return {i: exact.lower_value(sums, fakes[i]) for i, sums in buffers.items()}
    convert = torch.ops.prims.convert_element_type.default
    return {
        i: inductor.call_lowering(convert, sums, reads.captures[i].get_dtype())
        for i, sums in buffers.items()
    }
