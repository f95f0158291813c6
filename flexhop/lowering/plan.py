"""What was decided for one kernel, and why, in words: for `flexhop.explain` and FLEXHOP_DEBUG."""

from __future__ import annotations

import dataclasses
from typing import Any

from flexhop import debug
from flexhop.lowering.dialect import choose_dialect, choose_grad_dialect
from flexhop.lowering.hopper import backward as hopper_grad
from flexhop.lowering.hopper import forward as hopper
from flexhop.lowering.hopper.backward import HopperGradTile
from flexhop.lowering.hopper.forward import HopperTile
from flexhop.lowering.portable import kernels, splits
from flexhop.lowering.portable.tiles import Kernel, Launched, table_tile
from flexhop.lowering.problem import Problem, round_head_dim
from flexhop.options import KernelOptions, Tile

_OVER_KEYS = ("grad_key_value", "grad_key", "grad_value")  # whose programs own keys


@dataclasses.dataclass(frozen=True, slots=True)
class KernelPlan:
    """One kernel of one call.

    Args:
        kernel: "forward" or "decode", "grad_query", and "grad_key_value" or "grad_key" and
            "grad_value", or "backward", which is both of these on Hopper.
        tile: what one program does at a time.
        reason: where the tile comes from.
        shared_memory: estimated upper bound, in bytes, of what one program asks for.
        programs: how many programs are launched.
        constants: what the template is specialised on.
    """

    kernel: Launched
    tile: Tile | HopperTile | HopperGradTile
    reason: str
    shared_memory: int
    programs: int
    constants: dict[str, Any]

    def __str__(self) -> str:
        lines = [
            f"tile: {self.tile.words()}",
            f"reason: {self.reason}",
            f"shared memory: about {self.shared_memory} bytes",
            f"programs: {self.programs}",
            *(f"{name} = {value}" for name, value in self.constants.items()),
        ]
        return "\n".join(lines)


def plan_kernel(
    kernel: Kernel, problem: Problem, options: KernelOptions, tile: Tile | None = None
) -> KernelPlan:
    """Describe a kernel with `tile`, or with the tile that it gets without a search.

    Raises:
        TileError, TileResourceError: the user's tile does not fit the mask or the device.
    """
    if kernel == "forward" and tile is None and choose_dialect(problem, options).name == "hopper":
        return plan_hopper(problem, options, hopper.table_tile(problem))
    if tile is None:
        tile = kernels.choose_tiles(kernel, problem, options, search=False)[0]
    return KernelPlan(
        kernel=kernel,
        tile=tile,
        reason=tile_reason(kernel, problem, options, tile),
        shared_memory=kernels.shared_memory(kernel, problem, tile),
        programs=_programs(kernel, problem, options, tile),
        constants=kernels.constants(kernel, problem, options, tile),
    )


