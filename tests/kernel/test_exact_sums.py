"""Captured gradients that repeat bit by bit: sums of integers, in Triton's interpreter."""

import math

import jinja2
import pytest
import torch

import flexhop
from flexhop.lowering.emission import sums
from flexhop.lowering.emission.exact_sums import ROWS, value_of
from flexhop.offline import Kernel
from flexhop.offline.interpret import Memory, interpret, run_kernel
from flexhop.templates import part
from tests.budgets import assert_within_budget, evaluate_score_mod

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")

SOURCE = f"""
import triton
import triton.language as tl

@triton.jit
def add_all(SUMS, INDEX, VALUES, ENTRIES, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    add_exactly(SUMS, tl.load(INDEX + place), tl.load(VALUES + place), ENTRIES)

{jinja2.Template(part("mods/exact_sum")).render()}
"""


def summed(values: torch.Tensor, index: torch.Tensor, entries: int) -> torch.Tensor:
    kernel = Kernel("add_all", SOURCE, "template", {}, {}, {}, 4, 1)
    totals = torch.zeros(ROWS, entries, dtype=torch.int64)
    arguments = {
        "SUMS": totals, "INDEX": index.int(), "VALUES": values, "ENTRIES": entries, "BLOCK": 256,
    }  # fmt: skip
    run_kernel(kernel, (len(values) // 256, 1, 1), arguments)
    return totals


def test_any_order_gives_the_same_integers_and_the_exact_sum():
    generator = torch.Generator().manual_seed(0)
    scale = 2.0 ** torch.randint(-100, 100, (4096,), generator=generator)
    values = torch.randn(4096, generator=generator) * scale
    values[0:4090:7] = -values[1:4091:7]  # cancels in part
    values[5] = 1e-45  # the smallest number
    index = torch.randint(0, 6, (4096,), generator=generator)
    first = summed(values, index, 6)
    for _ in range(3):
        order = torch.randperm(4096, generator=generator)
        assert torch.equal(first, summed(values[order].clone(), index[order], 6))
    exact = [math.fsum(values[index == i].tolist()) for i in range(6)]
    torch.testing.assert_close(
        value_of(first), torch.tensor(exact, dtype=torch.float64), rtol=1e-15, atol=0
    )


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        ([math.inf], math.inf), ([-math.inf], -math.inf), ([math.inf, -math.inf], math.nan),
        ([math.nan], math.nan), ([math.inf, math.nan, 1.0], math.nan),
        ([math.inf] * 200, math.inf), ([3.4e38] * 3, 3 * float(torch.tensor(3.4e38))),
    ],
)  # fmt: skip
def test_what_is_not_finite_stays_so(special, expected):
    values = torch.zeros(256)
    values[: len(special)] = torch.tensor(special)
    found = value_of(summed(values, torch.zeros(256), 1))
    assert torch.equal(
        found.nan_to_num(nan=-7.0),
        torch.tensor([expected], dtype=torch.float64).nan_to_num(nan=-7.0),
    )


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def by_head(table):
    return lambda score, b, h, q, k: score + table[h] * (k - q)


def by_distance(table):
    return lambda score, b, h, q, k: score + table[h, q - k + 69]


def by_query(table):
    return lambda score, b, h, q, k: score * table[b, q]


def by_score(table):
    return lambda score, b, h, q, k: score + table[h, q, k]


def by_bucket(table):
    return lambda score, b, h, q, k: score * table[(q * 7 + k) % 5]


def by_kind(table):
    """One entry for a pair of kinds, and for a query alone: both add to one buffer."""
    kind = torch.arange(70) % 3
    return lambda score, b, h, q, k: score + table[h, kind[q], kind[k]] * table[h, 0, kind[q]]


MODS = {
    "scalar": (lambda t: lambda score, b, h, q, k: score * t, ()),
    "head": (by_head, (2,)),
    "distance": (by_distance, (2, 140)),
    "query": (by_query, (2, 70)),
    "score": (by_score, (2, 70, 70)),
    "bucket": (by_bucket, (5,)),
    "kind": (by_kind, (2, 3, 3)),
}


def differentiate_as_kernels(leaves, make_mod, dropout_p, seed):
    """Gradient of the table, in plain PyTorch that rounds as the interpreted kernels do.

    They know powers of 2 only: forward, a score times log2(e) is rounded before the largest is
    subtracted. Backward, weights come from lse and delta from out, whose error is then one of the
    whole row: a sum over its keys does not average it away.
    """
    query, key, value, table = leaves
    scores = evaluate_score_mod(make_mod(table), query @ key.mT / 4)
    kept = 1.0
    if dropout_p:
        kept = flexhop.dropout_mask(seed, dropout_p, tuple(scores.shape)) / (1 - dropout_p)
    with torch.no_grad():
        powers = scores * math.log2(math.e)
        shift = powers.amax(-1, keepdim=True)
        weights = (powers - shift).exp2()
        total = weights.sum(-1, keepdim=True)
        out = (weights * kept) @ value / total
        lse = (shift + total.log2()) * math.log(2)
        grad_out = 2 * out
        delta = (grad_out * out).sum(-1, keepdim=True)
        grad_weights = (grad_out @ value.mT) * kept
        grad_scores = (scores - lse).exp() * (grad_weights - delta)
    scores.backward(grad_scores)


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("name", MODS)
def test_gradients_of_captured_tensors(name, dropout_p, deterministic):
    check_gradients(name, dropout_p)


@pytest.fixture
def copies(monkeypatch):
    """Numbers of copies that kernels are given, by capture, with few scores for each."""
    given, in_copies = [], sums.in_copies

    def spread(*args):
        reads = in_copies(*args)
        given.append(dict(reads.copies))
        return reads

    monkeypatch.setattr(sums, "_FEW_SCORES", 16)
    monkeypatch.setattr(sums, "in_copies", spread)
    return given


SMALL = {"bucket": 128, "kind": 64}  # copies


@pytest.mark.parametrize("name", SMALL)
def test_neighbouring_scores_add_to_copies_of_small_tables(name, copies):
    check_gradients(name, 0.0)
    assert [[*found.values()] for found in copies] == [[SMALL[name]]]


@pytest.mark.parametrize("name", SMALL)
def test_exact_sums_of_copies(name, copies, deterministic):
    check_gradients(name, 0.2)
    assert [[*found.values()] for found in copies] == [[SMALL[name]]]


def check_gradients(name, dropout_p):
    make_mod, size = MODS[name]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 2, 70, 16, generator=generator) for _ in range(3)]
    table = torch.randn(size, generator=generator)
    seed = torch.tensor([5, 6])

    def call(query, key, value, table):
        return flexhop.flex_attention(
            query, key, value, make_mod(table), dropout_p=dropout_p, dropout_seed=seed
        )

    def gradient(run, dtype=torch.float32):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (*tensors, table)]
        run(leaves)
        return leaves[-1].grad

    found = gradient(
        lambda leaves: interpret(
            call, *leaves, grad=lambda out: out.square().sum(),
            memory=Memory(poison=True, check_bounds=True),
        )
    )  # fmt: skip
    eager = lambda leaves: call(*leaves).square().sum().backward()  # noqa: E731
    gold, reference = gradient(eager, torch.float64), gradient(eager)
    rounded = gradient(lambda x: differentiate_as_kernels(x, make_mod, dropout_p, seed))
    assert_within_budget(found, gold, reference, rounded, name=name, captured=True)
