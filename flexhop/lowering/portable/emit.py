"""Emit one portable kernel: every candidate tile becomes an Inductor choice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flexhop.compat.graphs import ahead
from flexhop.compat.kernels import inductor
from flexhop.lowering import fallback
from flexhop.lowering.emission.kernel import KernelCall, Output, fill, select, spills
from flexhop.lowering.operands import benchmark_inputs
from flexhop.lowering.plan import show_plan
from flexhop.lowering.portable import kernels, splits
from flexhop.lowering.portable.plan import plan_kernel
from flexhop.lowering.portable.rules import OVER_KEYS, Kernel
from flexhop.lowering.portable.shared import is_float32
from flexhop.lowering.portable.special_tiles import LOCAL_BYTES, shorter
from flexhop.lowering.problem import Problem
from flexhop.ops.dropout import threshold
from flexhop.options import Tile
from flexhop.templates import portable

# The block lists are the last inputs of every template.
_NUM_LISTS = 4


class CacheTemplateKernel(inductor.TemplateKernel):
    """Passes dtypes that Triton lacks on the device as bytes."""

    def jit_lines(self) -> str:
        """Inductor's decorator; a missing pointer type in it would be an error."""
        lines = super().jit_lines()
        as_bits = self.meta.get("KEY_AS_BITS") or self.meta.get("VALUE_AS_BITS")
        return lines.replace("*fp8e4nv", "*u8") if as_bits else lines


class CacheTemplate(inductor.Template):
    """A template whose kernels are CacheTemplateKernels."""

    kernel_type = CacheTemplateKernel


def _count_tiles(length: Any, side: str, sparse: str, meta: dict[str, Any], cdiv: Any) -> Any:
    """Number of tiles on one side, like count_tiles in portable/tile.py.jinja."""
    block, size = meta[f"BLOCK_{side}"], meta[f"SPARSE_{sparse}_BLOCK_SIZE"]
    per_block = meta[f"TILES_PER_{sparse}_BLOCK"]
    return cdiv(length, block) if size == block * per_block else cdiv(length, size) * per_block


def _query_grid(
    batch: Any, heads: Any, length: Any, width: Any, meta: dict[str, Any], *, cdiv: Any
) -> tuple[Any, int, int]:
    """One program per tile of queries, batch and query head, on one axis (2**31 programs)."""
    return (_count_tiles(length, "M", "Q", meta, cdiv) * batch * heads, 1, 1)


def decode_grid(
    batch: Any, heads: Any, length: Any, width: Any, meta: dict[str, Any], *, cdiv: Any, min: Any
) -> tuple[Any, int, int]:
    """One program per tile of rows, split of the keys, batch and packed heads, on one axis."""
    block, packed = meta["SPARSE_Q_BLOCK_SIZE"], meta["PACKED_HEADS"]
    tiles = cdiv(min(length, block) * packed, meta["BLOCK_M"]) * cdiv(length, block)
    return (tiles * meta["SPLITS"] * batch * cdiv(heads, packed), 1, 1)


def _key_grid(
    batch: Any, heads: Any, length: Any, width: Any, meta: dict[str, Any], *, cdiv: Any
) -> tuple[Any, int, int]:
    """One program per tile of keys, batch and key head of K, on one axis."""
    return (_count_tiles(length, "N", "KV", meta, cdiv) * batch * heads, 1, 1)


_GRIDS = {
    "forward": _query_grid,
    "decode": decode_grid,
    "jvp_forward": _query_grid,
    "grad_query": _query_grid,
    "grad_key_value": _key_grid,
    "jvp_grad_query": _query_grid,
    "jvp_grad_key_value": _key_grid,
}
# Two launches of one template; each writes one gradient.
_FILES = {
    "grad_key": "grad_key_value", "grad_value": "grad_key_value", "gradients": "grad_key_value",
    "jvp_grad_key": "jvp_grad_key_value", "jvp_grad_value": "jvp_grad_key_value",
}  # fmt: skip


@functools.cache
def _template(kernel: Kernel, extras: tuple[str, ...], *, is_cached: bool, is_wide: bool) -> Any:
    """The template of a kernel, with the functions that only some calls need."""
    file = _FILES.get(kernel, kernel)
    prefix = ("cached_" if is_cached else "") + ("wide_" if is_wide else "")
    name = "_".join(("flexhop", prefix + kernel, *extras))
    text = portable.source(prefix + file, extras)
    of_cache = (CacheTemplate,) if is_cached else ()
    return inductor.make_template(name, _GRIDS[file], text, *of_cache)


def emit_kernel(*args: Any) -> Any:
    """The result of a kernel; args as of `begin_kernel`."""
    return begin_kernel(*args)()


