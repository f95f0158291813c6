"""Gradients of what a score_mod captures, in every shape in which it may be read."""

import pytest
import torch

from flexhop import flex_attention
from flexhop.errors import UnsupportedFeatureError
from flexhop.offline.interpret import Memory, interpret
from flexhop.ops.graphs.reads import MAX_ROW
from flexhop.ops.graphs.subgraphs import trace_joint
from tests.unit.ops.support import (
    BATCH,
    HEADS,
    LENGTH,
    assert_same,
    causal_mask,
    compiled,
    operands,
    quiet,
)

pytestmark = quiet


def distance(points, axes):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score - ((points[b, q_idx] - points[b][kv_idx]) ** 2).sum(axes)

    return score_mod


@pytest.mark.parametrize("row", [(3,), (2, 3), (16,), (MAX_ROW,)])
def test_short_rows(row):
    points, inputs = torch.randn(BATCH, LENGTH, *row, requires_grad=True), operands(grad=True)
    mod, mask = distance(points, tuple(range(-len(row), 0))), causal_mask()
    assert_same(lambda *x: flex_attention(*x, mod, mask), inputs, [*inputs, points])


def test_elements_of_a_row():
    points, inputs = torch.randn(BATCH, LENGTH, 3, requires_grad=True), operands()
    assert_same(
        lambda *x: flex_attention(
            *x, lambda s, b, h, q, k: s - points[b, q][0] * points[b, k, 2] * s
        ),
        inputs,
        [points],
    )


def test_long_rows_are_refused_where_they_need_a_gradient():
    points = torch.randn(BATCH, LENGTH, MAX_ROW + 1)
    assert_same(lambda *x: flex_attention(*x, distance(points, -1)), operands(grad=True))
    points.requires_grad_()
    with pytest.raises(UnsupportedFeatureError, match=f"a row of at most {MAX_ROW}"):
        compiled(flex_attention)(*operands(), distance(points, -1))


def test_work_on_captures_alone_is_hoisted():
    slopes, inputs = torch.randn(HEADS, requires_grad=True), operands(grad=True)
    assert_same(
        lambda *x: flex_attention(
            *x, lambda s, b, h, q, k: s + slopes.exp().cumsum(0)[h] * (q - k)
        ),
        inputs,
        [*inputs, slopes],
    )


def test_sites_of_a_row():
    query, points = torch.randn(1, 1, 4, 8), torch.randn(4, 3, requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx, points):
        return score + torch.ops.aten.index.Tensor(points, [q_idx]).sum()

    joint = trace_joint(score_mod, query, (points,))
    # One site per element: the capture's number, and its two indices.
    assert joint.sites == (0, 2) * 3
    assert len(joint.joint.graph.output_node().args[0]) == 1 + 3 + 6


def test_gradients_of_different_captures_do_not_mix():
    inputs = operands(grad=True)
    first, second = (torch.randn(LENGTH, requires_grad=True) for _ in range(2))
    assert_same(
        lambda *x: flex_attention(
            *x, lambda s, b, h, q, k: s * first[q] + second[k] * first[k - q]
        ),
        inputs,
        [*inputs, first, second],
    )


def test_only_some_captures_need_a_gradient():
    inputs, constant = operands(), torch.randn(LENGTH)
    table = torch.randn(LENGTH, requires_grad=True)
    assert_same(
        lambda *x: flex_attention(*x, lambda s, b, h, q, k: s + constant[q] * table[k]),
        inputs,
        [table],
    )


@pytest.mark.parametrize("entries", [2 * LENGTH, 10], ids=["wraps", "clamps"])
def test_kernels_wrap_negative_indices_and_never_leave_the_tensor(entries):
    def function(query, key, value, table):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score + table[q_idx - kv_idx] + table[(q_idx - kv_idx) // 2]

        return flex_attention(query, key, value, score_mod)

    inputs = [*operands(grad=True), torch.randn(entries, requires_grad=True)]
    memory = Memory(poison=True, check_bounds=True)
    out = interpret(function, *inputs, grad=True, memory=memory).result
    if entries == 2 * LENGTH:  # what is outside [-size, size) is undefined
        expected = function(*inputs)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        grads = torch.autograd.grad(expected.sum(), inputs)
        torch.testing.assert_close([t.grad for t in inputs], list(grads), rtol=1e-3, atol=1e-3)
