"""Gradients through tables some of whose entries no score reads: those of the mod itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexhop
from flexhop.ops.graphs.tables import tabulate
from tests.unit.ops.support import quiet
from tests.unit.ops.test_tables import HEADS, KEYS, QUERIES, arguments, learned

pytestmark = quiet
DISTANCES = QUERIES + KEYS - 1
BY_HEAD, BY_HEAD_AND_PART, PARTS = learned(HEADS), learned(HEADS, 4), learned(4)


def behind(s, b, h, q, k, rates):
    """NaN for keys behind a query, infinite for the first of them."""
    return s - rates[h] * torch.log(1.0 + q - k)


def power(s, b, h, q, k, rates):
    """NaN for keys behind a query."""
    return s - rates[h] * (q - k + 1).double() ** rates[h]


def root(s, b, h, q, k, rates):
    """The root of 0 is 0, but its derivative is infinite: those of keys behind a query."""
    return s + (rates[h] * (q - k + 1).clamp(min=0)).sqrt()


def growing(s, b, h, q, k, rates):
    """Infinite for keys far behind a query."""
    return s + rates[h] * torch.exp(rates[h] * (k - q) * 300).cos()


def factor(s, b, h, q, k, rates):
    return s * (1 + torch.log(1.0 + q - k) * rates[h]).rsqrt()


def of_everyone(s, b, h, q, k, rates):
    """A number that all entries share."""
    return s * torch.log(1 + (q - k) * rates[2]) + rates[0] * (q - k).double().sqrt().cos()


def decays(s, b, h, q, k, rates):
    """Short rows of numbers, for each head."""
    return s + (rates[h] * torch.log(1 + rates[h] * (q - k))).sum()


def bumps(s, b, h, q, k, rates):
    """A short row of numbers, which all entries share."""
    return s + (rates * torch.exp(((k - q) * 0.9 - rates) ** 3)).sum()


def looked_up(s, b, h, q, k, rates):
    """Reads at an index that depends on the distance."""
    return s + torch.exp(rates[h, (q - k).clamp(0, 3)] * 30.0 * (k - q))


MODS: dict[Any, torch.Tensor] = {
    behind: BY_HEAD,
    power: BY_HEAD,
    root: BY_HEAD,
    growing: BY_HEAD,
    factor: BY_HEAD,
    of_everyone: BY_HEAD,
    decays: BY_HEAD_AND_PART,
    bumps: PARTS,
    looked_up: BY_HEAD_AND_PART,
}
FINITE = {bumps, looked_up}  # no derivative is infinite or NaN


def visible() -> list[torch.Tensor]:
    """h, q and k of all scores of a causal mask."""
    grid = torch.meshgrid(*map(torch.arange, (HEADS, QUERIES, KEYS)), indexing="ij")
    seen = grid[1] >= grid[2]
    return [index[seen] for index in grid]


def evaluated(mod: Any, captures: Any) -> torch.Tensor:
    """What a mod makes of visible scores."""
    of_one = lambda h, q, k: mod(0.01 * (q + k), torch.tensor(0), h, q, k, *captures)  # noqa: E731
    return torch.vmap(of_one)(*visible())


def gradients(mod: Any, rates: torch.Tensor, captures: Any) -> list[torch.Tensor]:
    """Of a sum of functions of the scores, and of its gradient's; some entries' are 0."""
    found = evaluated(mod, captures)
    weights = torch.linspace(0, 1, found.numel(), dtype=found.dtype)
    loss = (found * weights).sin().sum()
    (first,) = torch.autograd.grad(loss, rates, create_graph=True)
    (second,) = torch.autograd.grad(first.cos().sum(), rates)
    return [first, second]


@pytest.mark.parametrize("mod", MODS)
def test_first_and_second_derivatives_are_those_of_the_mod(mod):
    rates = MODS[mod]
    found = tabulate(arguments(mod, rates))
    assert found is not None
    assert all(size[-1] == DISTANCES for size in found.sizes)
    wanted = gradients(mod, rates, (rates,))
    made = gradients(found.mod, rates, found.captures)
    assert all(grad.isfinite().all() for grad in wanted)
    torch.testing.assert_close(made, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mod", [m for m in MODS if m not in FINITE])
def test_unread_entries_would_spoil_these(mod):
    """The problem is there: without its mask, the mod has no such gradient."""
    rates = MODS[mod]
    q, k = torch.arange(QUERIES)[:, None], torch.arange(KEYS)
    of_one = lambda q, k: mod(0.1 * k, torch.tensor(0), torch.tensor(0), q, k, rates)  # noqa: E731
    scores = torch.vmap(torch.vmap(of_one, (None, 0)), (0, None))(q[:, 0], k)
    (grad,) = torch.autograd.grad(torch.where(q >= k, scores, 0.0).sum(), rates)
    assert not grad.isfinite().all()


def test_a_derivative_of_an_entry_that_is_read_is_not_hidden():
    rates = learned(HEADS)
    mod = lambda s, b, h, q, k, rates: s + torch.sin((rates[h] * (q - k)).sqrt())  # noqa: E731
    found = tabulate(arguments(mod, rates))
    assert found is not None
    (grad,) = torch.autograd.grad(evaluated(found.mod, found.captures).sum(), rates)
    assert grad.isnan().all()  # infinity times 0, at distance 0, which is read


def test_a_gradient_that_is_zero_has_a_gradient():
    """A loss that is smallest has no gradient, but has second derivatives."""
    rates = learned(HEADS)
    found = tabulate(arguments(behind, rates))
    assert found is not None

    def second(mod: Any, captures: Any) -> torch.Tensor:
        made = evaluated(mod, captures)
        loss = (made - made.detach()).square().sum()
        (first,) = torch.autograd.grad(loss, rates, create_graph=True)
        return torch.autograd.grad(first.sum(), rates)[0]

    wanted = second(behind, (rates,))
    assert (wanted > 0).all()
    torch.testing.assert_close(second(found.mod, found.captures), wanted)


@pytest.mark.parametrize("mod", [behind, decays, growing])
def test_compiled_calls_have_the_same_gradients(mod):
    rates = MODS[mod].detach().float().requires_grad_()
    mask = flexhop.create_block_mask(lambda b, h, q, k: q >= k, None, None, KEYS, KEYS, "cpu")
    generator = torch.Generator().manual_seed(1)
    operands = [torch.randn(16, HEADS, KEYS, 16, generator=generator) for _ in range(3)]
    leaves = [x.requires_grad_() for x in operands]

    def attend(query, key, value, last=lambda q, k: q):
        score_mod = lambda s, b, h, q, k: mod(s, b, h, last(q, k), k, rates)  # noqa: E731
        return flexhop.flex_attention(query, key, value, score_mod, mask)

    def expected(*operands):
        """Where the mask hides a score, the mod sees its key's own position."""
        return attend(*operands, last=torch.maximum)

    results = []
    for call in (expected, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = call(*leaves)
        grads = torch.autograd.grad(out.square().sum(), [*leaves, rates])
        results.append((out, *grads))
    assert all(x.isfinite().all() for x in results[0])
    for wanted, made in zip(*results, strict=True):
        torch.testing.assert_close(made, wanted, rtol=2e-4, atol=2e-4)
