"""Emit one kernel of a call: every tile that is worth trying becomes a choice of Inductor's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from flexhop.compat import gluon, inductor
from flexhop.lowering import hopper, kernels
from flexhop.lowering.mods import ModBuffers
from flexhop.lowering.operands import benchmark_inputs
from flexhop.lowering.plan import show_hopper_plan, show_plan
from flexhop.lowering.problem import Problem
from flexhop.lowering.tiles import Kernel
from flexhop.options import KernelOptions
from flexhop.templates import source

# The block lists are the last inputs of every template.
_NUM_LISTS = 4


def _count_tiles(length: Any, side: str, sparse: str, meta: dict[str, Any], cdiv: Any) -> Any:
    """Tiles of one side, as count_tiles in tile.py.jinja counts them."""
    block, size = meta[f"BLOCK_{side}"], meta[f"SPARSE_{sparse}_BLOCK_SIZE"]
    per_block = meta[f"TILES_PER_{sparse}_BLOCK"]
    return cdiv(length, block) if size == block * per_block else cdiv(length, size) * per_block


def _query_grid(
    batch: Any, heads: Any, length: Any, width: Any, meta: dict[str, Any], *, cdiv: Any
) -> tuple[Any, int, int]:
    """One program per tile of queries, batch and query head, on one axis (2**31 programs)."""
    return (_count_tiles(length, "M", "Q", meta, cdiv) * batch * heads, 1, 1)


def _decode_grid(
    batch: Any, heads: Any, length: Any, width: Any, meta: dict[str, Any], *, cdiv: Any, min: Any
) -> tuple[Any, int, int]:
    """One program per tile of rows, share of the keys, batch and packed heads, on one axis."""
    block, packed = meta["SPARSE_Q_BLOCK_SIZE"], meta["PACKED_HEADS"]
    tiles = cdiv(min(length, block) * packed, meta["BLOCK_M"]) * cdiv(length, block)
    return (tiles * meta["SPLITS"] * batch * cdiv(heads, packed), 1, 1)


def _key_grid(
    batch: Any, heads: Any, length: Any, width: Any, meta: dict[str, Any], *, cdiv: Any
) -> tuple[Any, int, int]:
    """One program per tile of keys, batch and key head of K, on one axis."""
    return (_count_tiles(length, "N", "KV", meta, cdiv) * batch * heads, 1, 1)


def _persistent_grid(
    batch: Any, heads: Any, length: Any, width: Any, programs: Any, meta: dict[str, Any],
    *, cdiv: Any, min: Any,
) -> tuple[Any, int, int]:  # fmt: skip
    """As many programs as run side by side; each takes tiles of queries until none is left."""
    return (min(programs, cdiv(length, meta["BLOCK_M"]) * batch * heads), 1, 1)


_TEMPLATES = {
    **{
        name: inductor.make_template(f"flexhop_{name}", _query_grid, source(name))
        for name in ("forward", "grad_query")
    },
    "decode": inductor.make_template("flexhop_decode", _decode_grid, source("decode")),
    **{
        name: inductor.make_template(f"flexhop_{name}", _key_grid, source("grad_key_value"))
        for name in ("grad_key_value", "grad_key", "grad_value")
    },
}
_HOPPER = gluon.make_template("flexhop_hopper_forward", _persistent_grid, source("hopper_forward"))


class Output(NamedTuple):
    """What a kernel stores.

    layout: of the result. sizes: four, from which its grid follows. written: tensors that the
    kernel writes beside its result.
    """

    layout: Any
    sizes: Sequence[Any]
    written: Sequence[Any] = ()


class Launch(NamedTuple):
    """What the kernels of one call share. captures: of both mods, lowered."""

    problem: Problem
    options: KernelOptions
    mods: ModBuffers
    captures: list[Any]

    def emit(
        self,
        kernel: Kernel,
        inputs: Sequence[Any],
        output: Output,
        joint: Sequence[Any] = (),
        sites: Sequence[inductor.ScatterSite] = (),
    ) -> Any:
        """Emit one kernel.

        Args:
            kernel: which.
            inputs: of its template, the block lists last.
            output: what it stores.
            joint: the lowered joint graph: its first output, and for `sites` the others.
            sites: captured gradients that this kernel adds up.
        """
        subgraphs = inductor.Subgraphs([self.mods.score, self.mods.mask, *joint], sites)
        choices: list[Any] = []
        # Timing a kernel that adds to its outputs would add to them.
        search = inductor.is_autotuning() and not self.problem.has_captured_grads
        for tile in kernels.choose_tiles(kernel, self.problem, self.options, search=search):
            show_plan(kernel, self.problem, self.options, tile)
            error = _TEMPLATES[kernel].maybe_append_choice(
                choices, input_nodes=inputs, layout=output.layout, subgraphs=subgraphs,
                mutated_inputs=list(output.written), call_sizes=output.sizes,
                num_stages=tile.num_stages, num_warps=tile.num_warps,
                **kernels.constants(kernel, self.problem, self.options, tile),
            )  # fmt: skip
            if error is not None:
                raise error
        generators = {}
        blocks, first = self.problem.blocks, len(inputs) - _NUM_LISTS
        if blocks is not None:
            generators = benchmark_inputs(inputs, first, has_ranges=blocks.has_ranges)
        added_to = output.written if sites else ()
        operands = [*inputs, *self.captures, *added_to]
        result = inductor.select(f"flexhop_{kernel}", choices, operands, output.layout, generators)
        inductor.note_subgraphs(result, self.captures, subgraphs)
        return result

    def emit_hopper(self, inputs: Sequence[Any], output: Output) -> Any:
        """Emit the forward kernel of Hopper GPUs, whose tile is not searched for.

        Args:
            inputs: of its template, the block lists last.
            output: what it stores; sizes are those of query.
        """
        subgraphs = inductor.Subgraphs([self.mods.score, self.mods.mask])
        tile = hopper.table_tile(self.problem)
        show_hopper_plan(self.problem, self.options, tile)
        constants = dataclasses.asdict(hopper.constants(self.problem, self.options, tile))
        choices: list[Any] = []
        error = _HOPPER.maybe_append_choice(
            choices, input_nodes=inputs, layout=output.layout, subgraphs=subgraphs,
            mutated_inputs=list(output.written),
            call_sizes=[*output.sizes, self.problem.device.multiprocessors],
            num_stages=1, num_warps=4, **constants,
        )  # fmt: skip
        if error is not None:
            raise error
        operands = [*inputs, *self.captures]
        result = inductor.select("flexhop_hopper_forward", choices, operands, output.layout, {})
        inductor.note_subgraphs(result, self.captures, subgraphs)
        gluon.keep_apart(result)
        return result
