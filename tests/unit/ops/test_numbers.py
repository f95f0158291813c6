"""Python numbers in mods that change between calls: run-time arguments, one graph for all."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from flexhop import create_block_mask, flex_attention
from flexhop.errors import ModArityError
from tests.unit.ops.support import quiet

pytestmark = quiet

VALUES = [(0.5, 3), (0.6, 4), (0.75, 5), (0.8, 9)]


def scaled(c, n):
    return lambda s, b, h, q, k: s * c + (q - k) * c + n


def computed(c, n):
    twice = c * 2 + n
    return lambda s, b, h, q, k: s / twice + 2**c * (q // n) + math.sqrt(c) - 1 / math.sqrt(n)


def in_functions(c, n):
    def score(s, b, h, q, k):
        s = torch.clamp(s, -2, c * 4) + torch.where(q >= k * c, c, s)
        s = torch.add(s, s, alpha=c) + torch.full_like(s, c) + s.new_full((), fill_value=c)
        return s.masked_fill(q > k + 9, c)

    return score


def times(c):
    return lambda x, b, h, k: x * c


def with_alpha(c, n):
    return lambda s, b, h, q, k: F.leaky_relu(s, c)


def mask(c, n):
    def keep(b, h, q, k):
        kept = ((q - k) * c < n) & (k % n != 1) & (q.clamp(0, n * 4) // n >= k // n)
        return kept | (n - q > k) | ((n ^ q) == n // (k + 1)) | (n / (k + 1) < (n % (q + 1)) * 0.1)

    return keep


def operands(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(1, 2, 33, 16, dtype=dtype, requires_grad=True) for _ in range(3)]


def assert_same(compiled, plain, tensors, values):
    for numbers in values:
        expected, found = plain(*tensors, *numbers), compiled(*tensors, *numbers)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(out.sum(), tensors) for out in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def compiled_with_counter(function, **how):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, **how), counter


@pytest.mark.parametrize("make", [scaled, computed, in_functions])
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_one_graph_for_all_numbers(make, place):
    # A mod made outside has numbers that Dynamo meets only while it traces the mod.
    if place == "inside":

        def attend(q, k, v, c, n):
            return flex_attention(q, k, v, score_mod=make(c, n))
    else:

        def attend(q, k, v, score):
            return flex_attention(q, k, v, score_mod=score)

    tensors = operands()
    compiled, counter = compiled_with_counter(attend, dynamic=True)
    values = VALUES if place == "inside" else [(make(*numbers),) for numbers in VALUES]
    assert_same(compiled, attend, tensors, values[:1])
    graphs = counter.frame_count
    assert_same(compiled, attend, tensors, values[1:])
    assert counter.frame_count == graphs


def assert_no_more_graphs(attend):
    """Once a number has changed, other values of it compile nothing."""
    tensors = operands()
    compiled, counter = compiled_with_counter(attend)
    assert_same(compiled, attend, tensors, VALUES[:2])
    graphs = counter.frame_count
    assert_same(compiled, attend, tensors, VALUES[2:])
    assert counter.frame_count == graphs


def test_a_number_that_starts_to_change():
    def attend(q, k, v, c, n):
        return flex_attention(q, k, v, score_mod=scaled(c, n))

    assert_no_more_graphs(attend)


@pytest.mark.parametrize("mod", [None, scaled(0.5, 3)])
def test_a_scale_that_changes(mod):
    def attend(q, k, v, c, n):
        return flex_attention(q, k, v, score_mod=mod, scale=c / n**0.5)

    assert_no_more_graphs(attend)
    compiled, _ = compiled_with_counter(attend, dynamic=True)
    mod = lambda score, b, h, q: score  # noqa: E731
    with pytest.raises(ModArityError, match=r"signature is \(score, b, h, q\)"):
        compiled(*operands(), 0.5, 3)


def test_a_scale_that_follows_the_length():
    def attend(q, k, v):
        return flex_attention(q, k, v, scale=k.size(2) ** 0.5 / 50)

    compiled, counter = compiled_with_counter(attend, dynamic=True)
    graphs = []
    for length in (33, 16, 24):
        tensors = [t[:, :, :length].detach().requires_grad_() for t in operands()]
        assert_same(compiled, attend, tensors, [()])
        graphs.append(counter.frame_count)
    assert graphs[1] == graphs[2]


def test_a_function_that_takes_only_numbers_is_compiled_for_each():
    def attend(q, k, v, c, n):
        return flex_attention(q, k, v, score_mod=with_alpha(c, n))

    compiled, _ = compiled_with_counter(attend, dynamic=True)
    assert_same(compiled, attend, operands(), VALUES)


def test_in_checkpoint():
    def attend(q, k, v, c, n):
        inner = lambda q, k, v: flex_attention(q, k, v, score_mod=scaled(c, n))  # noqa: E731
        return torch.utils.checkpoint.checkpoint(inner, q, k, v, use_reentrant=False)

    compiled, _ = compiled_with_counter(attend, dynamic=True)
    assert_same(compiled, attend, operands(), VALUES)


def test_double_precision_is_kept():
    def attend(q, k, v, c, n):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, q, k: s * c + c / n)

    tensors = operands(torch.float64)
    compiled, _ = compiled_with_counter(attend, dynamic=True)
    for numbers in [(0.1, 3), (0.7, 7)]:
        found, expected = compiled(*tensors, *numbers), attend(*tensors, *numbers)
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


def test_block_masks_made_inside():
    def attend(q, k, v, c, n):
        blocks = create_block_mask(
            mask(c, n), None, None, q.size(2), k.size(2), device="cpu", BLOCK_SIZE=16
        )
        return flex_attention(q, k, v, block_mask=blocks)

    tensors = operands()
    compiled, counter = compiled_with_counter(attend, dynamic=True)
    assert_same(compiled, attend, tensors, VALUES[:1])
    graphs = counter.frame_count
    assert_same(compiled, attend, tensors, VALUES[1:])
    assert counter.frame_count == graphs


NUMBERS_BESIDE_AN_INDEX = {
    "remainder": lambda n: lambda b, h, q, k: (q % n) <= (k % n),
    "shift": lambda n: lambda b, h, q, k: (q >> n) >= (k >> n),
    "choice": lambda n: lambda b, h, q, k: torch.where(q > n, q >= k, k <= n),
    "alternatives": lambda n: lambda b, h, q, k: (q == k) | (k % n == 0) | (q % n == 0),
}


@pytest.mark.parametrize("make", NUMBERS_BESIDE_AN_INDEX.values(), ids=NUMBERS_BESIDE_AN_INDEX)
def test_a_number_beside_one_index_in_a_block_mask_made_inside(make):
    """The operator that takes a number was called with the tensor that stands for a symbol."""

    def lists(n):
        mask = create_block_mask(make(n), None, None, 100, 100, device="cpu", BLOCK_SIZE=16)
        counts = mask.kv_num_blocks, mask.full_kv_num_blocks
        return *counts, mask.kv_indices, mask.full_kv_indices

    compiled = torch.compile(lists, backend="eager", fullgraph=True, dynamic=True)
    for n in (3, 5):
        for found, expected in zip(compiled(n), lists(n), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [float, np.float32, np.int64, np.bool_])
def test_numbers_of_numpy_and_masks_made_inside_of_mods_from_outside(kind):
    """`float`, `int` and `item` of a NumPy scalar failed, and so did a float in such a mask."""

    def mods(number):
        def score(s, b, h, q, k):
            read = number if kind is float else number.item() + float(number) + int(number)
            return s * number + read * (q - k)

        return score, lambda b, h, q, k: (q - k) * 2 <= number + 3

    def attend(query, key, value, score, mask):
        blocks = create_block_mask(mask, None, None, 33, 33, device="cpu", BLOCK_SIZE=16)
        return flex_attention(query, key, value, score, blocks)

    inputs = [t.detach() for t in operands()]
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for number in map(kind, (5.5, 0, 3.25)):
        found = compiled(*inputs, *mods(number))
        torch.testing.assert_close(found, attend(*inputs, *mods(number)), rtol=1e-4, atol=1e-5)


def test_k_mod():
    def attend(q, k, v, factor, scale):
        return flex_attention(q, k, v, k_mod=factor, scale=scale)

    with torch.no_grad():
        tensors = operands()
        compiled, counter = compiled_with_counter(attend, dynamic=True)
        for factor, scale in ((0.5, 0.2), (0.7, 0.3), (0.9, -0.4)):
            expected = attend(*tensors, times(factor), scale)
            torch.testing.assert_close(compiled(*tensors, times(factor), scale), expected)
    assert counter.frame_count <= 2  # AOTAutograd starts once more for a float
