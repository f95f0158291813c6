"""Hopper kernels compute what the specification says, in an emulated GPU.

Asynchronous copies and products happen early, late or at any time, and threads run in any order:
whatever barriers allow. Accesses of shared memory that no barrier orders are errors.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
import torch

import flexhop
from flexhop.compat.graphs import ahead
from flexhop.offline import emulate
from flexhop.offline.cubin import compile_kernel
from flexhop.offline.interpret import Deadlock, Emulator, Memory, Race, Schedule, interpret
from flexhop.offline.kernel import Kernel
from flexhop.options import KernelOptions
from tests.case_inputs import Case, Shape, make_call, make_inputs, make_loss
from tests.cases import per_batch_documents
from tests.judging import Outcome, assert_case
from tests.needs import needs_hopper
from tests.problems import few_multiprocessors

pytestmark = needs_hopper
HOPPER = KernelOptions(backend="hopper")
EXACT = KernelOptions(backend="hopper", deterministic=True)


def alibi(c):
    return lambda s, b, h, q, k: s + c.slopes[h] * (k - q)


def gelu(c):
    return lambda s, b, h, q, k: torch.nn.functional.gelu(s)


def by_distance(c):
    return lambda s, b, h, q, k: s * torch.sigmoid(s) + c.table[h, q - k + 200]


def by_gates(c):
    return lambda s, b, h, q, k: torch.tanh(s - c.bias[k] + c.shift[k]) * c.gates[h, c.gate_of[q]]


CASES = [
    # Two consumers; an odd length; a gradient of a captured tensor.
    Case("alibi", score=alibi, mask=lambda c: flexhop.masks.causal, dtype=torch.bfloat16,
         captures=lambda s, r: {"slopes": r.uniform(s.heads)}, learned=("slopes",), lse=True,
         shape=Shape(1, 2, 1, 193, 193, 64, 64), options=HOPPER),
    # Masks as stored bits; sums in an order.
    Case("documents", mask=per_batch_documents, per_batch=True, dtype=torch.float16,
         captures=lambda s, r: {"ids": r.documents(4, s.batch, s.q_len)},
         shape=Shape(2, 1, 1, 150, 150, 128, 128), options=EXACT),
    # Gradients in one loop, in which a mask is asked in some steps; or else has bits.
    Case("heads", score=gelu, mask=lambda c: lambda b, h, q, k: (k < 128) | ((k + h) % 3 == 0),
         per_head=True, dtype=torch.bfloat16, shape=Shape(1, 2, 1, 200, 300, 64, 64),
         options=EXACT),
    Case("batches", score=gelu, mask=per_batch_documents, per_batch=True, dtype=torch.bfloat16,
         captures=lambda s, r: {"ids": r.documents(2, s.batch, s.q_len)},
         shape=Shape(2, 1, 1, 300, 300, 128, 128), options=HOPPER),
    # Mods that read tables; a width that is no power of two; more keys than queries.
    Case("table", score=by_distance, mask=lambda c: lambda b, h, q, k: (q * 7 + k * 3) % 5 != 0,
         captures=lambda s, r: {"table": r.normal(s.heads, 450)}, dtype=torch.bfloat16,
         shape=Shape(1, 2, 2, 130, 200, 80, 80), options=HOPPER),
    # Most columns of a tile are empty.
    Case("narrow", score=by_distance, mask=lambda c: flexhop.masks.causal, dtype=torch.bfloat16,
         captures=lambda s, r: {"table": r.normal(s.heads, 450)}, learned=("table",),
         shape=Shape(1, 2, 1, 130, 200, 24, 32), options=HOPPER),
    # What score_mod reads is read once, in every dtype that has registers.
    Case("kept", score=by_gates, dtype=torch.bfloat16, learned=("bias",),
         captures=lambda s, r: {
             "bias": r.normal(s.kv_len).bfloat16(), "gates": r.normal(s.heads, 8).half(),
             "gate_of": r.integers(8, s.q_len, dtype=torch.int32), "shift": r.normal(s.kv_len),
         },
         shape=Shape(1, 2, 1, 130, 200, 64, 64), options=HOPPER),
    Case("narrowest", mask=lambda c: flexhop.masks.causal, dtype=torch.float16,
         shape=Shape(1, 2, 2, 150, 150, 8, 8), options=EXACT),
]  # fmt: skip


def padding(c):
    return lambda b, h, q, k: (q < c.lengths[b]) & (k < c.lengths[b])


def padded(name: str, shape: Shape, block_size: int = 128, **more) -> Case:
    """Most tiles of queries see no keys; the second batch has none at all."""
    return Case(
        name, mask=padding, per_batch=True, block_size=block_size, dtype=torch.bfloat16, lse=True,
        captures=lambda s, r: {"lengths": torch.tensor([70, 0, 300])}, shape=shape,
        options=HOPPER, **more,
    )  # fmt: skip


PADDED = [
    padded("rows", Shape(3, 2, 2, 390, 390, 64, 64)),
    padded("odd", Shape(3, 2, 1, 390, 390, 80, 200)),
    padded("two memories", Shape(3, 2, 1, 390, 390, 144, 160)),
    padded("split", Shape(3, 2, 2, 390, 390, 64, 64), block_size=64),
    padded("packed", Shape(3, 4, 1, 250, 250, 64, 64), block_size=32),
    padded("gathered", Shape(3, 2, 2, 250, 250, 64, 64), block_size=32),
]
GATHERED = Case(
    "gathered", mask=lambda c: lambda b, h, q, k: (q // 32 * 5 + k // 32 * 3) % 4 == 0,
    block_size=32, dtype=torch.bfloat16, shape=Shape(1, 4, 2, 200, 300, 144, 136), options=HOPPER,
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


# At 128 columns, if a kernel for 128 keys needs too much local memory.
SHARED = [
    Case(
        "polynomial", mask=lambda c: flexhop.masks.causal, dtype=torch.bfloat16, lse=True,
        score=lambda c: lambda s, b, h, q, k: s * (0.5 + 0.1 * s) - 0.02 * (q - k).abs(),
        shape=Shape(1, 2, 1, 130, 150, 128, 96), options=HOPPER,
    ),
    Case(
        "learned", score=lambda c: lambda s, b, h, q, k: s * c.factor[h] + c.bias[h, k],
        captures=lambda s, r: {"factor": r.uniform(s.heads), "bias": r.normal(s.heads, s.kv_len)},
        learned=("factor", "bias"), dtype=torch.float16, shape=Shape(1, 2, 2, 100, 130, 128, 128),
        options=HOPPER,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_gradients_if_consumers_share_keys(case, monkeypatch):
    monkeypatch.setattr(ahead, "local_memory", lambda choice: 161)
    emulated(case, "random")


# A program owns heads: sums of queries in memory of its own, one learned, with odd lengths.
OWNED = [
    dataclasses.replace(CASES[0], name="alibi", shape=Shape(2, 4, 2, 193, 193, 64, 64)),
    Case("dense", dtype=torch.float16, shape=Shape(1, 4, 4, 130, 260, 80, 120), options=HOPPER),
    dataclasses.replace(CASES[3], name="documents", shape=Shape(2, 3, 3, 300, 300, 64, 64)),
    # Heads without any sums: what adds them has nothing to wait for.
    Case("unseen", mask=lambda c: lambda b, h, q, k: (h == 5) & (q >= k), per_head=True,
         dtype=torch.bfloat16, shape=Shape(1, 12, 12, 60, 60, 64, 64), options=HOPPER),
]  # fmt: skip


@pytest.fixture
def two_multiprocessors():
    with few_multiprocessors():
        yield


@pytest.mark.parametrize("when", ["late", "random"])
@pytest.mark.parametrize("case", OWNED, ids=lambda case: case.name)
@pytest.mark.usefixtures("two_multiprocessors")
def test_gradients_of_programs_that_own_heads(case, when):
    emulated(case, when)


@pytest.mark.usefixtures("two_multiprocessors")
def test_sums_that_are_read_too_early_are_found(monkeypatch):
    """The sums of a head's queries are read when all that copies add has arrived."""
    waits = re.compile(r"wait_for_additions\(\)(\s+mbarrier.wait\(barriers.query_free)")
    run, broken = Emulator.run, []

    def without_wait(emulator, kernel, grid, arguments):
        if waits.search(kernel.source):
            kernel = dataclasses.replace(kernel, source=waits.sub(r"pass\1", kernel.source))
            broken.append(kernel)
        run(emulator, kernel, grid, arguments)

    monkeypatch.setattr(Emulator, "run", without_wait)
    with pytest.raises(AssertionError, match="grad_query: error"):
        emulated(OWNED[1], "late")
    assert broken


