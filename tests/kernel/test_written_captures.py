"""Captured tensors that the compiled function writes to after it made them by arithmetic.

Inductor computes what `torch.zeros(n)` holds where it is read. After a write, that is wrong.
"""

import pytest
import torch

import flexhop
from flexhop.offline.interpret import interpret

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
BATCH, HEADS, LENGTH, WIDTH = 2, 2, 40, 16


def scattered(index):
    return torch.zeros(BATCH, LENGTH, dtype=torch.bool).scatter(1, index, True)


def assigned(index):
    keep = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    keep[torch.arange(BATCH)[:, None], index] = True
    return keep


def filled(index):
    return torch.ones(BATCH, LENGTH).scatter_(1, index, 0.0) == 0


def added(index):
    return torch.arange(LENGTH).expand(BATCH, -1).scatter_add(1, index, index + 100) > 99


def sliced(index):
    keep = torch.full((BATCH, LENGTH), False)
    keep[0, 3:9] = True
    keep[1] = (torch.arange(LENGTH) % 3 == 0).logical_xor(index[1, 0] < 0)
    return keep


MADE = (scattered, assigned, filled, added, sliced)


def operands():
    torch.manual_seed(5)
    tensors = [torch.randn(BATCH, HEADS, LENGTH, WIDTH) for _ in range(3)]
    index = torch.stack([torch.randperm(LENGTH)[:12] for _ in range(BATCH)])
    return index, *tensors


def expected(keep, q, k, v):
    """Every query also sees its own key."""
    visible = keep[:, None, None] | torch.eye(LENGTH, dtype=torch.bool)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, visible)


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("kind", ["score_mod", "mask_mod"])
def test_what_a_mod_reads_was_written(make, kind):
    def attend(index, q, k, v):
        keep = make(index)
        if kind == "mask_mod":
            mask = flexhop.create_block_mask(
                lambda b, h, i, j: keep[b, j] | (i == j), BATCH, None, LENGTH, LENGTH, "cpu",
                BLOCK_SIZE=16,
            )  # fmt: skip
            return flexhop.flex_attention(q, k, v, block_mask=mask)
        return flexhop.flex_attention(
            q, k, v, lambda s, b, h, i, j: s.masked_fill(~(keep[b, j] | (i == j)), -torch.inf)
        )

    given = operands()
    wanted = expected(make(given[0]), *given[1:])
    torch.testing.assert_close(torch.compile(attend)(*given), wanted)
    torch.testing.assert_close(interpret(attend, *given).result, wanted)


def test_factors_and_pages_were_written():
    """Of a cache, whose pages are handed out within the compiled function."""

    def attend(order, q, k, v):
        pages = torch.zeros(BATCH, 2, dtype=torch.int64).scatter(1, order[:, :2], order[:, 2:])
        factors = torch.ones(HEADS).index_fill(0, order[0, :1], 0.5)
        table = flexhop.PageTable(pages.int(), 16, torch.tensor([32, 20], dtype=torch.int32))
        return flexhop.flex_attention(
            q, k, v, page_table=table, k_mod=flexhop.mods.dequantize(factors)
        )

    _, q, k, v = operands()
    caches = [t[:, :, :32].unflatten(2, (2, 16)).movedim(2, 1).flatten(0, 1) for t in (k, v)]
    order = torch.tensor([[1, 0, 1, 0], [0, 1, 2, 3]])
    given = (order, q[:, :, :1], *caches)
    torch.testing.assert_close(interpret(attend, *given).result, attend(*given))
