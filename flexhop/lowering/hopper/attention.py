"""The Hopper forward kernel: its plan, and its emission with the kernels before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flexhop.compat.kernels import inductor
from flexhop.lowering.emission.kernel import KernelCall, Output
from flexhop.lowering.hopper import forward, latent
from flexhop.lowering.hopper.emit import Attempt, emit_first, emit_kernel
from flexhop.lowering.hopper.loops import separate_loops
from flexhop.lowering.hopper.mask_bits import emit_mask_bits
from flexhop.lowering.hopper.tiles import HopperTile, copies_pairs, shared_memory
from flexhop.lowering.mods.lower import ModParts, lower_line
from flexhop.lowering.operands import block_inputs
from flexhop.lowering.plan import KernelPlan, show_plan
from flexhop.lowering.portable.decode import emit_shares
from flexhop.lowering.problem import Problem
from flexhop.ops.args import AttentionArgs, CachedArgs
from flexhop.options import KernelOptions

_NOTES = (
    "explain does not check strides: if the rows of an operand do not start at multiples of "
    "16 bytes, the portable kernel runs instead of the Hopper kernel.",
)


class _Attention:
    """See lowering/dialect.py."""

    def obstacles(self, problem: Problem, options: KernelOptions) -> Iterator[str]:
        """Why the kernel does not support a call."""
        kernel = latent if problem.is_wide else forward
        return kernel.obstacles(problem, options)

    def slower(self, problem: Problem, options: KernelOptions) -> Iterator[str]:
        """Why the portable kernel is probably faster."""
        kernel = latent if problem.is_wide else forward
        return kernel.slower(problem, options)

    def plans(
        self, problem: Problem, options: KernelOptions, passed: str
    ) -> tuple[KernelPlan, ...]:
        """The plan of the kernel, without the one that stores mask bits."""
        if problem.is_wide:
            return (_plan_latent(problem, options, passed),)
        tile = forward.table_tile(problem)
        heads = problem.batch * problem.query_heads // tile.heads
        tiles = -(-problem.query_len // tile.block_m) * heads
        plan = KernelPlan(
            kernel="forward",
            tile=tile,
            reason=f"the Hopper kernel supports this call{passed}; {_loops(problem, tile)}",
            shared_memory=shared_memory(problem, tile),
            programs=min(problem.device.multiprocessors, tiles),
            constants=dataclasses.asdict(forward.constants(problem, options, tile)),
            notes=_NOTES,
        )
        return (plan,)

    def emit(self, call: KernelCall, args: AttentionArgs | CachedArgs, output: Output) -> Any:
        """The output, or None if the machine code spills."""
        problem, options = call.problem, call.options
        if problem.is_wide:
            return _emit_latent(call, args, output)
        device = inductor.device_of(args.query)
        tile = forward.table_tile(problem)
        parts = None
        if copies_pairs(problem, tile):
            parts = _parts(call)
            if parts is None:
                return self._emit_without_copies(call, args, output)
        show_plan("forward", lambda: self.plans(problem, options, call.passed)[0])
        line = lower_line(device, args.score_mod, inductor.realize(args.score_captures))
        lse, max_scores = output.written[0], output.written[-1]
        lists = block_inputs(args, "kv", lse, args.query)
        # Zeroed by the graph itself, so before every launch, also when a CUDA graph is replayed.
        counter = inductor.zeros([1], torch.int32, device)
        operands = (args.query, args.key, args.value)
        stored = forward.stored_bits(problem, tile)
        words = emit_mask_bits(call, operands[:2], lists, stored) or counter  # then not read
        if call.mods.reading is not None:
            # It reads an entry once for a diagonal: 1.1 to 1.4 times as fast as computing all.
            call = dataclasses.replace(call, mods=call.mods.reading())
        inputs = [*operands, lse, max_scores, words, counter, *lists]
        added = output._replace(written=[*output.written, counter])
        tries = []
        for hides_keys, most in forward.attempts(problem, options):
            constants = forward.constants(problem, options, tile, hides_keys=hides_keys)
            functions = [_score(call, constants), call.mods.mask, *line]
            subgraphs = inductor.Subgraphs(functions)
            if parts is not None:
                functions = [parts.score, *functions[1:], parts.row]
                subgraphs = inductor.Subgraphs(functions, pairs=parts.pairs)
            tries.append(Attempt(constants, subgraphs, most))
        return emit_first(call, "forward", inputs, added, tries)

    def _emit_without_copies(
        self, call: KernelCall, args: AttentionArgs | CachedArgs, output: Output
    ) -> Any:
        """The same if a bias of pairs does not lie as `explain` assumes: it is read as it is used.

        None if the portable kernel is then faster.
        """
        problem = call.problem
        mods = problem.mods._replace(copied_bytes=0)
        problem = dataclasses.replace(problem, mods=mods)
        if call.options.backend == "auto" and any(self.slower(problem, call.options)):
            return None
        return self.emit(dataclasses.replace(call, problem=problem), args, output)


def _parts(call: KernelCall) -> ModParts | None:
    """The score_mod without a bias of pairs, and the bias; None if it cannot be copied."""
    mods = call.mods if call.mods.reading is None else call.mods.reading()
    return None if mods.apart is None else mods.apart()


def _score(call: KernelCall, constants: forward.HopperForwardConstants) -> Any:
    """The score_mod that a forward kernel calls."""
    if not constants.BY_DISTANCE or call.mods.by_distance is None:
        return call.mods.score
    return call.mods.by_distance(has_others=constants.CHECK_Q or constants.CHECK_KV)


def _loops(problem: Problem, tile: HopperTile) -> str:
    """Which loops the steps of a tile have, in words, and what is copied for them."""
    copied = "; tiles of a bias of pairs are copied" if copies_pairs(problem, tile) else ""
    for why in separate_loops(problem, tile, forward.stored_bits(problem, tile)):
        return f"its steps have three loops: {why}{copied}"
    return f"its steps have one loop{copied}"


def _plan_latent(problem: Problem, options: KernelOptions, passed: str) -> KernelPlan:
    """The plan of the kernel of latent attention, without the one that combines splits."""
    return KernelPlan(
        kernel="decode",
        tile=latent.LatentTile(),
        reason="the Hopper kernel of latent attention supports this call" + passed,
        shared_memory=latent.shared_memory(problem),
        programs=latent.programs(problem, options),
        constants=dataclasses.asdict(latent.constants(problem, options)),
        notes=_NOTES,
    )


def _emit_latent(call: KernelCall, args: AttentionArgs | CachedArgs, output: Output) -> Any:
    """The output of latent attention."""
    problem, options = call.problem, call.options
    show_plan("decode", lambda: _plan_latent(problem, options, call.passed))
    lists = block_inputs(args, "kv", output.written[0], args.query)
    subgraphs = inductor.Subgraphs([call.mods.score, call.mods.mask, *call.readers])
    constants = latent.constants(problem, options)
    name = "latent_paged" if constants.PAGE_SIZE else "latent"

    def emit(statistics: Sequence[Any], shares: Output) -> Any:
        inputs = [args.query, args.key, args.value, *statistics, *lists]
        return emit_kernel(call, name, inputs, shares, constants, subgraphs, None)

    return emit_shares(call, constants.SPLITS, output, emit)


ATTENTION = _Attention()