def plan_hopper(problem: Problem, options: KernelOptions, tile: HopperTile) -> KernelPlan:
    """Describe the forward kernel of Hopper GPUs."""
    tiles = -(-problem.query_len // tile.block_m) * problem.batch * problem.query_heads
    return KernelPlan(
        kernel="forward",
        tile=tile,
        reason="the Hopper kernel serves this call",
        shared_memory=hopper.shared_memory(problem, tile),
        programs=min(problem.device.multiprocessors, tiles),
        constants=dataclasses.asdict(hopper.constants(problem, options, tile)),
    )


def show_hopper_plan(problem: Problem, options: KernelOptions, tile: HopperTile) -> None:
    """As show_plan, for the forward kernel of Hopper GPUs."""
    debug.show("kernel", "forward", lambda: str(plan_hopper(problem, options, tile)))


def plan_hopper_grad(problem: Problem) -> KernelPlan:
    """Describe the backward kernel of Hopper GPUs."""
    tile = hopper_grad.table_tile(problem)
    return KernelPlan(
        kernel="backward",
        tile=tile,
        reason="the Hopper kernel serves this call",
        shared_memory=hopper_grad.shared_memory(problem, tile),
        programs=min(problem.device.multiprocessors, hopper_grad.num_tiles(problem)),
        constants=dataclasses.asdict(hopper_grad.constants(problem, tile)),
    )


def plan_backward(problem: Problem, options: KernelOptions) -> tuple[KernelPlan, ...]:
    """Describe the kernels of the backward pass.

    Raises:
        TileError, TileResourceError: as plan_kernel.
    """
    if choose_grad_dialect(problem, options).name == "hopper":
        return (plan_hopper_grad(problem),)
    names: tuple[Kernel, ...] = ("grad_query", *kernels.key_value_kernels(problem))
    return tuple(plan_kernel(kernel, problem, options) for kernel in names)


def show_hopper_grad_plan(problem: Problem) -> None:
    """As show_plan, for the backward kernel of Hopper GPUs."""
    debug.show("kernel", "backward", lambda: str(plan_hopper_grad(problem)))


def show_refusal(name: str, needed: int, most: int) -> None:
    """Print that the machine code of a Hopper kernel is refused, if FLEXHOP_DEBUG asks for it."""
    words = f"refused: {needed} bytes of local memory per thread, of which {most} are as fast"
    debug.show("kernel", name, lambda: f"{words} as the portable kernels, which serve this call")


def show_plan(kernel: Kernel, problem: Problem, options: KernelOptions, tile: Tile) -> None:
    """Print the plan of a candidate if FLEXHOP_DEBUG asks for kernels."""
    debug.show("kernel", kernel, lambda: str(plan_kernel(kernel, problem, options, tile)))


def tile_reason(kernel: Kernel, problem: Problem, options: KernelOptions, tile: Tile) -> str:
    """Why a kernel has this tile, and on Hopper why it is the portable one."""
    reason = _table_reason(kernel, problem, options, tile)
    if kernel == "decode" or problem.device.capability != (9, 0):
        return reason
    choose = choose_dialect if kernel == "forward" else choose_grad_dialect
    return f"{reason}; not the Hopper kernel: {choose(problem, options).reason}"


def _table_reason(kernel: Kernel, problem: Problem, options: KernelOptions, tile: Tile) -> str:
    # One choice speaks to the gradients of key and value, in however many kernels.
    if getattr(options, "grad_key_value" if kernel in _OVER_KEYS else kernel) is not None:
        return "your kernel_options; what they leave open is from the table"
    first = table_tile(kernel, problem)
    major, minor = problem.device.capability
    width = max(problem.head_dim, problem.value_head_dim)
    source = f"table for sm_{major}{minor}, {problem.dtype}, head size {width}"
    if tile == first:
        return source
    if tile != kernels.choose_tiles(kernel, problem, options, search=False)[0]:
        return "a candidate of the search (max-autotune)"
    return f"{source} ({first.words()}), {_why_smaller(kernel, problem, first)}"


def _why_smaller(kernel: Kernel, problem: Problem, tile: Tile) -> str:
    reasons: list[str] = []
    blocks = problem.blocks
    if blocks is not None and not kernels.divides(kernel, blocks, tile):
        reasons.append(f"made to divide the mask's blocks of {blocks.q_size} x {blocks.kv_size}")
    queries = splits.rows(problem) if kernel == "decode" else problem.query_len
    lengths = (round_head_dim(queries), round_head_dim(problem.key_len))
    if tile.block_m > lengths[0] or tile.block_n > lengths[1]:
        reasons.append(f"cut to the lengths, {queries} and {problem.key_len}")
    needed = kernels.shared_memory(kernel, problem, tile)
    if needed > problem.device.shared_memory:
        reasons.append(f"made smaller to fit {problem.device.shared_memory} bytes, not {needed}")
    return " and ".join(reasons) or "adjusted to the problem"


def _programs(kernel: Kernel, problem: Problem, options: KernelOptions, tile: Tile) -> int:
    """Programs of the grid: tiles times batches times heads, and in decode times shares."""
    blocks = problem.blocks
    if kernel == "decode":
        heads = problem.batch * problem.query_heads // splits.packed_heads(problem)
        shares = kernels.num_splits(problem, options)
        return splits.row_tiles(problem, tile.block_m) * heads * shares
    if kernel in _OVER_KEYS:
        batch = 1 if problem.kv_batch_shared else problem.batch
        block = blocks.kv_size if blocks is not None else tile.block_n
        return _tiles(problem.key_len, block, tile.block_n) * batch * problem.kv_heads
    block = blocks.q_size if blocks is not None else tile.block_m
    return _tiles(problem.query_len, block, tile.block_m) * problem.batch * problem.query_heads


def _tiles(length: int, block: int, tile: int) -> int:
    """Tiles that cover `length`; none crosses a border between blocks of the mask."""
    if block % tile == 0:
        return -(-length // tile)
    return -(-length // block) * -(-block // tile)
