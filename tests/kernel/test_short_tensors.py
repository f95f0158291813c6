"""Short tensors that a mod puts together of scores and positions, under vmap."""

import pytest
import torch
from torch.nn.functional import kl_div

import flexhop
from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.operators import vmapped
from flexhop.offline import generate_code
from tests.learned import check_kernels


@pytest.mark.parametrize("symbolic", [False, True])
def test_short_tensors_that_a_mod_puts_together(symbolic, monkeypatch):
    """Under symbolic sizes, PyTorch's batching rules fail; what replaces them means the same."""
    monkeypatch.setattr(vmapped, "_has_symbols", lambda tensor: symbolic)
    x, y = torch.randn(5, 4, 3), torch.arange(5)

    def put(x, y):
        both = vmapped.concatenate([x, y.expand(4, 1), -x[:, :1]], -1)
        again = vmapped.concatenate([both[:1], both])
        return vmapped.flip(vmapped.select_scatter(again, x.sum() * torch.ones(5), 1, -2), (0, 1))

    def plain(x, y):
        both = torch.cat([x, y.expand(4, 1), -x[:, :1]], -1)
        again = torch.cat([both[:1], both])
        return torch.select_scatter(again, x.sum() * torch.ones(5), 1, -2).flip(0, 1)

    found, expected = torch.vmap(put)(x, y), torch.vmap(plain)(x, y)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_short_tensors_in_a_mod_under_symbolic_sizes():
    """The definition is compiled in fp64, with its symbols."""
    inputs = [torch.zeros(2, 2, 37, 16, dtype=torch.float64, requires_grad=True)] * 3

    def mod(s, b, h, q_idx, kv_idx):
        pair = torch.stack([s, s * 2, kv_idx * 0.1])
        return pair.sum(0) + pair.flatten()[0]

    generate_code(lambda q, k, v: flexhop.flex_attention(q, k, v, mod), *inputs, grad=True,
                  dynamic=True)  # fmt: skip


@pytest.mark.parametrize("x", [torch.randn(5), torch.randn(40), torch.randn(3, 4),
                               torch.tensor([2, 3], dtype=torch.int32), torch.tensor(1.5),
                               torch.tensor([True, False])])  # fmt: skip
@pytest.mark.parametrize("more", [{}, {"dim": -1}, {"dim": 0, "keepdim": True},
                                  {"dim": 0, "dtype": torch.float64}])  # fmt: skip
