"""Inductor: the holes for gradients of captured tensors in Gluon kernels.

`kernel` is a GluonKernel of compat/kernels/gluon.py. Tiles of scores are transposed,
[64 keys, queries]; the functions that are called here are in the files captured, sums and
distances of the dialect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexhop.templates.printers.holes import (
    COPY_OF_PROGRAM,
    INDEX_NAMES,
    ScatterSite,
    as_factor,
    size_text,
)

__all__ = ["add", "add_sites", "finish", "finish_sites", "start"]

Sites = Sequence[ScatterSite]


def _kept(sites: Sites) -> list[int]:
    """Sites whose indices do not depend on the query: summed in registers."""
    return [number for number, site in enumerate(sites) if not site.uses_q_idx]


def start(sites: Sites) -> str:
    """Text of the empty sums, a tuple."""
    columns = "BLOCK_M // 2 if SHARES_KEYS else BLOCK_M"
    zeros = f"sum_rows(gl.zeros([64, {columns}], gl.float32, layout=SCORES)), "
    return f"({zeros * len(_kept(sites))})"


def add(kernel: Any, sites: Sites) -> str:
    """The line after the gradients of a tile; empty without sites."""
    if not sites:
        return ""
    rest = "sums, score, p, grad_modified, b, h, q_idx, kv_idx"
    return f"\nsums = add_captured_grads({kernel.gen_argdefs()}, {rest})"


def finish(kernel: Any, sites: Sites) -> str:
    """The line after the last tile of a head; empty if no sums are kept."""
    if not _kept(sites):
        return ""
    return f"\nstate = finish_sums({kernel.gen_argdefs()}, state, b, h, kv_idx)"


def add_sites(kernel: Any, sites: Sites) -> str:
    """The body of add_captured_grads."""
    lines: list[str] = []
    inputs = {name: name for name in ("score", *INDEX_NAMES, "grad_score")}
    for number, site in enumerate(sites):
        lines.append(kernel.modification(site.value, f"grad_{number}", **inputs))
        lines.append(f"grad_{number} = gl.where(keep, grad_{number}, 0.0)")
        if site.uses_q_idx:
            lines += _add_at_once(kernel, number, site)
    totals = [f"sums[{i}] + sum_rows(grad_{n})" for i, n in enumerate(_kept(sites))]
    lines += [f"sums = ({', '.join(totals)},)"] if totals else []
    return "\n".join(lines)


def _add_at_once(kernel: Any, number: int, site: ScatterSite) -> list[str]:
    """Lines that sum a tile over keys, or pairs at equal distances, and add that to memory."""
    find, locate = ("sum_distances", "pair_at") if site.by_distance else ("sum_keys", "query_at")
    # Unclamped positions: those beyond the end must not be clamped before they are counted.
    places = "q_place - kv_place" if site.by_distance else "q_place + kv_place * 0"
    parts, offsets = f"parts_{number}", f"offsets_{number}"
    lines, offset = _locate(kernel, number, site, f"q_{number}", f"kv_{number}")
    found = [f"q_{number}, kv_{number} = {locate}({kernel.gen_argdefs()}, places_{number}[part])"]
    return [
        f"{parts}, places_{number} = {find}(grad_{number}, {places})",
        f"{offsets} = ()",
        f"for part in gl.static_range(len({parts})):",
        *_indented([*found, *lines, f"{offsets} = {offsets} + ({offset},)"]),
        *(
            [f"{parts} = merge_equal({parts}, {offsets})"]
            if site.repeats and not site.is_large
            else []
        ),
        f"for part in gl.static_range(len({parts})):",
        *_indented([_add(kernel, site, f"{parts}[part]", f"{offsets}[part]")]),
    ]


def _indented(texts: Sequence[str]) -> list[str]:
    return ["    " + line for text in texts for line in text.splitlines()]


def finish_sites(kernel: Any, sites: Sites) -> str:
    """The body of finish_sums."""
    lines: list[str] = []
    kept = _kept(sites)
    for i, number in enumerate(kept):
        site = sites[number]
        lines.append(f"total_{number} = gl.sum(sums[{i}].to({site.dtype}), axis=1)")
        if site.uses_kv_idx:
            lines.append(f"total_{number} = gl.convert_layout(total_{number}, kv_idx.type.layout)")
        else:
            lines.append(f"total_{number} = gl.sum(total_{number}, axis=0)")
        found, offset = _locate(kernel, number, site, "q_idx", "kv_idx")
        lines += [*found, _add(kernel, site, f"total_{number}", offset)]
    zeros = "".join(f"gl.zeros_like(sums[{i}]), " for i in range(len(kept)))
    return "\n".join([*lines, f"sums = ({zeros})"])


def _locate(
    kernel: Any, number: int, site: ScatterSite, q_idx: str, kv_idx: str
) -> tuple[list[str], str]:
    """Lines that compute a site's indices at positions, and the addresses in its buffer."""
    inputs = {name: name for name in INDEX_NAMES} | {"q_idx": q_idx, "kv_idx": kv_idx}
    lines: list[str] = []
    wide = "tl.int64" if site.is_large else "tl.int32"
    offset = f"{kv_idx} * 0" if site.uses_q_idx or site.uses_kv_idx else "0"
    for axis, (subgraph, stride) in enumerate(zip(site.indices, site.strides, strict=True)):
        name = f"index_{number}_{axis}"
        lines.append(kernel.modification(subgraph, name, **inputs))
        size = size_text(kernel, stride)
        offset += f" + {name}.to({wide}) * {as_factor(size)}"
    if site.copies > 1:  # a warp merges what it adds to equal entries, so that it has one copy
        offset += f" + ({COPY_OF_PROGRAM} & {site.copies - 1})"
    return lines, offset


def _add(kernel: Any, site: ScatterSite, value: str, offset: str) -> str:
    """A line that adds to a site's buffer; skips zeros, such as those of masked scores."""
    place = f"{kernel.args.input(site.buffer)} + ({offset})"
    return (
        f"gl.atomic_add({place}, ({value}).to({site.dtype}), mask={value} != 0.0, sem='relaxed')"
    )
