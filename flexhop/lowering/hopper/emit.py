"""Fill and launch a Hopper kernel; there is no search over tiles."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from flexhop.compat.graphs import ahead
from flexhop.compat.kernels import gluon, inductor, launcher
from flexhop.lowering import fallback
from flexhop.lowering.emission.kernel import KernelCall, Output, fill, select, spills
from flexhop.lowering.portable.emit import decode_grid
from flexhop.templates import hopper

Name = Literal["forward", "latent", "latent_paged", "backward"]


def _grid(
    batch: Any, heads: Any, length: Any, width: Any, programs: Any, meta: dict[str, Any],
    *, cdiv: Any, min: Any,
) -> tuple[Any, int, int]:  # fmt: skip
    """As many programs as run concurrently; each takes tiles of queries until none is left."""
    heads = heads // meta["HEADS_PER_TILE"]
    return (min(programs, cdiv(length, meta["BLOCK_M"]) * batch * heads), 1, 1)


def _key_grid(
    batch: Any, heads: Any, length: Any, width: Any, programs: Any, meta: dict[str, Any],
    *, cdiv: Any, min: Any,
) -> tuple[Any, int, int]:  # fmt: skip
    """Like _grid, over tiles of keys."""
    return (min(programs, cdiv(length, meta["BLOCK_N"]) * batch * heads), 1, 1)


def _row_grid(
    batch: Any, heads: Any, length: Any, width: Any, programs: Any, meta: dict[str, Any],
    *, cdiv: Any, min: Any,
) -> tuple[Any, int, int]:  # fmt: skip
    """As that of decode: programs are not persistent."""
    return decode_grid(batch, heads, length, width, meta, cdiv=cdiv, min=min)


_GRIDS = {
    "forward": _grid, "latent": _row_grid, "latent_paged": _row_grid, "backward": _key_grid,
}  # fmt: skip


@functools.cache
def _template(name: Name, extras: tuple[str, ...]) -> Any:
    """The template of a kernel, with the functions that only some calls need."""
    marks: dict[tuple[str, ...], str] = {hopper.CAPTURED: "_captured", hopper.PAIRS: "_pairs"}
    full = f"flexhop_hopper_{name}{marks.get(extras, '')}"
    return gluon.make_template(full, _GRIDS[name], hopper.source(name, extras), hopper.IMPORTS)


def fill_kernel(
    call: KernelCall, name: Name, inputs: Sequence[Any], output: Output, constants: Any,
    subgraphs: inductor.Subgraphs,
) -> Any:  # fmt: skip
    """The single choice of a template.

    Args:
        call: data that all kernels of the call share.
        name: name of the kernel.
        inputs: inputs of its template, the block lists last.
        output: what it stores.
        constants: its constants dataclass.
        subgraphs: the user's functions.
    """
    extras = hopper.CAPTURED if subgraphs.sites else hopper.PAIRS if subgraphs.pairs else ()
    template = _template(name, extras)
    # The last size is what the grid functions call `programs`.
    persistent = output._replace(sizes=[*output.sizes, call.problem.device.multiprocessors])
    variant = {"num_stages": 1, "num_warps": 4, **dataclasses.asdict(constants)}
    (choice,) = fill(template, inputs, persistent, [variant], subgraphs, call.problem)
    # A thread builds it while a worker compiles the kernel.
    launcher.build(choice)
    return choice


class Attempt(NamedTuple):
    """A kernel to try: its constants, the user's functions, and the most local memory in bytes."""

    constants: Any
    subgraphs: inductor.Subgraphs
    most: int | None


def emit_first(
    call: KernelCall, name: Name, inputs: Sequence[Any], output: Output,
    attempts: Sequence[Attempt], *, side_by_side: bool = True,
) -> Any:  # fmt: skip
    """The launch of the first kernel that `emit_kernel` does not reject, or None.

    side_by_side: whether another worker compiles the next while one is compiled to be measured.
    """
    for number, attempt in enumerate(attempts):
        following = attempts[number + 1 : number + 2] if side_by_side else ()
        found = emit_kernel(call, name, inputs, output, *attempt, following)
        if found is not None:
            return found
    return None


def emit_kernel(
    call: KernelCall, name: Name, inputs: Sequence[Any], output: Output, constants: Any,
    subgraphs: inductor.Subgraphs, most: int | None, following: Sequence[Attempt] = (),
) -> Any:  # fmt: skip
    """A kernel's launch, or None if its threads need more than `most` bytes of local memory.

    Args and Returns: see fill_kernel. following: kernels to compile meanwhile.
    """
    choice = fill_kernel(call, name, inputs, output, constants, subgraphs)
    ahead.finish(choice)
    if most is not None and following and ahead.begin(choice) and not fallback.is_careful():
        for other in following:
            filled = fill_kernel(call, name, inputs, output, other.constants, other.subgraphs)
            ahead.start(filled)
    if most is not None and spills(f"hopper_{name}", choice, most):
        return None
    ahead.start_soon(choice)
    added_to = output.written if subgraphs.sites else ()
    operands = [*inputs, *call.captures, *added_to]
    result = select(f"flexhop_hopper_{name}", [choice], operands, output, subgraphs, call.captures)
    # The kernel stores its result by itself, so nothing can be fused into the store.
    gluon.keep_apart(result)
    return result
