"""Run generated GPU code on CPU tensors: template kernels and Inductor's own kernels around
them.

Triton kernels run in Triton's interpreter, Gluon kernels in an emulator of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexhop.compat.offline.cpu_wrapper import launch_grid, load_wrapper
from flexhop.offline import interpreter
from flexhop.offline.codegen import (
    Generated,
    Graph,
    Loss,
    canonical,
    differentiate,
    trace,
)
from flexhop.offline.emulate import GLUON, Deadlock, Emulator, Race, Schedule
from flexhop.offline.kernel import Kernel, read_kernel
from flexhop.offline.memory import Memory, OutOfBoundsError

__all__ = [
    "Deadlock", "Emulator", "Memory", "OutOfBoundsError", "Race", "Schedule", "interpret", "load",
    "run_kernel",
]  # fmt: skip

# A numpy operation costs about the same for few elements and many, so blocks are large.
_BLOCK_ELEMENTS = 1 << 15
# Inductor omits the mask if a length is a multiple of the largest block that it tries.
_LARGEST = {"x": 4096, "y": 1024, "z": 1024}


def interpret(
    function: Callable[..., Any],
    *args: Any,
    grad: bool | Loss = False,
    memory: Memory | None = None,
    emulator: Emulator = GLUON,
    **generation: Any,
) -> Generated:
    """Compile a function for a GPU and run its kernels on the CPU.

    Args:
        function: as in `generate`.
        *args: its arguments, with tensors on the CPU.
        grad: as in `generate`: the backward kernels then fill `.grad`.
        memory: what to watch; see `Memory`.
        emulator: which kernels it runs, and how; see `Emulator`.
        **generation: `capability`, `options`, `dynamic` as in `generate`.

    Returns:
        The generated code, and the result that the kernels computed.

    Raises:
        NotImplementedError: an instruction without a numpy counterpart.
        OutOfBoundsError: if `memory` checks bounds, and in emulated kernels.
        Deadlock: all threads of an emulated program wait.
        Race: nothing orders two accesses of shared memory in an emulated program.
    """
    graphs: list[Graph] = []

    def run_kernels(graph: Graph) -> Callable[[list[Any]], Sequence[Any]]:
        graphs.append(graph)
        return load(graph.codes[0], memory, emulator=emulator)

    compiled = trace(function, run_kernels, generation.pop("capability", (9, 0)), **generation)
    result = compiled(*args)
    if grad:
        differentiate(result, grad)
    codes = [canonical(graph.codes[0]) for graph in graphs]
    return Generated(codes[0], codes[1] if len(codes) > 1 else None, result)


def load(
    code: str,
    memory: Memory | None = None,
    gluon: Callable[[Kernel, dict[str, Any]], None] | None = None,
    emulator: Emulator = GLUON,
) -> Callable[[list[Any]], Sequence[Any]]:
    """Make generated code callable on CPU tensors.

    Args:
        code: `Generated.forward` or `Generated.backward`.
        memory: what to watch.
        gluon: called instead of Gluon kernels, with their arguments by name.
        emulator: as in `interpret`.

    Returns:
        A function of the list of graph inputs that returns the graph outputs.
    """
    watched = memory or Memory()

    def make_kernel(name: str, source: str) -> Callable[..., None]:
        kernel = read_kernel(name, source)
        stand_in = gluon if kernel.is_gluon else None
        if stand_in is not None:
            return lambda *args: stand_in(kernel, _named(kernel, args))
        return lambda *args: _launch(kernel, args, watched, emulator)

    return load_wrapper(code, make_kernel, watched.allocate)


def run_kernel(
    kernel: Kernel,
    grid: tuple[int, ...],
    arguments: dict[str, Any],
    memory: Memory | None = None,
    emulator: Emulator = GLUON,
) -> None:
    """Run one kernel.

    Args:
        kernel: a Triton or Gluon kernel.
        grid: number of programs along up to three axes.
        arguments: by name: CPU tensors for pointers, numbers, and constants such as XBLOCK.
        memory: what the interpreter watches.
        emulator: which kernels it runs, and how.
    """
    if emulator.takes(kernel):
        emulator.run(kernel, grid, arguments)
        return
    watched = memory or Memory()
    with interpreter.interpreting(watched):
        module = kernel.module()
        if hasattr(module, "libdevice"):
            setattr(module, "libdevice", interpreter.libdevice)  # noqa: B010
        watched.enter_kernel(kernel.name, arguments)
        interpreter.launch(getattr(module, kernel.name), grid, arguments)


def _named(kernel: Kernel, args: Sequence[Any]) -> dict[str, Any]:
    """What Inductor's wrapper passes: run-time arguments, then the parameters of the grid."""
    extra = kernel.inductor_meta.get("extra_launcher_args", [])
    return dict(zip([*kernel.parameters, *extra], args, strict=True))


def _launch(kernel: Kernel, args: Sequence[Any], memory: Memory, emulator: Emulator) -> None:
    named = _named(kernel, args)
    blocks = _blocks(kernel, named)
    grid = launch_grid(kernel.inductor_meta, named, blocks)
    types = kernel.meta.get("signature", {})
    given = {name: _as_declared(named[name], types.get(name, "")) for name in kernel.parameters}
    arguments = given | blocks
    run_kernel(kernel, grid, arguments, memory, emulator)


def _as_declared(value: Any, declared: str) -> Any:
    """A launcher passes an address: the memory there has the type that the kernel declares."""
    return value.view(torch.uint8) if declared == "*u8" else value


def _blocks(kernel: Kernel, named: dict[str, Any]) -> dict[str, int]:
    """Block sizes for one of Inductor's own kernels, which it would tune at the first run."""
    left = _BLOCK_ELEMENTS
    blocks: dict[str, int] = {}
    # Reductions first: a program should cover them at once.
    for axis in ("r0_", "r1_", "x", "y", "z"):
        length = named.get(f"{axis}numel", kernel.size_hints.get(axis))
        if length is not None:
            block = min(1 << (max(int(length), 1) - 1).bit_length(), left)
            largest = _LARGEST.get(axis, block)
            if int(length) % largest == 0 and int(length) % block:
                block = largest
            left = max(left // block, 1)
            blocks[f"{axis.upper()}BLOCK"] = block
    missing = [name for name in kernel.constexprs if name not in blocks]
    if missing:
        raise NotImplementedError(f"No launch configuration known for {missing} of {kernel.name}.")
    return {name: blocks[name] for name in kernel.constexprs}
