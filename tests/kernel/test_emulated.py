"""Hopper kernels compute what the specification says, in an emulated GPU.

Asynchronous copies and products happen early, late or at any time, and threads run in any order:
whatever barriers allow.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import flexhop
from flexhop.offline.interpret import Deadlock, Emulator, Memory, Schedule, interpret
from flexhop.offline.kernel import Kernel
from flexhop.options import KernelOptions
from tests.case_inputs import Case, Shape, make_call, make_inputs, make_loss
from tests.cases import per_batch_documents
from tests.judging import Outcome, assert_case

HOPPER = KernelOptions(backend="hopper")
EXACT = KernelOptions(backend="hopper", deterministic=True)


def alibi(c):
    return lambda s, b, h, q, k: s + c.slopes[h] * (k - q)


def by_distance(c):
    return lambda s, b, h, q, k: s * torch.sigmoid(s) + c.table[h, q - k + 200]


CASES = [
    # Two consumers; an odd length; a gradient of a captured tensor.
    Case("alibi", score=alibi, mask=lambda c: flexhop.masks.causal, dtype=torch.bfloat16,
         captures=lambda s, r: {"slopes": r.uniform(s.heads)}, learned=("slopes",), lse=True,
         shape=Shape(1, 2, 1, 193, 193, 64, 64), options=HOPPER),
    # Masks as stored bits; sums in an order.
    Case("documents", mask=per_batch_documents, per_batch=True, dtype=torch.float16,
         captures=lambda s, r: {"ids": r.documents(4, s.batch, s.q_len)},
         shape=Shape(2, 1, 1, 150, 150, 128, 128), options=EXACT),
    # Mods that read tables; a width that is no power of two; more keys than queries.
    Case("table", score=by_distance, mask=lambda c: lambda b, h, q, k: (q * 7 + k * 3) % 5 != 0,
         captures=lambda s, r: {"table": r.normal(s.heads, 450)}, dtype=torch.bfloat16,
         shape=Shape(1, 2, 2, 130, 200, 80, 80), options=HOPPER),
]  # fmt: skip
GATHERED = Case(
    "gathered", mask=lambda c: lambda b, h, q, k: (q // 32 * 5 + k // 32 * 3) % 4 == 0,
    block_size=32, dtype=torch.bfloat16, shape=Shape(1, 4, 2, 200, 300, 64, 64), options=HOPPER,
)  # fmt: skip


def emulated(case: Case, when: str) -> None:
    inputs = make_inputs(case)
    emulator = Emulator(schedule=Schedule(when, 5))
    result = interpret(
        make_call(case, inputs), inputs.query, inputs.key, inputs.value,
        grad=make_loss(case, inputs), memory=Memory(poison=True), emulator=emulator,
    ).result  # fmt: skip
    assert_case(case, inputs, Outcome.of(case, result, inputs))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients(case):
    emulated(case, "random")


def test_gathered_blocks():
    emulated(GATHERED, "late")


@pytest.fixture(scope="module")
def forward() -> tuple[Kernel, tuple[int, ...], dict[str, torch.Tensor]]:
    """A kernel, its grid, and arguments with its results."""
    launches = []

    class Spy(Emulator):
        def run(self, kernel, grid, arguments):
            super().run(kernel, grid, arguments)
            launches.append((kernel, grid, arguments))

    torch.manual_seed(0)
    operands = (torch.randn(1, 1, n, 64).bfloat16() for n in (100, 200, 200))
    interpret(
        lambda *qkv: flexhop.flex_attention(*qkv, kernel_options=HOPPER), *operands, emulator=Spy()
    )
    return launches[0]


# What the kernel does without one of its barriers, if everything happens as late as it may.
FAULTS = {
    "values are read before they come": (
        "mbarrier.wait(barriers.ready.index(SLOTS + slot), phase)", None,
    ),
    "nobody says where tiles are": ("mbarrier.arrive(barriers.tile_ready.index(slot))", Deadlock),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_barrier_is_found(forward, fault):
    kernel, grid, arguments = forward
    line, error = FAULTS[fault]
    assert kernel.source.count(line) == 1
    broken = dataclasses.replace(kernel, source=kernel.source.replace(line, "pass"))
    written = ("out_ptr0", "arg_COUNTER")
    again = {n: torch.zeros_like(t) if n in written else t for n, t in arguments.items()}
    emulator = Emulator(schedule=Schedule("late"))
    if error:
        with pytest.raises(error, match="all threads wait"):
            emulator.run(broken, grid, again)
        return
    emulator.run(kernel, grid, again)
    assert torch.equal(again["out_ptr0"], arguments["out_ptr0"])
    again["arg_COUNTER"].zero_()
    emulator.run(broken, grid, again)
    assert not torch.equal(again["out_ptr0"], arguments["out_ptr0"])