def begin_kernel(
    call: KernelCall,
    kernel: Kernel,
    inputs: Sequence[Any],
    output: Output,
    joint: Sequence[Any] = (),
    sites: Sequence[inductor.ScatterSite] = (),
) -> Callable[[], Any]:
    """Fill the template of a kernel; if it may spill, a worker begins to compile it.

    Returns what finishes it: the kernel's result, which has a shorter tile if it spills.

    Args:
        call: data that all kernels of the call share.
        kernel: name of the kernel.
        inputs: inputs of its template, the block lists last.
        output: what it stores.
        joint: the lowered joint graph: its first output, and the others for `sites`.
        sites: captured gradients that this kernel accumulates.
    """
    problem = call.problem
    dropout = _dropout(call, kernel)
    wanted = {
        "dropout": dropout is not None,
        "exact_sum": any(site.row is not None for site in sites),
        "groups": any(site.groups is not None for site in sites),
        "row_sums": any(site.kept is not None for site in sites),
    }
    extras = tuple(name for name, calls in wanted.items() if calls)
    template = _template(
        kernel, extras, is_cached=problem.cache is not None, is_wide=problem.is_wide
    )
    sites = [site._replace(is_transposed=kernel in OVER_KEYS) for site in sites]
    functions = [call.mods.score, call.mods.mask, *call.readers, *joint]
    subgraphs = inductor.Subgraphs(functions, sites, dropout)

    def fill_tiles(tiles: Sequence[Tile]) -> list[Any]:
        variants = _variants(call, kernel, tiles)
        return fill(template, inputs, output, variants, subgraphs, problem)

    tiles = _tiles(call, kernel)
    choices, may_spill = fill_tiles(tiles), _may_spill(call, kernel, tiles)
    if may_spill:
        ahead.begin(choices[0])

    def finish() -> Any:
        fitting = choices
        if may_spill and spills(kernel, choices[0], LOCAL_BYTES[kernel]):
            fitting = fill_tiles([shorter(kernel, tiles[0])])
        # Sums that the kernel adds to are inputs as well: their zeros must be there first.
        added_to = [x for x in output.written if not any(x is given for given in inputs)]
        operands = [*inputs, *call.captures, *call.seed, *added_to]
        generators = _generators(problem, kernel, inputs)
        name = f"flexhop_{kernel}"
        return select(name, fitting, operands, output, subgraphs, call.captures, generators)

    return finish


def _generators(problem: Problem, kernel: Kernel, inputs: Sequence[Any]) -> Mapping[int, Any]:
    """Contents of the block lists while choices are timed."""
    if problem.blocks is None:
        return {}
    merged = kernel == "decode" and splits.merges_lists(problem)
    first = len(inputs) - _NUM_LISTS
    return benchmark_inputs(inputs, first, problem.blocks, has_states=merged)


def _tiles(call: KernelCall, kernel: Kernel) -> list[Tile]:
    """Candidates."""
    problem, options = call.problem, call.options
    if fallback.is_careful():
        return kernels.all_tiles(kernel, problem, options)
    # Timing a kernel that adds to its outputs would add to them too.
    search = inductor.is_autotuning() and not problem.has_captured_grads
    return kernels.choose_tiles(kernel, problem, options, search=search)


def _may_spill(call: KernelCall, kernel: Kernel, tiles: Sequence[Tile]) -> bool:
    """Whether the user's functions may need registers that the table's tile leaves to none.

    Those of 16 bits were measured.
    """
    problem = call.problem
    is_usual = problem.itemsize <= 2 and not problem.is_wide and len(tiles) == 1
    is_given = getattr(call.options, kernels.option_of(kernel)) is not None
    if kernel not in LOCAL_BYTES or is_given or not is_usual:
        return False
    has_derivative = problem.mods.has_score_mod and problem.grad.has_score_grad
    has_long_steps = min(tiles[0].block_m, tiles[0].block_n) > 16
    return has_long_steps and (
        has_derivative or problem.has_captured_grads or problem.mods.mask_reads
    )


def _variants(
    call: KernelCall, kernel: Kernel, tiles: Sequence[Tile]
) -> Iterator[Mapping[str, Any]]:
    """The constants of every candidate tile."""
    problem, options = call.problem, call.options
    for tile in tiles:
        describe = functools.partial(plan_kernel, kernel, problem, options, call.passed, tile)
        show_plan(kernel, describe)
        launched = {"num_stages": tile.num_stages, "num_warps": tile.num_warps}
        yield {**launched, **kernels.constants(kernel, problem, options, tile)}


def _dropout(call: KernelCall, kernel: Kernel) -> inductor.Dropout | None:
    for seed in call.seed:
        dropout_p = call.problem.dropout_p
        # Decode's rows span several heads.
        in_groups = kernel != "decode" and _tiles_keep_groups(call.problem)
        queries = call.problem.dropout_groups
        groups = (queries, seed.get_size()[0] - 4 - queries) if queries else None
        return inductor.Dropout(
            seed.get_name(), threshold(dropout_p), 1.0 / (1.0 - dropout_p), in_groups, groups,
            is_float32(call.problem),
        )  # fmt: skip
    return None


def _tiles_keep_groups(problem: Problem) -> bool:
    """Whether all tiles start at multiples of 16 queries and keys: groups of ops/dropout.py."""
    blocks = problem.blocks
    return blocks is None or (blocks.q_size % 16 == 0 and blocks.kv_size % 16 == 0)
