"""The estimate of a user function's instructions."""

import pytest
import torch

from flexhop import mods
from flexhop.compat.graphs.inline import decompose
from flexhop.lowering.mods.analysed import JOINT, SCORE, analysed
from flexhop.lowering.mods.lower import read_joint, read_mods
from flexhop.ops.graphs.subgraphs import trace_joint, trace_mask, trace_score

QUERY = torch.zeros(1, 2, 64, 16, dtype=torch.bfloat16)
SLOPES, TABLE = torch.ones(2), torch.ones(64)


def cost(score_mod) -> float:
    return analysed(trace_score(score_mod, QUERY, ()), SCORE).instructions()


def grad_cost(score_mod) -> float:
    return analysed(trace_joint(score_mod, QUERY, ()).joint, JOINT).instructions()


def test_what_hangs_on_a_row_costs_nothing_and_on_a_column_half():
    assert cost(lambda s, b, h, q, k: s) == 0
    assert cost(lambda s, b, h, q, k: s + torch.lgamma(q.float())) == 1
    assert cost(lambda s, b, h, q, k: s + torch.lgamma(SLOPES[h])) == 1
    by_key = cost(lambda s, b, h, q, k: s + torch.lgamma(TABLE[k]))
    by_score = cost(lambda s, b, h, q, k: s + torch.lgamma(TABLE[k] + q))
    assert 65 < by_key < 75
    assert by_score > by_key + 60


@pytest.mark.parametrize(
    ("score_mod", "fewest", "most"),
    [  # counted in the machine code of the Hopper kernel, with the scale of the score
        # (remainder: 15, exact tanh: 14, silu: 6, gelu: 18, sin: 15, a power by head: 17)
        (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), 2, 6),
        (lambda s, b, h, q, k: s / (1 + (q - k).abs()), 3, 8),
        (lambda s, b, h, q, k: s * torch.sigmoid(s), 4, 9),
        (lambda s, b, h, q, k: torch.nn.functional.gelu(s), 14, 24),
        (lambda s, b, h, q, k: torch.where((q - k) % 7 == 0, s, s * 0.5), 9, 18),
        (mods.softcap(30.0), 10, 18),
        (mods.softcap(30.0, approximate=True), 2, 8),
        (lambda s, b, h, q, k: torch.erf(s), 10, 20),
        (lambda s, b, h, q, k: torch.sin(s), 10, 20),
        (lambda s, b, h, q, k: s * torch.pow(0.99, (q - k).abs().float()), 12, 30),
        (lambda s, b, h, q, k: s * s**2, 2, 6),
    ],
)
def test_single_functions(score_mod, fewest, most):
    assert fewest <= cost(score_mod) <= most


def test_the_gradient_is_counted_with_the_gradient_it_gets():
    assert grad_cost(lambda s, b, h, q, k: s + SLOPES[h] * (k - q)) == 0
    assert grad_cost(lambda s, b, h, q, k: s * SLOPES[h]) == 1
    assert 10 < grad_cost(lambda s, b, h, q, k: torch.sin(s)) < 24


@pytest.mark.parametrize(
    ("mask_mod", "counted"),
    [  # in the machine code of the Hopper kernel, a masked step of 128 x 128 less a full one
        (lambda b, h, q, k: q >= k, 2.8),
        (lambda b, h, q, k: (q >= k) | (k < 300), 4.3),
        (lambda b, h, q, k: (q >= k) & (q + k < 900), 8.9),
        (lambda b, h, q, k: (q >= k) & ((q - k) % 4 == 0), 5.8),
        (lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0), 17.1),
        (
            lambda b, h, q, k: ((q // 64 - k // 64).abs() <= 6) & ((q % 64 - k % 64).abs() <= 6),
            15.4,
        ),
        (
            lambda b, h, q, k: (k // 64 == 0) | ((q // 64 - k // 64).abs() <= 1) | (k % 16 == 0),
            8.5,
        ),
        # means of 64 and 128 columns, Triton 3.6
        (lambda b, h, q, k: (q % 3 != 1) & (q // 11 >= k // 11), 3.7),
        (lambda b, h, q, k: q // 11 >= k // 11, 2.6),
        (lambda b, h, q, k: (q // 100 - k // 100).abs() <= 1, 4.5),
        (lambda b, h, q, k: q // 300 == k // 300, 5.7),
        (lambda b, h, q, k: TABLE[q] == TABLE[k], 5.9),
        (lambda b, h, q, k: (TABLE[q] == TABLE[k]) & (q >= k), 7.2),
        (lambda b, h, q, k: TABLE[k] > 0, 4.1),
    ],
)
def test_masks_take_about_as_long_as_counted(mask_mod, counted):
    # kernels see the mods as Inductor's decompositions leave them
    mask = decompose(trace_mask(mask_mod, QUERY, ()))
    estimate = read_mods(trace_score(lambda s, b, h, q, k: s, QUERY, ()), mask).mask_cost
    assert counted / 1.5 < estimate < counted * 1.5


@pytest.mark.parametrize("position", ["q", "k"])
def test_masks_are_counted_by_what_threads_hold(position):
    """A remainder of the query is computed once per row of queries, and for rows of keys often."""

    def mask_mod(b, h, q, k):
        return ({"q": q, "k": k}[position] % 3 != 1) & (q >= k)

    mask = decompose(trace_mask(mask_mod, QUERY, ()))
    facts = read_mods(trace_score(lambda s, b, h, q, k: s, QUERY, ()), mask)
    by_queries, by_keys = facts.asked_cost, facts.asked_grad_cost
    most, least = (by_keys, by_queries) if position == "q" else (by_queries, by_keys)
    assert 9 < most < 11
    assert 3 < least < 5


def test_an_unknown_operator_counts_as_one():
    assert cost(lambda s, b, h, q, k: torch.heaviside(s, s)) == 1


@pytest.mark.parametrize(
    ("score_mod", "reads_score", "has_functions"),
    [
        (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), False, False),
        (lambda s, b, h, q, k: s * SLOPES[h], False, False),
        (lambda s, b, h, q, k: s / (1 + (q - k).abs()), False, False),
        (lambda s, b, h, q, k: s * torch.lgamma((q - k).float()), False, True),
        (lambda s, b, h, q, k: (s * 0.1 + 1) * s + s**3, True, False),
        (lambda s, b, h, q, k: s * torch.sigmoid(s), True, False),
        (mods.softcap(30.0), True, True),
        (mods.softcap(30.0, approximate=True), True, True),
    ],
)
def test_what_a_gradient_needs(score_mod, reads_score, has_functions):
    facts = read_joint(trace_joint(score_mod, QUERY, ()).joint)
    assert (facts.grad_reads_score, facts.grad_has_functions) == (reads_score, has_functions)


def test_the_gradient_of_a_learned_factor_needs_the_score():
    factor = torch.ones(2, requires_grad=True)
    traced = trace_joint(lambda s, b, h, q, k, factor: s * factor[h], QUERY, (factor,))
    assert read_joint(traced.joint).grad_reads_score
