"""The joint graph of score_mod in the kernel for gradients, and gradients of captured tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flexhop.compat.kernels import inductor
from flexhop.compat.kernels.cpp_kernel import Printer, Stored
from flexhop.compat.kernels.inductor import ops
from flexhop.lowering.cpu.mods import (
    PLACE,
    SIZES,
    STEP,
    Mods,
    inputs_of,
    lower,
    value_of,
)
from flexhop.lowering.emission.sums import Reads, make_sums
from flexhop.lowering.mods.analysed import JOINT, kernel_graph
from flexhop.lowering.mods.captured import read_sites
from flexhop.lowering.mods.indices import wrap_reads
from flexhop.lowering.mods.lower import position_sizes, read_joint, score_inputs
from flexhop.ops.args import BackwardArgs, Site, unpack_sites

_ALONG = {"head": "NOTHING", "key": "KEYS", "query": "QUERIES"}


class Joint(NamedTuple):
    """The joint graph, lowered, if gradients of scores change or anything is captured.

    buffers: of the joint graph's results. sums: zero-filled, by capture. along: of every site,
    along what of a tile its places differ.
    """

    buffers: Sequence[Any]
    sites: Sequence[Site]
    sums: dict[int, Any]
    along: Sequence[str]


def lower_joint(args: BackwardArgs, mods: Mods) -> Joint:
    """Lower the joint graph of a call."""
    sites = unpack_sites(args.sites)
    if not sites and not read_joint(args.joint).has_score_grad:
        return Joint((), (), {}, ())
    device = inductor.device_of(args.query)
    graph = wrap_reads(kernel_graph(args.joint, JOINT), JOINT, position_sizes(), sites)
    inputs = score_inputs(device, "grad_score")
    buffers = lower(graph, [*inputs, *mods.score_captures], "the gradient of score_mod")
    # No first subgraph, because C++ calls the functions by name; its sums are ordered otherwise.
    reads = Reads(args.joint, sites, args.score_captures, 0, is_reproducible=False)
    sums = make_sums(reads, args.query, args.key)
    along = [_ALONG.get(by, "BOTH") for by in read_sites(args.joint, sites)]
    return Joint(buffers, sites, sums, along)


def joint_functions(printer: Printer, mods: Mods, joint: Joint, sums: dict[int, Any]) -> str:
    """C++ of `captured`, `joint_full` and `joint_partial`; sums: as `joint.sums`, with storage."""
    targets = ", ".join(_target(printer, sums[site.capture]) for site in joint.sites)
    names = ("joint_full", "joint_partial")
    if not joint.buffers:
        texts = ["flexhop::Nothing{}"] * 2
    else:
        # In full blocks every score counts, so the mask is not asked.
        full = _function(printer, mods._replace(mask=None), joint, sums)
        texts = [full, full if mods.mask is None else _function(printer, mods, joint, sums)]
    functions = [f"const auto {n} = {t};" for n, t in zip(names, texts, strict=True)]
    return "\n".join([f"flexhop::Captured captured{{{{{targets}}}}};", *functions])


def _target(printer: Printer, sums: Any) -> str:
    count = printer.number(sums.get_numel())
    pointer = printer.pointer(sums)
    pointers = (
        f"nullptr, {pointer}" if sums.get_dtype() == torch.float64 else f"{pointer}, nullptr"
    )
    return f"{{{pointers}, {count}}}"


def _function(printer: Printer, mods: Mods, joint: Joint, sums: dict[int, Any]) -> str:
    inputs = inputs_of(mods, by_key=True, grad_score="buf_given")
    types = {"buf_score": torch.float32, "buf_given": torch.float32}

    def seen(buffer: Any) -> Callable[[], Any]:
        return lambda: _if_seen(mods, value_of(buffer, torch.float32))

    grads = [Stored(seen(joint.buffers[0]), "buf_grad", torch.float32)]
    grads += [
        Stored(seen(joint.buffers[site.value]), f"buf_value{n}", torch.float32)
        for n, site in enumerate(joint.sites)
    ]
    lines = [
        "[&](const float* buf_score, float* buf_grad, const flexhop::Place& place, auto& sums) {",
        PLACE,
        "  const float* buf_given = buf_grad;",
    ]
    for n in range(len(joint.sites)):
        lines.append(f"  float* buf_value{n} = sums.values({n});")
        lines.append(f"  int64_t* buf_place{n} = sums.places({n});")
    lines.append(printer.loops(grads, inputs, types, SIZES, STEP))
    for n, site in enumerate(joint.sites):
        along = joint.along[n]
        place = Stored(
            lambda site=site: _place(joint, site, sums[site.capture]), f"buf_place{n}", torch.int64
        )
        # Where places do not differ, one row or column of them is enough.
        rows = SIZES[0] if along in ("KEYS", "BOTH") else 1
        columns = SIZES[1] if along in ("QUERIES", "BOTH") else 1
        lines.append(printer.loops([place], inputs, types, (rows, columns), STEP))
        lines.append(f"  sums.add({n}, flexhop::Along::{along}, place);")
    return "\n".join([*lines, "}"])


def _if_seen(mods: Mods, value: Any) -> Any:
    if mods.mask is None:
        return value
    return ops.where(value_of(mods.mask, torch.bool), value, ops.constant(0.0, torch.float32))


def _place(joint: Joint, site: Site, sums: Any) -> Any:
    """The IR of where a site's gradient is added."""
    place = ops.constant(0, torch.int64)
    for index, stride in zip(site.indices, sums.get_stride(), strict=True):
        number = value_of(joint.buffers[index], torch.int64)
        place = ops.add(place, ops.mul(number, ops.index_expr(stride, torch.int64)))
    return place
