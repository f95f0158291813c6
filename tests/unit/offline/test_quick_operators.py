"""Operators by the short way give the type and the bits that Triton's own code gives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from flexhop.offline import quick_operators
from flexhop.offline.interpreter import interpreting
from flexhop.offline.memory import Memory

NAMES = {name: member for member, name in quick_operators._OPERATORS.items()}


def _tensor(dtype, *shape: int, seed: int = 0):
    """A block, or a scalar without a shape; with equal values, zeros, infinities and NaN."""
    data = np.random.default_rng(seed).integers(-3, 4, shape or (1,)) * 1.5
    if dtype in (tl.float16, tl.float32, tl.float64):
        data.flat[: min(3, data.size // 2)] = np.array([np.nan, -np.inf, -0.0])[: data.size // 2]
    element = dtype.element_ty if dtype.is_ptr() else dtype
    kind = np.uint64 if dtype.is_ptr() else interpreter._get_np_dtype(element)
    values = (np.abs(data) * 1000 if dtype.is_ptr() else data).astype(kind)
    handle = interpreter.TensorHandle(values, dtype, {"argument": "x"} if dtype.is_ptr() else {})
    return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)


POINTER = tl.pointer_type(tl.float32)
TYPES = [
    (tl.float32, 4), (tl.float32, 2, 4), (tl.float32,), (tl.float16, 4), (tl.float64, 2, 1),
    (tl.int32, 4), (tl.int32, 2, 1), (tl.int32,), (tl.int64, 4), (tl.int64,), (tl.int1, 4),
    (tl.int1, 2, 4), (tl.bfloat16, 4), (tl.uint32, 4), (tl.int8, 4), (POINTER, 4), (POINTER,),
]  # fmt: skip
# Of each four: two for the left, two for the right.
TENSORS = [[_tensor(dtype, *shape, seed=seed) for seed in range(4)] for dtype, *shape in TYPES]
NUMBERS = [3, 0, -1, 2**31 - 1, 2**40, 2.5, -0.0, float("inf"), 1e300, True, tl.constexpr(7)]


def _outcome(operate, left, right):
    try:
        found = operate(left, right)
    except Exception as error:
        return type(error), str(error)
    handle = found.handle
    kept = found.type.name, found.shape, found.numel.value, found.dtype.name, handle.dtype.name
    return *kept, handle.data.dtype, handle.data.shape, handle.data.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_triton(name):
    semantic = interpreter.interpreter_semantic
    calls = []

    def slow(left, right):
        calls.append((left, right))
        return NAMES[name](left, right, _semantic=semantic)

    others = [*TENSORS, *([number] * 4 for number in NUMBERS)]
    quick = 0
    with interpreting(), np.errstate(all="ignore"):
        operate = quick_operators._operator(name, slow)
        for one, other, seed in itertools.product(TENSORS, others, range(2)):
            left, right = one[seed], other[seed + 2]
            before = len(calls)
            found = _outcome(operate, left, right)
            quick += len(calls) == before
            assert found == _outcome(slow, left, right), (left.type, right)
    # Ordinary pairs take the short way from the second time on.
    assert quick > (15 if name in ("and", "or") else 120)


@pytest.mark.parametrize("offset", [3, _tensor(tl.int32, 2, 1)], ids=["number", "block"])
def test_pointers_belong_to_their_argument(offset):
    with interpreting(Memory(check_bounds=True)):
        pointer = _tensor(POINTER, 4)
        assert [(pointer + offset).handle.attr for _ in range(2)] == [{"argument": "x"}] * 2
