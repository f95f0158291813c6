"""Mods of many steps, and values that every step uses twice: work grows with their length.

A walk along each path would take 2^40 steps here, and one that recurses would leave the stack.
"""

import pytest
import torch

import flexhop

STEPS = 40


def repeated(step, value, times=STEPS):
    for _ in range(times):
        value = step(value)
    return value


SHARED = {
    "and, or, xor": lambda b, h, q, k: repeated(
        lambda m: (m & (q > k)) | (m ^ (q % 2 == 0)), q >= k
    ),
    "not": lambda b, h, q, k: repeated(lambda m: ~(m & (~m | (q - k < 9))), q >= k),
    "where of bools": lambda b, h, q, k: repeated(
        lambda m: torch.where(m, q >= k, m | (k == 3)), q >= k
    ),
    "where of numbers": lambda b, h, q, k: repeated(
        lambda x: torch.where(x > 5, x - 2, x + 1), q - k
    ) > 0,
    "minimum": lambda b, h, q, k: repeated(
        lambda x: torch.minimum(torch.maximum(x, q - k), x + 3), q
    ) >= k,
    "one side": lambda b, h, q, k: repeated(lambda x: torch.minimum(x, x - 1), q) + 30 >= k,
    "magnitude": lambda b, h, q, k: repeated(lambda x: (x - 3).abs() - x // 2, q - k) < 5,
    "quotients": lambda b, h, q, k: repeated(lambda x: x // 2 + x % 2 + 1, q) >= k,
    "numbers of bools": lambda b, h, q, k: repeated(
        lambda m: (m.int() + m.int() * (q > k).int()) > 0, q >= k
    ),
}  # fmt: skip


def documents(b, h, q, k):
    """400 documents, as a loop over their ends writes them."""
    mask = q == k
    for start in range(0, 2400, 6):
        mask = mask | ((q >= start) & (q < start + 6) & (k >= start) & (k < start + 4))
    return mask


def counted(b, h, q, k):
    """A sum of 400 terms."""
    total = q - k
    for step in range(2, 402):
        total = total + (q % step == 0).int() - (k // step == 1).int()
    return total >= 0


LONG = {
    "documents": documents,
    "sum": counted,
    "chain of the query": lambda b, h, q, k: repeated(
        lambda x: torch.where(x > 3, x - 1, x + 2), q, 400
    ) >= k,
}  # fmt: skip


@pytest.mark.parametrize("name", [*SHARED, *LONG])
def test_block_masks_of_long_masks(name):
    mask, length = (SHARED | LONG)[name], 200
    found = flexhop.create_block_mask(mask, None, None, length, length, "cpu", (32, 16))
    at = torch.vmap(torch.vmap(mask, (None, None, None, 0)), (None, None, 0, None))
    zero, places = torch.tensor(0), torch.arange(length)
    pairs = torch.zeros(224, 208, dtype=torch.bool)
    pairs[:length, :length] = at(zero, zero, places, places)
    blocks = pairs.view(7, 32, 13, 16).any(3).any(1)
    torch.testing.assert_close(found.to_dense()[0, 0].bool(), blocks, rtol=0, atol=0)
