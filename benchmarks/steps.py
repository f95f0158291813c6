"""``python -m benchmarks.steps REGEX``: instructions of the kernels' inner loops, without a GPU.

Each kernel of a case is compiled for sm_90 as Inductor would compile it. A loop with matrix
products and exponentials that contains no other such loop is a step over a tile of scores. A line
lists how many instructions each has, the shortest first: on the shortest way through it, which
leaves out the branches of a mask, and on the longest. Each consumer of a Hopper kernel has its own
loops, and the longest holds the ends of a tile. Instructions are no times: a Hopper kernel runs
softmax and products side by side.
"""

import argparse
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.cases import SUITES, Case
from benchmarks.implementations import build
from benchmarks.ways import ways
from flexhop.offline import Kernel, generate_code
from flexhop.offline.cubin import Cubin, compile_kernel, local_accesses


class Steps(NamedTuple):
    """The inner loops of one kernel: instructions of each, and accesses to local memory."""

    kernel: str
    registers: int
    loops: list[tuple[int, int]]
    spills: list[int]


def count(loop: str) -> int:
    """Instructions of a loop, one a line."""
    return sum(";" in line for line in loop.splitlines())


def innermost(loops: list[str]) -> list[str]:
    """The loops over tiles of scores that contain no other such loop, the shortest first."""
    steps = [loop for loop in loops if "MMA" in loop and loop.count("MUFU.EX2") > 1]
    inner = [a for a in steps if not any(b != a and b in a for b in steps)]
    return sorted(inner, key=count)


def read_steps(kernel: Kernel, cubin: Cubin) -> Steps:
    """The steps of a compiled kernel; a Hopper kernel has a name of its own."""
    inner = innermost(cubin.loops())
    name = kernel.functions[0] if kernel.is_gluon else kernel.name
    spills = [local_accesses(loop) for loop in inner]
    lengths = [(count(way.shortest), count(way.longest)) for way in map(ways, inner)]
    return Steps(name, cubin.registers, lengths, spills)


def measure(case: Case, implementation: str, *, grad: bool = False) -> Iterator[Steps]:
    """The steps of a case's attention kernels.

    Args:
        case: the problem.
        implementation: "flexhop" or "in-tree".
        grad: whether to compile the backward kernels, too.
    """
    attention = build(implementation, case, "cpu")
    assert attention is not None
    sizes = ((case.q_heads, case.head_dim), (case.kv_heads, case.head_dim))
    operands = [
        torch.zeros(
            case.batch, heads, case.length, width, dtype=torch.bfloat16, requires_grad=grad
        )
        for heads, width in (*sizes, (case.kv_heads, case.v_dim))
    ]
    torch.compiler.reset()
    for kernel in generate_code(attention, *operands, grad=grad).templates:
        yield read_steps(kernel, compile_kernel(kernel, 90))


def main() -> None:
    """Print a line for each kernel."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    parser.add_argument("cases", metavar="REGEX", help="names of cases of all suites")
    parser.add_argument("--grad", action="store_true", help="backward kernels, too")
    parser.add_argument("--in-tree", action="store_true", help="PyTorch's kernels, too")
    options = parser.parse_args()
    names = ("flexhop", "in-tree") if options.in_tree else ("flexhop",)
    for case in (case for suite in SUITES.values() for case in suite):
        if not re.search(options.cases, case.name):
            continue
        for name in names:
            for steps in measure(case, name, grad=options.grad):
                print(
                    f"{case.name} {name} {steps.kernel}: {steps.registers} registers, "
                    f"steps {steps.loops}, local memory {steps.spills}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
