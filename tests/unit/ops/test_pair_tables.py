"""Parts of mods that see both positions as tables of pairs, if batches or heads share them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexhop
from flexhop.compat.mods.indexing import IndexMode
from flexhop.ops.args import AttentionArgs
from flexhop.ops.graphs.tables import tabulate
from tests.tabulated import check_gradients

BATCH, HEADS, QUERIES, KEYS = 16, 3, 48, 64
PAIRS = {(QUERIES, KEYS), (HEADS, QUERIES, KEYS)}
GENERATOR = torch.Generator().manual_seed(5)


def uniform(*size: int) -> torch.Tensor:
    return torch.rand(size, generator=GENERATOR, dtype=torch.float64)


KIND = torch.randint(4, (KEYS,), generator=GENERATOR)
PLACE, EDGES = uniform(KEYS, 3), uniform(6).sort().values
FIXED = (KIND, PLACE, EDGES)
OF_KINDS, OF_BINS = uniform(4, 4).requires_grad_(), uniform(7, HEADS).requires_grad_()
OF_WINDOW = uniform(15, 15, HEADS).requires_grad_()
OF_PAIR = uniform(HEADS, QUERIES, KEYS).requires_grad_()


def by_kind(s, b, h, q, k, table, kind, place, edges):
    return s + table[kind[q], kind[k]]


def by_bin(s, b, h, q, k, table, kind, place, edges):
    far = (place[q] - place[k]).square().sum().sqrt()
    return s + table[torch.bucketize(far, edges), h]


def by_window(s, b, h, q, k, table, kind, place, edges):
    return s - table[q // 8 % 8 - k // 8 % 8 + 7, q % 8 - k % 8 + 7, h]


def of_window(s, b, h, q, k, table, kind, place, edges):
    """A function of several numbers of both positions, which is a table without batches, too."""
    return s + table[q // 8 % 8 - k // 8 % 8 + 7, q % 8 - k % 8 + 7, h].sin().atan()


def by_angle(s, b, h, q, k, table, kind, place, edges):
    """Nothing is learned."""
    return s + torch.atan2(place[q, 0] - place[k, 0], place[q, 1] * place[k, 1] + 0.1).sinh()


LEARNED: dict[Any, tuple[torch.Tensor, tuple[int, ...]]] = {
    by_kind: (OF_KINDS, (QUERIES, KEYS)),
    by_bin: (OF_BINS, (HEADS, QUERIES, KEYS)),
    by_window: (OF_WINDOW, (HEADS, QUERIES, KEYS)),
    of_window: (OF_WINDOW, (HEADS, QUERIES, KEYS)),
}


def arguments(mod: Any, capture: torch.Tensor, **options: Any) -> AttentionArgs:
    query = torch.zeros(BATCH, HEADS, QUERIES, 32, dtype=torch.float64)
    key = torch.zeros(BATCH, HEADS, KEYS, 32, dtype=torch.float64)
    every = lambda b, h, q, k: q >= 0  # noqa: E731
    return AttentionArgs(query, key, key, mod, every, (), 1.0, options, (capture, *FIXED), ())


def scores(mod: Any, captures: Any) -> torch.Tensor:
    """The values of a mod for scores that differ, as vmap computes them."""
    score = torch.linspace(-2, 2, HEADS * QUERIES * KEYS, dtype=torch.float64)
    indices = [torch.arange(n, dtype=torch.int32) for n in (HEADS, QUERIES, KEYS)]
    of_one = lambda s, h, q, k: mod(s, torch.zeros_like(h), h, q, k, *captures)  # noqa: E731
    over_keys = torch.vmap(of_one, (0, None, None, 0))
    over_queries = torch.vmap(over_keys, (0, None, 0, None))
    over_heads = torch.vmap(over_queries, (0, 0, None, None))
    with IndexMode():
        return over_heads(score.view(HEADS, QUERIES, KEYS), *indices)


@pytest.mark.parametrize("mod", [*LEARNED, by_angle])
def test_tables_of_pairs_hold_what_the_mod_computes(mod):
    capture, size = LEARNED.get(mod, (OF_KINDS.detach(), (QUERIES, KEYS)))
    found = tabulate(arguments(mod, capture))
    assert found is not None
    assert found.sizes == (size,)
    assert found.saved > 0
    wanted, made = scores(mod, (capture, *FIXED)), scores(found.mod, found.captures)
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mod", LEARNED)
def test_gradients_go_through_tables_of_pairs(mod):
    capture, _ = LEARNED[mod]
    found = tabulate(arguments(mod, capture))
    assert found is not None
    check_gradients(scores(mod, (capture, *FIXED)), scores(found.mod, found.captures), capture)


def sizes_of(call: AttentionArgs) -> set[tuple[int, ...]]:
    found = tabulate(call)
    return set() if found is None else set(found.sizes)


def test_rows_of_pairs_are_aligned():
    call = arguments(by_bin, OF_BINS)
    odd = call._replace(key=call.key[:, :, :-3], value=call.value[:, :, :-3])
    found = tabulate(odd)
    assert found is not None
    assert found.sizes == ((HEADS, QUERIES, KEYS),)
    table = found.captures[-1]
    assert not table[..., -3:].any()
    grad = torch.autograd.grad(table[..., :-3].sum(), OF_BINS, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(table.sum(), OF_BINS)[0], grad)


def test_few_batches_share_too_little():
    call = arguments(by_bin, OF_BINS)
    few = call._replace(query=call.query[:4], key=call.key[:4], value=call.value[:4])
    assert not sizes_of(few) & PAIRS


@pytest.mark.parametrize(("width", "sizes"), [(1, set()), (2, {(HEADS, QUERIES, KEYS)})])
def test_a_table_of_pairs_is_no_larger_than_the_operands(width, sizes):
    call = arguments(by_bin, OF_BINS)
    query, key, value = (x[:8, ..., :width] for x in (call.query, call.key, call.value))
    assert sizes_of(call._replace(query=query, key=key, value=value)) & PAIRS == sizes


def test_short_queries_read_no_pairs():
    call = arguments(by_bin, OF_BINS)
    assert not sizes_of(call._replace(query=call.query[:, :, :8])) & PAIRS


def unbounded(s, b, h, q, k, table, kind, place, edges):
    return s + table[q // 8 % 8 - k // 8 % 8 + 7, q % 8 - k % 8 + 7, h].sin().cosh()


def test_entries_whose_derivative_may_be_infinite_stay_a_smaller_table():
    """No score may read them, and 0 times infinity would be the gradient of what is learned."""
    assert sizes_of(arguments(unbounded, OF_WINDOW)) == {(HEADS, 13, 15)}


def test_exact_sums_have_no_entries_of_pairs():
    """Each would take ten integers."""
    assert not sizes_of(arguments(by_bin, OF_BINS, deterministic=True)) & PAIRS
    assert sizes_of(arguments(by_bin, OF_BINS.detach(), deterministic=True)) <= PAIRS


def of_pair(s, b, h, q, k, table, kind, place, edges):
    return s + table[h, q, k]


def cheap(s, b, h, q, k, table, kind, place, edges):
    return s + (place[q, 0] - place[k, 0]) * table[h, h, h]


def by_batch(s, b, h, q, k, table, kind, place, edges):
    return s + b * table[kind[q], kind[k], h % 2].sin()


@pytest.mark.parametrize(
    ("mod", "capture"),
    [(of_pair, OF_PAIR), (cheap, OF_PAIR.detach()), (by_batch, OF_WINDOW.detach())],
)
def test_what_is_cheap_or_different_in_batches_stays(mod, capture):
    assert not sizes_of(arguments(mod, capture)) & PAIRS


def test_parts_of_one_position_have_smaller_tables():
    """Their sum is cheap, so pairs are not tabulated."""

    def mod(s, b, h, q, k, table, kind, place, edges):
        return s + (place[q, 0].lgamma() + place[k, 1].lgamma())

    assert not sizes_of(arguments(mod, OF_KINDS.detach())) & PAIRS


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
@pytest.mark.parametrize("mod", [by_kind, by_bin, by_window])
def test_compiled_calls_have_the_same_results_and_gradients(mod):
    capture = LEARNED[mod][0]
    operands = [
        torch.randn(BATCH, HEADS, n, 16, generator=GENERATOR, requires_grad=True)
        for n in (QUERIES, KEYS, KEYS)
    ]
    weights = torch.randn(BATCH, HEADS, QUERIES, 16, generator=GENERATOR)
    leaf = capture.detach().float().requires_grad_()

    def attend(query, key, value):
        score_mod = lambda *args: mod(*args, leaf, *FIXED)  # noqa: E731
        return flexhop.flex_attention(query, key, value, score_mod)

    results = []
    for function in (attend, torch.compile(attend, fullgraph=True)):
        out = function(*operands)
        results.append((out, *torch.autograd.grad(out, (*operands, leaf), weights)))
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