@pytest.mark.parametrize("case", PADDED, ids=lambda case: case.name)
@pytest.mark.usefixtures("two_multiprocessors")
def test_tiles_without_keys_are_stored_by_the_producer(case):
    emulated(case, "late")


def test_gathered_blocks():
    emulated(GATHERED, "late")


@functools.cache
def launched(queries: int, keys: int) -> tuple[Kernel, dict[str, torch.Tensor]]:
    """A forward kernel, and arguments with its results."""
    launches = []

    class Spy(Emulator):
        def run(self, kernel, grid, arguments):
            super().run(kernel, grid, arguments)
            launches.append((kernel, arguments))

    torch.manual_seed(0)
    operands = (torch.randn(1, 1, n, 64).bfloat16() for n in (queries, keys, keys))
    interpret(
        lambda *qkv: flexhop.flex_attention(*qkv, kernel_options=HOPPER), *operands, emulator=Spy()
    )
    return launches[0]


# Lines of the kernel, and the error without one of them, by rules or as late as it may be.
FAULTS = {
    "values are read before they come": (
        "mbarrier.wait(barriers.ready.index(SLOTS + slot), phase)", "may still be written",
    ),
    "values come later than the next keys": (
        "mbarrier.wait(barriers.ready.index(SLOTS + v_slot), v_phase)", "may still be written",
    ),
    "keys come before others are read": (
        "mbarrier.wait(barriers.free.index(slot), phase)", "may still be",
    ),
    "a tile is stored before the last one has left": (
        "tma.store_wait(0)  # the previous tile has left the memory", "may still be read",
    ),
    "nobody says where tiles are": (
        "mbarrier.arrive(barriers.tile_ready.index(slot))", "all threads wait",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_barrier_is_found(fault):
    line, error = FAULTS[fault]
    # One program computes several tiles. Two consumers wait for values first, three do not.
    kernel, arguments = launched(250 if "later" in fault else 300, 600)
    assert kernel.constants["VALUES_FIRST"] == ("later" in fault)
    place = kernel.source.index(line)  # the first
    broken = f"{kernel.source[:place]}pass{kernel.source[place + len(line) :]}"
    kernel = dataclasses.replace(kernel, source=broken)
    with pytest.raises((Race, Deadlock), match=error):
        Emulator().run(kernel, (1,), _again(arguments))


def test_a_missing_fence_is_found(monkeypatch):
    """Of the machine code: Triton puts some fences itself."""
    kernel, arguments = launched(100, 200)

    def without_fences(kernel, architecture):
        cubin = compile_kernel(kernel, architecture)
        return dataclasses.replace(cubin, ptx=re.sub(r"fence\.proxy\.async\S*", "", cubin.ptx))

    monkeypatch.setattr(emulate, "compile_kernel", without_fences)
    with pytest.raises(Race, match=r"no fence\.proxy\.async stands between"):
        Emulator().run(kernel, (1,), _again(arguments))


def test_a_missing_barrier_is_seen_in_results():
    """Without the rules: a copy that happens as late as it may comes after those who read it."""
    kernel, arguments = launched(300, 200)
    # Otherwise the wait for keys would do: late copies come in order.
    assert not kernel.constants["VALUES_FIRST"]
    line, _ = FAULTS["values are read before they come"]
    broken = dataclasses.replace(kernel, source=kernel.source.replace(line, "pass"))
    emulator = Emulator(schedule=Schedule("late"), races=False)
    for source, is_right in ((kernel, True), (broken, False)):
        found = _again(arguments)
        emulator.run(source, (1,), found)
        assert torch.equal(found["out_ptr0"], arguments["out_ptr0"]) == is_right


def _again(arguments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    written = ("out_ptr0", "arg_COUNTER")
    return {n: torch.zeros_like(t) if n in written else t for n, t in arguments.items()}
