"""Lowering of `flexhop_attention_backward`: kernels, and gradients of captured tensors."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from flexhop.compat import inductor, inline
from flexhop.lowering import chunked, cpu, fallback
from flexhop.lowering.dialect import candidates
from flexhop.lowering.emission import exact
from flexhop.lowering.emission.kernel import Captured, KernelCall
from flexhop.lowering.mods.captured import read_by, repeats
from flexhop.lowering.mods.lower import lower_joint, lower_mods, read_joint
from flexhop.lowering.operands import read_problem, seed_input, show_problem, user_options
from flexhop.ops.args import BackwardArgs, Site, unpack_sites

_MANY_READS = 64  # scores per entry of a captured tensor


def lower_attention_backward(*operands: Any) -> tuple[Any, Any, Any, list[Any]]:
    """Emit the backward kernels: (grad_query, grad_key, grad_value, captured gradients)."""
    args = BackwardArgs(*operands)
    if chunked.is_without_kernel(args.query):
        return cpu.lower_attention_backward(*args) or chunked.lower_attention_backward(*args)
    device = inductor.device_of(args.query)
    score_captures = inductor.realize(args.score_captures)
    mask_captures = inductor.realize(args.mask_captures)
    mods = lower_mods(device, args.score_mod, args.mask_mod, (score_captures, mask_captures))
    query, key, value, grad_out = inductor.realize(
        [args.query, args.key, args.value, args.grad_out]
    )
    args = args._replace(query=query, key=key, value=value, grad_out=grad_out)
    problem = read_problem(args, mods, grad=read_joint(args.joint, args.sites))
    show_problem("backward", problem)
    options = user_options(args.options)
    choices = list(candidates("backward", problem, options))
    if not choices:
        return chunked.lower_attention_backward(*operands)
    joint = lower_joint(device, args.joint, score_captures, unpack_sites(args.sites))
    sums, sites = _scatter_sites(args)
    captured = Captured([sums[i] for i in sorted(sums)], sites)
    joint = joint if sites else joint[:1]
    captures = [*score_captures, *mask_captures]
    call = KernelCall(problem, options, mods, captures, seed=seed_input(args))
    for choice in choices:
        told = dataclasses.replace(call, passed=choice.words(problem.device))
        emit = functools.partial(choice.dialect.backward.emit, told, args, joint, captured)
        grads = fallback.attempt(f"backward, {choice.dialect.title}", emit, problem)
        if grads is not None:
            return (*grads, _captured_grads(args, sums))
    return chunked.lower_attention_backward(*operands)


def _scatter_sites(
    args: BackwardArgs,
) -> tuple[dict[int, Any], list[inductor.ScatterSite]]:
    """Zero-filled buffers for captured gradients, by capture, and what the kernel adds to them."""
    query: Any = args.query
    key: Any = args.key
    batch, heads, length, _ = query.get_size()
    scores = batch * heads * length * key.get_size()[2]
    sites = unpack_sites(args.sites)
    buffers: dict[int, Any] = {}
    for site in sites:
        if site.capture not in buffers:
            like = args.score_captures[site.capture]
            if _is_exact(args):
                buffers[site.capture] = exact.make_sums(like.get_size(), like.get_device())
                continue
            dtype = _sum_dtype(inductor.hint(scores), inductor.hint(like.get_numel()))
            buffers[site.capture] = inductor.zeros(like.get_size(), dtype, like.get_device())
    return buffers, [_scatter_site(args, site, buffers[site.capture]) for site in sites]


def _is_exact(args: BackwardArgs) -> bool:
    """Whether gradients of captured tensors must be reproducible."""
    return bool(args.options.get("deterministic"))


def _sum_dtype(scores: int, entries: int) -> torch.dtype:
    """The accumulation dtype of a captured tensor's gradient, given its number of entries.

    If many scores read one entry, rounding after each addition would cost fp32 its last digits.
    Such a tensor is much smaller than the scores, so fp64 costs little memory.
    """
    return torch.float64 if scores >= _MANY_READS * entries else torch.float32


def _scatter_site(args: BackwardArgs, site: Site, buffer: Any) -> inductor.ScatterSite:
    by = read_by(args.joint, site)
    strides = tuple(buffer.get_stride())  # Inductor may pad
    row, strides = (strides[0], strides[1:]) if _is_exact(args) else (None, strides)
    # Subgraphs of the kernel: score_mod, mask_mod, then the outputs of the joint graph.
    return inductor.ScatterSite(
        buffer=buffer.get_name(),
        strides=strides,
        value=2 + site.value,
        indices=tuple(2 + i for i in site.indices),
        uses_q_idx=by not in ("head", "key"),
        uses_kv_idx=by not in ("head", "query"),
        by_distance=by == "distance",
        repeats=by in ("distance", "query") and repeats(args.joint, site),
        dtype="tl.float64" if buffer.get_dtype() == torch.float64 else "tl.float32",
        is_large=not inductor.fits_int32(buffer.get_numel()),
        row=row,
    )


def _captured_grads(args: BackwardArgs, buffers: dict[int, Any]) -> list[Any]:
    """The buffers in their captures' dtypes; read after the kernel, or they would be zeros."""
    if _is_exact(args):
        fakes = BackwardArgs(*inline.fake_operands()).score_captures
        return [exact.lower_value(buffers[i], fakes[i]) for i in sorted(buffers)]
    convert = torch.ops.prims.convert_element_type.default
    return [
        inductor.call_lowering(convert, buffers[i], args.score_captures[i].get_dtype())
        for i in sorted(buffers)
    ]
