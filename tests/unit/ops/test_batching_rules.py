"""Functions of two rows whose batching rules in PyTorch fail, or are wrong, under nested vmaps.

And those that write to what they make.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flexhop
from flexhop.compat.operators.vmapped import loss
from flexhop.offline import generate_code

QUERIES, KEYS, WIDTH = 5, 7, 3
FILLED = torch.tensor([0, 2])


def far(x: Tensor, y: Tensor, p: float) -> Tensor:
    return torch.cdist(x[None], y[None] + 3, p=p).squeeze()


def around(x: Tensor) -> Tensor:
    return F.pad(x[None, None], (2, 1), mode="circular")[0, 0]


FUNCTIONS = {
    "first powers": lambda x, y: far(x, y, 1.0),
    "distance": lambda x, y: far(x, y, 2.0),
    "third powers": lambda x, y: far(x, y, 3.0),
    "largest": lambda x, y: far(x, y, torch.inf),
    "mse": lambda x, y: F.mse_loss(x, y),
    "mse of a module": lambda x, y: torch.nn.MSELoss(reduction="sum")(x, y),
    "mse of one": lambda x, y: F.mse_loss(x, y, reduction="none")[1],
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, beta=0.5),
    "smooth_l1 without a bend": lambda x, y: F.smooth_l1_loss(x, y + 9, beta=0.0),
    "huber": lambda x, y: F.huber_loss(x, y, delta=0.7),
    "filled with a number": lambda x, y: (x.index_fill(0, FILLED, 0.5) * y).sum(),
    "filled": lambda x, y: torch.index_fill(x, 0, FILLED, y[1]).square().sum(),
    "filled in a matrix": lambda x, y: (
        torch.outer(x, x).index_fill(-1, FILLED, y[0]) @ y
    ).logsumexp(0),
    "column_stack": lambda x, y: torch.column_stack([x, y]).logsumexp(1).sum(),
    "padded": lambda x, y: around(x) @ around(y),
    "trace": lambda x, y: torch.outer(x, y).trace(),
}


def operands() -> list[Tensor]:
    heads = [(1, 2, n, 4) for n in (QUERIES, KEYS, KEYS)]
    shapes = [*heads, (QUERIES, WIDTH), (KEYS, WIDTH)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "aot_eager, any size"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_value_and_gradients_are_those_of_single_calls(name, backend):
    of = FUNCTIONS[name]
    backend, _, is_dynamic = backend.partition(", ")

    def attend(query, key, value, rows, columns):
        def score_mod(s, b, h, q, k):
            return s - of(rows[q], columns[k])

        return flexhop.flex_attention(query, key, value, score_mod)

    def dense(query, key, value, rows, columns):
        bias = torch.stack([torch.stack([of(x, y) for y in columns]) for x in rows])
        return torch.softmax(query @ key.mT / 2 - bias, -1) @ value

    leaves = operands()
    call = (
        attend
        if backend == "eager"
        else torch.compile(attend, backend=backend, dynamic=bool(is_dynamic))
    )
    results = []
    for out in (call(*leaves), dense(*leaves)):
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_padded_rows_of_any_number_become_tables():
    """They have no gradient, so that a table of them is made, of a symbolic number of entries."""
    query, key, value, rows, columns = (operand.detach() for operand in operands())

    def attend(query, key, value, rows, columns):
        def score_mod(s, b, h, q, k):
            return s + around(rows[q])[1] * around(columns[k])[-1]

        return flexhop.flex_attention(query, key, value, score_mod)

    inputs = query.requires_grad_(), key, value, rows, columns
    compiled = torch.compile(attend, backend="aot_eager", dynamic=True, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), attend(*inputs))


def test_kernels_take_masks_that_pad():
    rows = torch.randn(4, 6)

    def attend(query, key, value, rows):
        def score_mod(s, b, h, q, k):
            return torch.where(around(rows[q // 16])[k % 9] > -0.5, s, s / 2)

        def mask_mod(b, h, q, k):
            return around(rows[q // 16])[k % 9] > -0.5

        mask = flexhop.create_block_mask(mask_mod, None, None, 64, 64, device=query.device)
        return flexhop.flex_attention(query, key, value, score_mod, mask)

    query, key, value = (torch.randn(1, 2, 64, 16) for _ in range(3))
    assert generate_code(attend, query, key, value, rows).templates


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_one_number_of_a_computed_row_of_any_length():
    query, key, value, rows, _ = operands()

    def attend(query, key, value, rows):
        def score_mod(s, b, h, q, k):
            return s + rows[q].cummax(-1).values[-1] - F.rms_norm(rows[q], rows.shape[1:])[0]

        return flexhop.flex_attention(query, key, value, score_mod)

    compiled = torch.compile(attend, backend="aot_eager", dynamic=True, fullgraph=True)
    inputs = query, key, value, rows
    results = [
        (out, *torch.autograd.grad(out.sin().sum(), inputs))
        for out in (compiled(*inputs), attend(*inputs))
    ]
    torch.testing.assert_close(*results)


def test_weighted_losses_are_pytorchs():
    x, y, weight = torch.randn(3, 6)
    weighted = loss(F.mse_loss, x, y, weight=weight.abs())
    torch.testing.assert_close(weighted, F.mse_loss(x, y, weight=weight.abs()))
