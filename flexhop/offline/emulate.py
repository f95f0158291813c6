"""Run generated kernels on a CPU as a GPU runs them, from their PTX.

Triton's interpreter cannot run Gluon kernels, and knows neither layouts nor barriers. The emulator
has a GPU's threads, warps and barriers, shared memory with swizzles, copies by tensor maps, and
products of warps and warpgroups. It does not reproduce the last bits of `fma` and of approximate
functions. A tile of scores takes milliseconds.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from flexhop.offline.cubin import compile_kernel
from flexhop.offline.kernel import Kernel
from flexhop.offline.ptx.groups import Deadlock
from flexhop.offline.ptx.machine import Machine
from flexhop.offline.ptx.memory import GlobalMemory
from flexhop.offline.ptx.order import ANY_ORDER, Schedule, When
from flexhop.offline.ptx.parse import Program, parse
from flexhop.offline.ptx.races import Race

__all__ = ["GLUON", "Deadlock", "Emulator", "Race", "Schedule", "When"]

_ARRAYS = 1 << 62  # where the arrays of a file are; nobody reads them
_SLICE = 2_000_000  # instructions of a program before another one runs, which it may wait for
_AXES = ("x", "y", "z")


class Emulator(NamedTuple):
    """Which kernels are emulated, and how.

    architecture: for which they are compiled: 90 for Gluon kernels; 80, 86, 90 or 120 for others.
        Those for sm_100 have instructions that the emulator does not know.
    templates: whether it also runs Triton kernels of templates, instead of Triton's interpreter.
    schedule: when things happen that a GPU may do at any time.
    races: whether accesses of shared memory that nothing orders are errors; it doubles the time.
    """

    architecture: int = 90
    templates: bool = False
    schedule: Schedule = ANY_ORDER
    races: bool = True

    def takes(self, kernel: Kernel) -> bool:
        """Whether it runs a kernel."""
        return kernel.is_gluon or (self.templates and kernel.is_template)

    def run(self, kernel: Kernel, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        """Compile a kernel and run it.

        Args:
            kernel: a Triton or Gluon kernel.
            grid: number of programs along up to three axes.
            arguments: by name: CPU tensors for pointers, and numbers.

        Raises:
            OutOfBoundsError: a thread leaves the memory of its argument.
            Deadlock: all threads of a program wait.
            Race: nothing orders two accesses of shared memory.
            NotImplementedError: an instruction that the emulator does not know.
        """
        cubin = compile_kernel(kernel, self.architecture)
        sizes = (*grid, 1, 1)[:3]
        tensors = {name: a for name, a in arguments.items() if isinstance(a, torch.Tensor)}
        # For descriptors of tensors; each program has its part.
        scratch = torch.zeros(math.prod(sizes) * max(cubin.scratch, 1), dtype=torch.uint8)
        launch = _Launch(
            kernel.name, parse(cubin.ptx), GlobalMemory(kernel.name, {**tensors, "": scratch}),
            cubin.shared, self.schedule, self.races,
        )  # fmt: skip
        launch.run(sizes, _parameters(kernel, launch.program, arguments, scratch))


GLUON = Emulator()


class _Launch(NamedTuple):
    """One launch of a kernel; fields as of Machine."""

    name: str
    program: Program
    memory: GlobalMemory
    shared: int
    schedule: Schedule
    races: bool

    def run(self, sizes: tuple[int, ...], parameters: dict[str, int]) -> None:
        """Run all programs of a grid, one after the other unless one waits for others."""
        symbols = {"global_smem": 0} | dict.fromkeys(self.program.arrays, _ARRAYS) | parameters
        grid = {f"%nctaid.{axis}": size for axis, size in zip(_AXES, sizes, strict=True)}
        free: list[Machine] = []
        waiting: list[tuple[tuple[int, ...], Machine]] = []
        for place in np.ndindex(sizes[::-1]):
            here = place[::-1]
            if not free:
                free.append(
                    Machine(self.program, self.memory, self.shared, symbols, self.schedule)
                )
                if self.races:
                    free[-1].watch()
            machine = free.pop()
            machine.start(grid | {f"%ctaid.{a}": n for a, n in zip(_AXES, here, strict=True)})
            if _run(machine, here):
                free.append(machine)
            else:
                waiting.append((here, machine))
        while waiting:
            waiting = [(here, machine) for here, machine in waiting if not _run(machine, here)]


def _run(machine: Machine, here: tuple[int, ...]) -> bool:
    machine.memory.program = here
    try:
        with np.errstate(all="ignore"):
            return machine.run(_SLICE)
    except Exception as error:
        error.add_note(f"in program {here}")
        raise


def _parameters(
    kernel: Kernel, program: Program, arguments: dict[str, Any], scratch: torch.Tensor
) -> dict[str, int]:
    """Values of the kernel's parameters; the last two are memory for descriptors and profiles."""
    given = [
        _bits(arguments[name], kind)
        for name, kind in kernel.meta["signature"].items()
        if kind != "constexpr"
    ]
    given += [scratch.data_ptr(), 0]
    assert len(given) == len(program.parameters), (kernel.meta["signature"], program.parameters)
    return dict(zip(program.parameters, given, strict=True))


def _bits(value: Any, kind: str) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if kind == "fp32":
        return int(np.float32(value).view(np.uint32))
    if kind == "fp64":
        return int(np.float64(value).view(np.uint64))
    return int(value)
