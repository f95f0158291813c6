"""The graph that reaches a backend: one node of ours with its user functions.

`EXPECTTEST_ACCEPT=1 pytest tests/graph` accepts new texts.
"""

# Snapshots keep the lines of the generated text.
# ruff: noqa: E501

import torch
from expecttest import TestCase

import flexhop
from tests.graph.texts import aot_graphs, operator_text


def _inputs(dtype=torch.float32, length=64):
    torch.manual_seed(0)
    return [torch.randn(1, 2, length, 16, dtype=dtype, requires_grad=True) for _ in range(3)]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


class AotGraph(TestCase):
    maxDiff = None

    def test_plain(self):
        (graph,) = aot_graphs(
            lambda q, k, v: flexhop.flex_attention(q, k, v), *_inputs(), grad=False
        )[:1]
        self.assertExpectedInline(
            operator_text(graph),
            """\
flexhop_attention(
    query=float32[1, 2, 64, 16],
    key=float32[1, 2, 64, 16],
    value=float32[1, 2, 64, 16],
    score_mod=flexhop_score0,
    mask_mod=flexhop_mask0,
    blocks=(),
    scale=0.25,
    options={'flexhop': '...'},
    score_captures=(),
    mask_captures=(),
) -> (float32[1, 2, 64, 16], float32[1, 2, 64], float32[0])

def flexhop_score0(score, b, h, q_idx, kv_idx):
    return score

def flexhop_mask0(b, h, q_idx, kv_idx):
    new_ones = aten.new_ones.default(b, [], dtype=torch.bool, pin_memory=False)
    return new_ones
""",
        )

    def test_mask_and_captured_bias_forward_and_backward(self):
        mask = flexhop.create_block_mask(causal, None, None, 64, 64, "cpu", BLOCK_SIZE=32)
        bias = torch.randn(2, 127, requires_grad=True)

        def attention(query, key, value):
            def score_mod(score, b, h, q_idx, kv_idx):
                return score + bias[h, q_idx - kv_idx + 63]

            return flexhop.flex_attention(query, key, value, score_mod, mask)

        forward, backward = aot_graphs(attention, *_inputs(), grad=True)
        self.assertExpectedInline(
            operator_text(forward),
            """\
flexhop_attention(
    query=float32[1, 2, 64, 16],
    key=float32[1, 2, 64, 16],
    value=float32[1, 2, 64, 16],
    score_mod=flexhop_score0,
    mask_mod=flexhop_mask0,
    blocks=(int32[1, 1, 2], int32[1, 1, 2, 2], int32[1, 1, 2], int32[1, 1, 2, 2], int32[1, 1, 2], int32[1, 1, 2, 2], int32[1, 1, 2], int32[1, 1, 2, 2]),
    scale=0.25,
    options={'flexhop': '...', 'wide_lse': True, 'q_block_size': 32, 'kv_block_size': 32, 'has_full_blocks': True, 'has_q_blocks': True},
    score_captures=(float32[2, 127]),
    mask_captures=(),
) -> (float32[1, 2, 64, 16], float64[1, 2, 64], float32[0])

def flexhop_score0(score, b, h, q_idx, kv_idx, capture_0):
    sub = aten.sub.Tensor(q_idx, kv_idx)
    add = aten.add.Tensor(sub, 63)
    index = aten.index.Tensor(capture_0, [h, add])
    add_1 = aten.add.Tensor(score, index)
    return add_1

def flexhop_mask0(b, h, q_idx, kv_idx):
    ge = aten.ge.Tensor(q_idx, kv_idx)
    return ge
""",
        )
        self.assertExpectedInline(
            operator_text(backward),
            """\
flexhop_attention_backward(
    query=float32[1, 2, 64, 16],
    key=float32[1, 2, 64, 16],
    value=float32[1, 2, 64, 16],
    out=float32[1, 2, 64, 16],
    lse=float64[1, 2, 64],
    grad_out=float32[1, 2, 64, 16],
    grad_lse=None,
    score_mod=flexhop_score1,
    joint=flexhop_joint0,
    mask_mod=flexhop_mask1,
    blocks=(int32[1, 1, 2], int32[1, 1, 2, 2], int32[1, 1, 2], int32[1, 1, 2, 2], int32[1, 1, 2], int32[1, 1, 2, 2], int32[1, 1, 2], int32[1, 1, 2, 2]),
    scale=0.25,
    options={'flexhop': '...', 'wide_lse': True, 'q_block_size': 32, 'kv_block_size': 32, 'has_full_blocks': True, 'has_q_blocks': True},
    score_captures=(float32[2, 127]),
    mask_captures=(),
    sites=(0, 2),
) -> (float32[1, 2, 64, 16], float32[1, 2, 64, 16], float32[1, 2, 64, 16], float32[2, 127])

def flexhop_score1(score, b, h, q_idx, kv_idx, capture_0):
    sub = aten.sub.Tensor(q_idx, kv_idx)
    add = aten.add.Tensor(sub, 63)
    index = aten.index.Tensor(capture_0, [h, add])
    add_1 = aten.add.Tensor(score, index)
    return add_1

def flexhop_joint0(score, b, h, q_idx, kv_idx, grad_score, capture_0):
    sub = aten.sub.Tensor(q_idx, kv_idx)
    add = aten.add.Tensor(sub, 63)
    return [grad_score, grad_score, h, add]

def flexhop_mask1(b, h, q_idx, kv_idx):
    ge = aten.ge.Tensor(q_idx, kv_idx)
    return ge
""",
        )

    def test_squared_score_backward(self):
        def attention(query, key, value):
            return flexhop.flex_attention(
                query, key, value, lambda s, b, h, q, k: s * s, scale=0.5
            )

        _, backward = aot_graphs(attention, *_inputs(torch.float64), grad=True)
        self.assertExpectedInline(
            operator_text(backward),
            """\
flexhop_attention_backward(
    query=float64[1, 2, 64, 16],
    key=float64[1, 2, 64, 16],
    value=float64[1, 2, 64, 16],
    out=float64[1, 2, 64, 16],
    lse=float64[1, 2, 64],
    grad_out=float64[1, 2, 64, 16],
    grad_lse=None,
    score_mod=flexhop_score1,
    joint=flexhop_joint0,
    mask_mod=flexhop_mask1,
    blocks=(),
    scale=0.5,
    options={'flexhop': '...'},
    score_captures=(),
    mask_captures=(),
    sites=(),
) -> (float64[1, 2, 64, 16], float64[1, 2, 64, 16], float64[1, 2, 64, 16])

def flexhop_score1(score, b, h, q_idx, kv_idx):
    mul = aten.mul.Tensor(score, score)
    return mul

def flexhop_joint0(score, b, h, q_idx, kv_idx, grad_score):
    mul = aten.mul.Tensor(grad_score, score)
    mul_1 = aten.mul.Tensor(grad_score, score)
    add = aten.add.Tensor(mul_1, mul)
    return [add]

def flexhop_mask1(b, h, q_idx, kv_idx):
    new_ones = aten.new_ones.default(b, [], dtype=torch.bool, pin_memory=False)
    return new_ones
""",
        )

    def test_hoisted_slopes(self):
        """What depends on captured tensors alone is computed once, outside of the operator."""
        logarithm = torch.zeros(2, requires_grad=True)

        def attention(query, key, value):
            alibi = flexhop.mods.alibi(logarithm.exp())
            return flexhop.flex_attention(query, key, value, alibi)

        _, backward = aot_graphs(attention, *_inputs(), grad=True)
        self.assertExpectedInline(
            operator_text(backward),
            """\
flexhop_attention_backward(
    query=float32[1, 2, 64, 16],
    key=float32[1, 2, 64, 16],
    value=float32[1, 2, 64, 16],
    out=float32[1, 2, 64, 16],
    lse=float64[1, 2, 64],
    grad_out=float32[1, 2, 64, 16],
    grad_lse=None,
    score_mod=flexhop_score1,
    joint=flexhop_joint0,
    mask_mod=flexhop_mask1,
    blocks=(),
    scale=0.25,
    options={'flexhop': '...', 'wide_lse': True},
    score_captures=(float32[2]),
    mask_captures=(),
    sites=(0, 1),
) -> (float32[1, 2, 64, 16], float32[1, 2, 64, 16], float32[1, 2, 64, 16], float32[2])

def flexhop_score1(score, b, h, q_idx, kv_idx, capture_0):
    index = aten.index.Tensor(capture_0, [h])
    sub = aten.sub.Tensor(q_idx, kv_idx)
    mul = aten.mul.Tensor(index, sub)
    sub_1 = aten.sub.Tensor(score, mul)
    return sub_1

def flexhop_joint0(score, b, h, q_idx, kv_idx, grad_score, capture_0):
    sub = aten.sub.Tensor(q_idx, kv_idx)
    neg = aten.neg.default(grad_score)
    mul = aten.mul.Tensor(neg, sub)
    return [grad_score, mul, h]

def flexhop_mask1(b, h, q_idx, kv_idx):
    new_ones = aten.new_ones.default(b, [], dtype=torch.bool, pin_memory=False)
    return new_ones
""",
        )
