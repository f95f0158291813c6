"""Lowering of `flexhop_attention_backward`: kernels, and gradients of captured tensors."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from flexhop.compat.graphs import inline
from flexhop.compat.kernels import inductor
from flexhop.lowering import chunked, cpu, fallback
from flexhop.lowering.dialect import candidates
from flexhop.lowering.emission.kernel import KernelCall
from flexhop.lowering.emission.sums import Reads, gather, score_sizes
from flexhop.lowering.mods.captured import felt_sites
from flexhop.lowering.mods.lower import for_rows_of_keys, lower_joint, lower_mods, read_joint
from flexhop.lowering.operands import read_problem, seed_input, show_problem, user_options
from flexhop.ops.args import BackwardArgs, learned_captures, unpack_sites


def lower_attention_backward(*operands: Any) -> tuple[Any, Any, Any, list[Any]]:
    """Emit the backward kernels: (grad_query, grad_key, grad_value, captured gradients)."""
    args = BackwardArgs(*operands)
    if chunked.is_without_kernel(args.query):
        return cpu.lower_attention_backward(*args) or chunked.lower_attention_backward(*args)
    device = inductor.device_of(args.query)
    score_captures = inductor.realize(args.score_captures)
    mask_captures = inductor.realize(args.mask_captures)
    # Without folded caps: their derivative needs tanh itself (mods/caps.py).
    mods = lower_mods(device, (args.score_mod, args.mask_mod), (score_captures, mask_captures))
    mods = for_rows_of_keys(mods, args.mask_mod, mask_captures, device)
    query, key, value, grad_out = inductor.realize(
        [args.query, args.key, args.value, args.grad_out]
    )
    args = args._replace(query=query, key=key, value=value, grad_out=grad_out)
    moves_lse = args.grad_lse is not None
    sites = felt_sites(args.joint, unpack_sites(args.sites), moves_lse=moves_lse)
    facts = read_joint(args.joint, sites, score_sizes(query, key))
    problem = read_problem(args, mods, grad=facts)
    show_problem("backward", problem)
    options = user_options(args.options)
    choices = list(candidates("backward", problem, options))
    if not choices:
        return chunked.lower_attention_backward(*operands)
    joint, loops = lower_joint(device, args.joint, score_captures, sites)
    # Subgraphs of the kernel: score_mod, mask_mod, then the outputs of the joint graph.
    reads = Reads(
        args.joint, sites, args.score_captures, 2,
        is_reproducible=bool(args.options.get("deterministic")), own=facts.own_entries,
        visits_all=problem.blocks is None,
    )  # fmt: skip
    gathered = gather(reads, args.query, args.key)
    captured = gathered.captured.in_loops(loops, reads.first)
    # Without sites, kernels call the gradient of the score alone.
    joint = joint if captured.sites else joint[:1]
    captures = [*score_captures, *mask_captures]
    call = KernelCall(problem, options, mods, captures, seed=seed_input(args))
    for choice in choices:
        # Each candidate's report says why those before it were passed over.
        told = dataclasses.replace(call, passed=choice.words(problem.device))
        emit = functools.partial(choice.dialect.backward.emit, told, args, joint, captured)
        grads = fallback.attempt(f"backward, {choice.dialect.title}", emit, problem)
        if grads is not None:
            fakes = BackwardArgs(*inline.fake_operands()).score_captures
            values = gathered.values(fakes)
            learned = learned_captures(args.sites)
            return (
                *grads,
                [values[i] if i in values else _zeros(score_captures[i]) for i in learned],
            )
    return chunked.lower_attention_backward(*operands)


def _zeros(like: Any) -> Any:
    """The gradient of a captured tensor that no result depends on."""
    size, of = list(like.get_size()), {"dtype": like.get_dtype(), "device": like.get_device()}
    return inductor.call_lowering(torch.ops.aten.full.default, size, 0.0, **of)
