"""Plans of a call's portable kernels: tile, programs, constants, and reasons."""

from __future__ import annotations

from flexhop.lowering.plan import KernelPlan
from flexhop.lowering.portable import kernels, splits
from flexhop.lowering.portable.rules import OVER_KEYS, Kernel
from flexhop.lowering.portable.tiles import table_rule, table_tile
from flexhop.lowering.problem import Problem, round_head_dim
from flexhop.options import KernelOptions, Tile


def plan_kernel(
    kernel: Kernel,
    problem: Problem,
    options: KernelOptions,
    passed: str = "",
    tile: Tile | None = None,
) -> KernelPlan:
    """Describe a kernel.

    Args:
        kernel: which.
        problem: the call's problem.
        options: of the user.
        passed: text to append to the tile's reason.
        tile: the tile to launch with; None: the tile without a search.

    Raises:
        TileError, TileResourceError: the user's tile does not match the mask or the device.
    """
    if tile is None:
        tile = kernels.choose_tiles(kernel, problem, options, search=False)[0]
    return KernelPlan(
        kernel=kernel,
        tile=tile,
        reason=_reason(kernel, problem, options, tile) + passed,
        shared_memory=kernels.shared_memory(kernel, problem, tile),
        programs=_programs(kernel, problem, options, tile),
        constants=kernels.constants(kernel, problem, options, tile),
    )


def _reason(kernel: Kernel, problem: Problem, options: KernelOptions, tile: Tile) -> str:
    if getattr(options, kernels.option_of(kernel)) is not None:
        return "your kernel_options; unset fields come from the table"
    first, rule = table_tile(kernel, problem), table_rule(kernel, problem)
    major, minor = problem.device.capability
    width = max(problem.head_dim, problem.value_head_dim)
    source = f"table for sm_{major}{minor}, {problem.dtype}, head size {width}"
    if rule.reason:
        source += f", {rule.reason}{'' if rule.measured else ' (not measured)'}"
    if tile == first:
        return source
    if tile != kernels.choose_tiles(kernel, problem, options, search=False)[0]:
        return "a candidate of the search (max-autotune)"
    return f"{source} ({first.words()}), {_why_smaller(kernel, problem, first)}"


def _why_smaller(kernel: Kernel, problem: Problem, tile: Tile) -> str:
    reasons: list[str] = []
    blocks = problem.blocks
    if blocks is not None and not kernels.divides(kernel, blocks, tile):
        reasons.append(
            f"reduced to divide the mask's blocks of {blocks.q_size} x {blocks.kv_size}"
        )
    queries = splits.rows(problem) if kernel == "decode" else problem.query_len
    lengths = (round_head_dim(queries), round_head_dim(problem.key_len))
    if tile.block_m > lengths[0] or tile.block_n > lengths[1]:
        reasons.append(f"reduced to match the lengths {queries} and {problem.key_len}")
    needed = kernels.shared_memory(kernel, problem, tile)
    if needed > problem.device.shared_memory:
        reasons.append(
            f"reduced from {needed} to fit {problem.device.shared_memory} bytes of shared memory"
        )
    return " and ".join(reasons) or "adjusted to the problem"


def _programs(kernel: Kernel, problem: Problem, options: KernelOptions, tile: Tile) -> int:
    """Programs of the grid: tiles times batches times heads, and in decode times splits."""
    blocks = problem.blocks
    if kernel == "decode":
        heads = problem.batch * problem.query_heads // splits.packed_heads(problem)
        shares = kernels.num_splits(problem, options)
        return splits.row_tiles(problem, tile.block_m) * heads * shares
    if kernel in OVER_KEYS:
        batch = 1 if problem.kv_batch_shared else problem.batch
        block = blocks.kv_size if blocks is not None else tile.block_n
        return _tiles(problem.key_len, block, tile.block_n) * batch * problem.kv_heads
    block = blocks.q_size if blocks is not None else tile.block_m
    return _tiles(problem.query_len, block, tile.block_m) * problem.batch * problem.query_heads


def _tiles(length: int, block: int, tile: int) -> int:
    """Number of tiles that cover `length`; none crosses a boundary between blocks of the mask."""
    if block % tile == 0:
        return -(-length // tile)
    return -(-length // block) * -(-block // tile)