def test_products_are_those_of_pytorch(x, more):
    found, expected = vmapped.product(x, **more), torch.prod(x, **more)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_value_at_one_place_of_a_row(accumulate):
    """The gradient of `row[h]` writes to zeros, which no vmap has batched."""
    rows, places, values = torch.randn(4, 3, 2), torch.tensor([2, -1, 0, 1]), torch.randn(4, 2)

    def put(row, place, value):
        return vmapped.put(row, [place], value, accumulate)

    found = torch.vmap(put, in_dims=(None, 0, 0))(rows[0], places, values)
    expected = [
        torch.index_put(rows[0], (place,), value, accumulate)
        for place, value in zip(places, values, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=0)
    column = torch.vmap(lambda place: vmapped.put(rows[0], [None, place], rows[0, 0, 0]))(
        torch.tensor([1, -2])
    )
    assert torch.equal(column[0, :, 1], rows[0, :1, 0].expand(3))
    assert torch.equal(column[1, :, 1], rows[0, :, 1])


def _small_network():
    """A score_mod that computes rows for each score, multiplies them, and reads one element."""
    torch.manual_seed(5)
    shapes = ((1, 4), (4, 2), (3, 3), (20, 3), (2,))
    first, second, form, points, gains = (torch.randn(s).requires_grad_() for s in shapes)

    def mod(s, b, h, q, k):
        hidden = torch.relu(((q - k) * 0.3)[None] @ first)
        s = s + torch.nn.functional.linear(hidden, second.T)[h] + (gains * s)[h]
        s = s + torch.einsum("i,ij,j->", points[q], form, points[k])
        return s + points[q].softmax(-1)[h] + torch.stack([s.sin(), k * 0.1])[h - 2]

    return mod, [first, second, form, points, gains]


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_computed_rows_are_read_and_multiplied():
    """As in Swin's and FIRE's biases: a network of the distance, with an output for each head."""
    mod, learned = _small_network()
    tensors = [torch.randn(1, 2, 20, 16).requires_grad_() for _ in range(3)]
    check_kernels(tensors, learned, mod, flexhop.KernelOptions(backend="triton"))


def _reads_of_several_places():
    """A score_mod that reads captured tensors at several places at once, or through a gather."""
    torch.manual_seed(6)
    shapes = ((2, 20), (20, 3), (30, 20), (2, 20))
    table, rows, wide, plain = (torch.randn(s) for s in shapes)
    learned = [t.requires_grad_() for t in (table, rows, wide)]

    def mod(s, b, h, q, k):
        places = torch.stack([q, k, (q + k) // 2]).long()
        column = k.long().view(1, 1)
        s = s + table.gather(1, column.expand(2, 1))[h, 0] + wide.gather(1, column.expand(30, 1))[
            h + 28, 0
        ]  # fmt: skip
        s = s + table[h][places].mean() + (rows[places[:2]] * 0.3).sum()
        s = s + table[:, places].sum() * 0.1 + table.gather(1, places[:2, None]).sum()
        s = s + table[h].gather(0, places).square().sum() * 0.1
        s = s + torch.take_along_dim(table[h], places[1:], 0).sum()
        s = s + table.index_select(0, h[None])[0, k] + table.index_select(1, places)[h].sum() * 0.1
        return s + plain.gather(1, column.expand(2, 1))[h, 0]

    return mod, learned


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_places_are_read_together(monkeypatch):
    monkeypatch.setenv("FLEXHOP_STRICT", "1")
    mod, learned = _reads_of_several_places()
    tensors = [torch.randn(1, 2, 20, 16).requires_grad_() for _ in range(3)]
    check_kernels(tensors, learned, mod)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("log_target", [False, True])
def test_divergences_have_a_batching_rule(reduction, log_target):
    """PyTorch has none: a mod took a loop over all scores."""
    x, target = torch.randn(5, 3, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64)
    target[0, 0] = 0.0

    def divergence(x, target):
        with IndexMode():
            return kl_div(x, target, reduction=reduction, log_target=log_target)

    found = torch.vmap(divergence)(x, target)
    plain = [
        kl_div(a, b, reduction=reduction, log_target=log_target)
        for a, b in zip(x, target, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(plain))


def test_logarithms_of_probabilities_have_a_batching_rule():
    """Their gradients, too, are right in both tails."""
    x = torch.cat([torch.linspace(-40, 12, 53), torch.tensor([1.0])]).double()

    def probability(x):
        with IndexMode():
            return torch.special.log_ndtr(x)

    torch.testing.assert_close(torch.vmap(probability)(x), probability(x), rtol=1e-12, atol=1e-30)
    slopes = torch.vmap(torch.func.grad(probability))(x)
    plain = torch.func.grad(lambda x: torch.special.log_ndtr(x).sum())(x)
    torch.testing.assert_close(slopes, plain, rtol=1e-10, atol=1e-30)


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_divergences_and_probabilities_need_no_loop_over_scores():
    tensors = [torch.randn(1, 2, 40, 16).requires_grad_() for _ in range(3)]

    def mod(s, b, h, q, k):
        both = torch.stack([s, -s])
        given = torch.stack([s * 0 + 0.3, s * 0 + 0.7])
        s = s + kl_div(both.log_softmax(0), given, reduction="sum")
        return s + torch.special.log_ndtr(s)

    flexhop.flex_attention(*tensors, mod).sum().backward()
