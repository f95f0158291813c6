"""Operators that bring constant tensors into a mod, and literals of many numbers."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import flexhop
from flexhop.compat.mods.constants import spell_constants
from flexhop.compat.mods.indexing import IndexMode
from flexhop.offline import generate_code
from flexhop.offline.interpret import interpret
from tests.learned import check_kernels

HEADS, LENGTH, WIDTH = 2, 24, 6
pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("FLEXHOP_STRICT", "1")


def _operands():
    torch.manual_seed(7)
    return [torch.randn(1, HEADS, LENGTH, 16, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_constants_become_rows_of_numbers(shape):
    """Tracers keep them as attributes, which kernels cannot read."""
    numbers = torch.arange(torch.Size(shape).numel()).view(shape).tolist()

    def mod(x):
        return x * torch.tensor(numbers)

    graph = spell_constants(make_fx(mod, tracing_mode="fake")(torch.tensor(2.0)))
    assert not graph.graph.find_nodes(op="get_attr")
    torch.testing.assert_close(graph(torch.tensor(3.0)), mod(torch.tensor(3.0)))


def test_long_constants_stay():
    graph = spell_constants(make_fx(lambda x: x * torch.tensor([0.5] * 65))(torch.tensor(2.0)))
    assert graph.graph.find_nodes(op="get_attr")


@pytest.mark.parametrize("shape", [7, (24,), (4, 6), (2, 3, 4), (3, 4)])
def test_coordinates_of_a_position(shape):
    """As PyTorch's, also out of range and of negative positions."""
    for place in (torch.tensor(n) for n in (0, 5, 23, 30, -4)):
        with IndexMode():
            found = torch.unravel_index(place, shape)
        expected = torch.unravel_index(place, shape)
        assert [int(n) for n in found] == [int(n) for n in expected]
        assert [n.dtype for n in found] == [n.dtype for n in expected]


@pytest.mark.parametrize("shape", [(0, 3), (2.5, 3)])
def test_wrong_sizes_of_coordinates_are_pytorchs_error(shape):
    with IndexMode(), pytest.raises((TypeError, ValueError, RuntimeError)):
        torch.unravel_index(torch.tensor(2), shape)


def test_masks_and_scores_of_coordinates():
    shape = (LENGTH // WIDTH, WIDTH)
    table = torch.randn(HEADS, 2 * WIDTH - 1).requires_grad_()

    def mask_mod(b, h, q, k):
        (q_row, q_column), (k_row, k_column) = (torch.unravel_index(i, shape) for i in (q, k))
        return ((q_row - k_row).abs() <= 1) & ((q_column - k_column).abs() <= 2)

    def plain_mask(b, h, q, k):
        return ((q // WIDTH - k // WIDTH).abs() <= 1) & ((q % WIDTH - k % WIDTH).abs() <= 2)

    def score_mod(s, b, h, q, k):
        columns = [torch.unravel_index(i, shape)[1] for i in (q, k)]
        return s + table[h, columns[0] - columns[1] + WIDTH - 1]

    def plain_score(s, b, h, q, k):
        return s + table[h, q % WIDTH - k % WIDTH + WIDTH - 1]

    tensors = _operands()
    masks = [
        flexhop.create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
        for mask in (mask_mod, plain_mask)
    ]
    found = interpret(
        lambda *x: flexhop.flex_attention(*x, score_mod, block_mask=masks[0]), *tensors,
        grad=lambda out: out.sum(),
    )  # fmt: skip
    out = flexhop.flex_attention(*tensors, plain_score, block_mask=masks[1])
    torch.testing.assert_close(found.result, out, rtol=2e-5, atol=2e-5)
    expected = torch.autograd.grad(out.sum(), [*tensors, table])
    grads = [leaf.grad for leaf in (*tensors, table)]
    torch.testing.assert_close(grads, list(expected), rtol=1e-4, atol=1e-4)


def test_coordinates_are_understood_by_the_analysis():
    """No score is evaluated to classify a block."""
    shape = (4096 // 64, 64)

    def mask_mod(b, h, q, k):
        rows = [torch.unravel_index(i, shape)[0] for i in (q, k)]
        return rows[0] - rows[1] <= torch.tensor(3)

    plain = flexhop.create_block_mask(lambda b, h, q, k: q // 64 - k // 64 <= 3, 1, 1, 4096, 4096,
                                      "cpu")  # fmt: skip
    found = flexhop.create_block_mask(mask_mod, 1, 1, 4096, 4096, "cpu")
    assert torch.equal(found.to_dense(), plain.to_dense())


def test_several_results_of_rows_become_tables():
    """Operators of rows with several results, in what is computed before the kernel."""
    points = torch.randn(LENGTH, 20).requires_grad_()

    def mod(s, b, h, q, k):
        first, *_ = points[k].unbind(-1)
        low, high = (points[q] * 0.5).split(10)
        return s + first + low.sum() * high.amax()

    check_kernels(_operands(), [points], mod)


@pytest.mark.parametrize("padding", [0, 3, -1])
def test_padded_rows_of_an_embedding(padding):
    """The row of padding is read, and gets no gradient."""
    embedding = torch.nn.Embedding(5, HEADS, padding_idx=padding)
    torch.nn.init.normal_(embedding.weight)
    kind = torch.arange(LENGTH) % 5

    def mod(s, b, h, q, k):
        return s + embedding(kind[k])[h]

    tensors = _operands()
    leaves = [*tensors, embedding.weight]
    out = flexhop.flex_attention(*tensors, mod)
    scores = tensors[0] @ tensors[1].mT / 4 + embedding(kind).T[None, :, None]
    expected = scores.softmax(-1) @ tensors[2]
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
    )
    check_kernels(tensors, [embedding.weight], mod)


def _literal(s, b, h, q, k):
    return s * torch.tensor([0.5, 1.0, 1.5, 2.0] * 4)[k % 16]


def _like_the_score(s, b, h, q, k):
    return s * s.new_tensor([0.5, 1.0, 1.5, 2.0] * 4)[k % 16]


def _like_an_index(s, b, h, q, k):
    return s * q.new_tensor(list(range(12)))[k % 12]


def _frequencies(s, b, h, q, k):
    return s + torch.cos((q - k) * torch.tensor([0.1 * i for i in range(16)])).sum()


@pytest.mark.parametrize("mod", [_literal, _like_the_score, _like_an_index, _frequencies])
def test_literals_of_many_numbers_generate_code(mod):
    """Inductor copies constants of more than eight numbers to the GPU, which is absent."""
    tensors = [torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=True)] * 3
    code = generate_code(lambda *x: flexhop.flex_attention(*x, mod), *tensors, grad=True)
    assert len(code.templates) >= 2
