"""Threads that compile and call at once, with mods of their own, get their own results."""

import threading

import pytest
import torch

import flexhop
from flexhop import compat
from tests.unit.ops.support import quiet

pytestmark = quiet
THREADS = 4


def problem(number):
    """A function, its operands, and a call whose mods and shapes belong to one thread."""
    slopes = torch.full((2,), float(number + 1))
    length = 24 + 8 * number
    mask = flexhop.create_block_mask(
        lambda b, h, q, k: q + number >= k, None, None, length, length, "cpu", BLOCK_SIZE=16
    )
    inputs = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]

    def attend(query, key, value):
        return flexhop.flex_attention(
            query, key, value, lambda s, b, h, q, k: s - slopes[h] * (q - k), mask
        )

    return attend, inputs


def results(attend, inputs):
    out = attend(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


COMPILED = pytest.param(
    True,
    id="compiled",
    marks=pytest.mark.skipif(
        compat.torch_version() < (2, 13),
        reason="PyTorch 2.11 crashes when threads compile at once, also without flexhop",
    ),
)


@pytest.mark.parametrize("compiles", [pytest.param(False, id="eager"), COMPILED])
def test_threads_compile_and_call_at_once(compiles):
    problems = [problem(number) for number in range(THREADS)]
    expected = [results(*problem) for problem in problems]
    together, found, failed = threading.Barrier(THREADS), {}, []

    def work(number):
        attend, inputs = problems[number]
        if compiles:
            attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
        try:
            together.wait()
            for turn in range(3):
                found[number, turn] = results(attend, inputs)
        except Exception as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and len(found) == 3 * THREADS
    for (number, _), tensors in found.items():
        torch.testing.assert_close(tensors, expected[number], rtol=1e-5, atol=1e-5)
