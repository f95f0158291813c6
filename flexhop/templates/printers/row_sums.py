"""Inductor: the holes for gradients of captured tensors that portable kernels sum in registers.

A program owns some queries, or some keys, and visits tiles of the others. What all scores of one
of its rows add to is a sum over the second axis of each tile. It is added to memory at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexhop.templates.printers.holes import INDEX_NAMES, ScatterSite, add_at, place_of

Sites = Sequence[ScatterSite]


def _kept(sites: Sites) -> list[tuple[int, ScatterSite]]:
    return [(number, site) for number, site in enumerate(sites) if site.kept is not None]


def start(kernel: Any, sites: Sites, rows: str) -> str:
    """The line after, which makes the empty sums, a tuple of [rows, 1]."""
    del kernel
    zeros = "".join(f"tl.zeros([{rows}, 1], {site.kept}), " for _, site in _kept(sites))
    return f"\nsums = ({zeros})" if zeros else ""


def also(kernel: Any, sites: Sites) -> str:
    """The sums among arguments and results."""
    del kernel
    return ", sums" if _kept(sites) else ""


def take(kernel: Any, sites: Sites) -> str:
    """The left side of a call that returns the sums alone."""
    del kernel
    return "sums = " if _kept(sites) else ""


def keep(kernel: Any, sites: Sites) -> str:
    """The line after those of `scatter`: the sums with those of a tile."""
    del kernel
    kept = _kept(sites)
    totals = "".join(f"sums[{i}] + grad_{number}_sum, " for i, (number, _) in enumerate(kept))
    return f"\nreturn ({totals})" if kept else ""


def add(kernel: Any, sites: Sites, rows: str) -> str:
    """The line after, which adds the sums to memory; rows: b, h, q_idx, kv_idx, which exist."""
    return f"\nadd_row_sums({kernel.gen_argdefs()}, sums, {rows})" if _kept(sites) else ""


def finish(kernel: Any, sites: Sites) -> str:
    """The body of add_row_sums."""
    inputs = {name: name for name in INDEX_NAMES}
    lines = []
    for i, (number, site) in enumerate(_kept(sites)):
        names = [f"index_{number}_{axis}" for axis in range(len(site.indices))]
        lines += map(lambda n, name: kernel.modification(n, name, **inputs), site.indices, names)
        total = f"total_{number}"
        lines.append(f"{total} = tl.where(is_live, sums[{i}], 0.0)")
        if not (site.uses_q_idx or site.uses_kv_idx):
            lines.append(f"{total} = tl.sum({total}, 0, keep_dims=True)")
        place = f"{place_of(kernel, site, names)} + tl.zeros_like({total}).to(tl.int32)"
        lines += add_at(kernel, site, place, total, f"{total} != 0.0")
    return "\n".join(lines)
