"""Emit one kernel of a call: every tile that is worth trying becomes a choice of Inductor's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flexhop.compat import ahead, gluon, inductor, launcher
from flexhop.compat.cache_template import CacheTemplate
from flexhop.lowering.hopper import backward as hopper_grad
from flexhop.lowering.hopper import forward as hopper
from flexhop.lowering.mods.lower import ModBuffers
from flexhop.lowering.operands import benchmark_inputs
from flexhop.lowering.plan import show_hopper_grad_plan, show_hopper_plan, show_plan, show_refusal
from flexhop.lowering.portable import kernels
from flexhop.lowering.portable.tiles import Kernel
from flexhop.lowering.problem import Problem
from flexhop.ops.dropout import threshold
from flexhop.options import KernelOptions
from flexhop.templates import CAPTURED, source

# The block lists are the last inputs of every template.
_NUM_LISTS = 4


def _count_tiles(length: Any, side: str, sparse: str, meta: dict[str, Any], cdiv: Any) -> Any:
    """Tiles of one side, as count_tiles in portable/tile.py.jinja counts them."""
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


def _persistent_key_grid(
    batch: Any, heads: Any, length: Any, width: Any, programs: Any, meta: dict[str, Any],
    *, cdiv: Any, min: Any,
) -> tuple[Any, int, int]:  # fmt: skip
    """As _persistent_grid, over tiles of keys."""
    return (min(programs, cdiv(length, meta["BLOCK_N"]) * batch * heads), 1, 1)


_KERNELS: dict[str, tuple[Any, str]] = {  # grid and template
    **{name: (_query_grid, name) for name in ("forward", "grad_query")},
    "decode": (_decode_grid, "decode"),
    "cached_forward": (_query_grid, "cached_forward"),
    "cached_decode": (_decode_grid, "cached_decode"),
    **dict.fromkeys(("grad_key_value", "grad_key", "grad_value"), (_key_grid, "grad_key_value")),
}
_HOPPER_GRIDS = {"hopper_forward": _persistent_grid, "hopper_backward": _persistent_key_grid}


@functools.cache
def _gluon_template(name: str, extras: tuple[str, ...]) -> Any:
    """The template of a kernel of Hopper GPUs, with the functions that some calls need."""
    full = f"flexhop_{name}_captured" if extras else f"flexhop_{name}"
    return gluon.make_template(full, _HOPPER_GRIDS[name], source(name, extras))


@functools.cache
def _template(kernel: str, extras: tuple[str, ...]) -> Any:
    """The template of a kernel, with the functions that some calls need."""
    grid, file = _KERNELS[kernel]
    name = "_".join(("flexhop", kernel, *extras))
    of_cache = (CacheTemplate,) if kernel.startswith("cached") else ()
    return inductor.make_template(
        name, grid, source(file, tuple(f"mods/{extra}" for extra in extras)), *of_cache
    )


class Output(NamedTuple):
    """What a kernel stores.

    layout: of the result. sizes: four, from which its grid follows. written: tensors that the
    kernel writes beside its result.
    """

    layout: Any
    sizes: Sequence[Any]
    written: Sequence[Any] = ()


class Launch(NamedTuple):
    """What the kernels of one call share.

    captures: of all mods, lowered. readers: the subgraphs of portable/cache/keys.py.jinja and
    mods/key_mods.py.jinja, where a cache is read. seed: of dropout, if there is any.
    """

    problem: Problem
    options: KernelOptions
    mods: ModBuffers
    captures: list[Any]
    readers: tuple[Any, ...] = ()
    seed: Sequence[Any] = ()

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
        dropout = self._dropout(kernel)
        is_exact = any(site.row is not None for site in sites)
        wanted = {"dropout": dropout is not None, "exact_sum": is_exact}
        file = kernel if self.problem.cache is None else f"cached_{kernel}"
        template = _template(file, tuple(name for name, calls in wanted.items() if calls))
        functions = [self.mods.score, self.mods.mask, *self.readers, *joint]
        subgraphs = inductor.Subgraphs(functions, sites, dropout)
        choices: list[Any] = []
        # Timing a kernel that adds to its outputs would add to them.
        search = inductor.is_autotuning() and not self.problem.has_captured_grads
        for tile in kernels.choose_tiles(kernel, self.problem, self.options, search=search):
            show_plan(kernel, self.problem, self.options, tile)
            error = template.maybe_append_choice(
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
        operands = [*inputs, *self.captures, *self.seed, *added_to]
        result = inductor.select(f"flexhop_{kernel}", choices, operands, output.layout, generators)
        inductor.note_subgraphs(result, self.captures, subgraphs)
        return result

    def _dropout(self, kernel: Kernel) -> inductor.Dropout | None:
        for seed in self.seed:
            dropout_p = self.problem.dropout_p
            # Rows of decode are of several heads.
            in_groups = kernel != "decode" and kernels.tiles_keep_groups(self.problem)
            return inductor.Dropout(
                seed.get_name(), threshold(dropout_p), 1.0 / (1.0 - dropout_p), in_groups
            )
        return None

    def emit_hopper(self, inputs: Sequence[Any], output: Output) -> Any:
        """Emit the forward kernel of Hopper GPUs, whose tile is not searched for.

        Args:
            inputs: of its template, the block lists last.
            output: what it stores; sizes are those of query.

        Returns:
            None if its machine code is refused.
        """
        tile = hopper.table_tile(self.problem)
        show_hopper_plan(self.problem, self.options, tile)
        constants = hopper.constants(self.problem, self.options, tile)
        most = hopper.local_memory_limit(self.problem, self.options)
        return self._emit_gluon("hopper_forward", inputs, output, constants, self.mods.line, most)

    def emit_hopper_backward(
        self,
        inputs: Sequence[Any],
        output: Output,
        joint: Sequence[Any],
        sites: Sequence[inductor.ScatterSite] = (),
    ) -> Any:
        """Emit the backward kernel of Hopper GPUs, whose result is the gradient of key.

        Args:
            inputs: of its template, the block lists last.
            output: what it stores; sizes are those of key.
            joint: the lowered joint graph: its first output, and for `sites` the others.
            sites: captured gradients that it adds up.

        Returns:
            None if its machine code is refused.
        """
        show_hopper_grad_plan(self.problem)
        constants = hopper_grad.constants(self.problem, hopper_grad.table_tile(self.problem))
        most = hopper_grad.local_memory_limit(self.problem, self.options)
        return self._emit_gluon("hopper_backward", inputs, output, constants, joint, most, sites)

    def start_hopper_backward(
        self, inputs: Sequence[Any], output: Output, joint: Sequence[Any]
    ) -> None:
        """Begin to compile what emit_hopper_backward will emit if it gets operands like these."""
        constants = hopper_grad.constants(self.problem, hopper_grad.table_tile(self.problem))
        subgraphs = inductor.Subgraphs([self.mods.score, self.mods.mask, *joint])
        ahead.start(self._fill_gluon("hopper_backward", inputs, output, constants, subgraphs))

    def _fill_gluon(
        self, name: str, inputs: Sequence[Any], output: Output, constants: Any,
        subgraphs: inductor.Subgraphs,
    ) -> Any:  # fmt: skip
        """The one choice of a template in Gluon."""
        choices: list[Any] = []
        error = _gluon_template(name, CAPTURED if subgraphs.sites else ()).maybe_append_choice(
            choices, input_nodes=inputs, layout=output.layout, subgraphs=subgraphs,
            mutated_inputs=list(output.written),
            call_sizes=[*output.sizes, self.problem.device.multiprocessors],
            num_stages=1, num_warps=4, **dataclasses.asdict(constants),
        )  # fmt: skip
        if error is not None:
            raise error
        launcher.build(choices[0])
        return choices[0]

    def _emit_gluon(
        self, name: str, inputs: Sequence[Any], output: Output, constants: Any,
        others: Sequence[Any], most: int | None, sites: Sequence[inductor.ScatterSite] = (),
    ) -> Any:  # fmt: skip
        """A kernel's launch, unless its threads need more than `most` bytes of local memory."""
        subgraphs = inductor.Subgraphs([self.mods.score, self.mods.mask, *others], sites)
        choices = [self._fill_gluon(name, inputs, output, constants, subgraphs)]
        ahead.finish(choices[0])
        needed = None if most is None else ahead.local_memory(choices[0])
        if needed is not None and most is not None and needed > most:
            show_refusal(name, needed, most)
            return None
        added_to = output.written if sites else ()
        operands = [*inputs, *self.captures, *added_to]
        result = inductor.select(f"flexhop_{name}", choices, operands, output.layout, {})
        inductor.note_subgraphs(result, self.captures, subgraphs)
        gluon.keep_apart(result)
        return result


def emit_one(
    template: Any, inputs: Sequence[Any], output: Output, constants: Mapping[str, Any],
    launch: Launch | None = None,
) -> Any:  # fmt: skip
    """Emit the kernel of a template of which there is one choice.

    Args:
        template: of inductor.make_template.
        inputs: of the template.
        output: what it stores, and the sizes from which its grid follows.
        constants: of the template, and num_warps.
        launch: whose user functions it calls, if it calls any.
    """
    subgraphs = captures = None
    if launch is not None:
        subgraphs = inductor.Subgraphs([launch.mods.score, launch.mods.mask])
        captures = launch.captures
    choices: list[Any] = []
    error = template.maybe_append_choice(
        choices, input_nodes=inputs, layout=output.layout, subgraphs=subgraphs,
        mutated_inputs=list(output.written), call_sizes=output.sizes, num_stages=1, **constants,
    )  # fmt: skip
    if error is not None:
        raise error
    operands = [*inputs, *(captures or ())]
    result = inductor.select(template.name, choices, operands, output.layout, {})
    if subgraphs is not None:
        inductor.note_subgraphs(result, captures or (), subgraphs)
    return result
