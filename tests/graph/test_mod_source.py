"""What Inductor makes of a user's functions: the text of score_mod, mask_mod and score_mod_grad.

`EXPECTTEST_ACCEPT=1 pytest tests/graph` accepts new texts.
"""

# Snapshots keep the lines of the generated text.
# ruff: noqa: E501

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor

import flexhop
from flexhop.offline import generate_code
from tests.case_inputs import make_call, make_inputs, make_loss
from tests.cases import BY_NAME
from tests.needs import needs_hopper


def _generated(name: str, grad: bool):
    case = BY_NAME[name]
    inputs = make_inputs(case)
    loss = make_loss(case, inputs) if grad else False
    return generate_code(
        make_call(case, inputs), inputs.query, inputs.key, inputs.value, grad=loss
    )


def forward_text(name: str, function: str = "score_mod") -> str:
    (kernel,) = _generated(name, grad=False).templates
    return kernel.function_text(function)


def backward_text(name: str, function: str = "score_mod_grad") -> str:
    return _generated(name, grad=True).kernel_with("grad_query_blocks").function_text(function)


@needs_hopper
def test_a_function_of_the_distance_is_read_by_hopper_kernels_alone():
    """Inductor would compute an entry again wherever it is read, if it only depends on its place;
    portable kernels are faster so."""
    query = torch.zeros(1, 2, 1024, 64, dtype=torch.bfloat16)

    def call(q, k, v, backend):
        options = flexhop.KernelOptions(backend=backend)
        mod = lambda s, b, h, q, k: s + torch.cos(0.1 * (q - k))  # noqa: E731
        return flexhop.flex_attention(q, k, v, score_mod=mod, kernel_options=options)

    for backend, is_read in (("hopper", True), ("triton", False)):
        run = functools.partial(call, backend=backend)
        (kernel,) = generate_code(run, query, query, query).templates
        text = kernel.function_text("score_mod")
        assert ("load(" in text) == is_read
        assert "int64" not in text  # twice the instructions


class ScoreMod(TestCase):
    maxDiff = None

    def test_causal_as_a_score_mod(self):
        self.assertExpectedInline(
            forward_text("score_causal"),
            """\
@triton.jit
def score_mod(arg_FULL_KV_INDICES, arg_K, arg_V, arg_FULL_KV_NUM_BLOCKS, out_ptr0, score, b, h, q_idx, kv_idx, distance=0, pairs=0):
    \"\"\"The user's score_mod, lowered by Inductor.

    distance: of the positions. pairs: what it reads of a bias of pairs. Both for kernels that have them.
    \"\"\"
    tmp0 = (q_idx)
    tmp1 = (kv_idx)
    tmp2 = tmp0 >= tmp1
    tmp3 = (score)
    tmp4 = tl.full([1], float("-inf"), tl.float32)
    tmp5 = tl.where(tmp2, tmp3, tmp4)
    result = tmp5

    return result
""",
        )

    def test_soft_cap(self):
        self.assertExpectedInline(
            forward_text("soft_cap"),
            """\
@triton.jit
def score_mod(arg_FULL_KV_INDICES, arg_K, arg_V, arg_FULL_KV_NUM_BLOCKS, out_ptr0, score, b, h, q_idx, kv_idx, distance=0, pairs=0):
    \"\"\"The user's score_mod, lowered by Inductor.

    distance: of the positions. pairs: what it reads of a bias of pairs. Both for kernels that have them.
    \"\"\"
    tmp0 = (score)
    tmp1 = tl.full([1], 0.2, tl.float32)
    tmp2 = tmp0 * tmp1
    tmp3 = libdevice.tanh(tmp2)
    tmp4 = tl.full([1], 5.0, tl.float32)
    tmp5 = tmp3 * tmp4
    result = tmp5

    return result
""",
        )

    def test_table(self):
        self.assertExpectedInline(
            forward_text("exact_table"),
            """\
@triton.jit
def score_mod(arg_Q, arg_K, arg_V, arg_MAX_SCORES, arg_KV_NUM_BLOCKS, arg_KV_INDICES, arg_FULL_KV_NUM_BLOCKS, arg_FULL_KV_INDICES, in_ptr8, out_ptr0, score, b, h, q_idx, kv_idx, distance=0, pairs=0):
    \"\"\"The user's score_mod, lowered by Inductor.

    distance: of the positions. pairs: what it reads of a bias of pairs. Both for kernels that have them.
    \"\"\"
    tmp0 = (score)
    tmp1 = (q_idx)
    tmp2 = (kv_idx)
    tmp3 = tmp1 - tmp2
    tmp4 = tl.full([1], 257, tl.int32)
    tmp5 = tmp3 + tmp4
    tmp6 = tl.full([1], 1, tl.int32)
    tmp7 = tmp5 - tmp6
    tmp8 = tl.load(in_ptr8 + tmp7)
    tmp9 = tmp0 + tmp8
    result = tmp9

    return result
""",
        )

    def test_two_step_index(self):
        self.assertExpectedInline(
            forward_text("two_step"),
            """\
@triton.jit
def score_mod(arg_FULL_KV_INDICES, arg_K, arg_V, arg_FULL_KV_NUM_BLOCKS, in_ptr4, out_ptr0, score, b, h, q_idx, kv_idx, distance=0, pairs=0):
    \"\"\"The user's score_mod, lowered by Inductor.

    distance: of the positions. pairs: what it reads of a bias of pairs. Both for kernels that have them.
    \"\"\"
    tmp0 = (score)
    tmp1 = (b)
    tmp2 = (q_idx)
    tmp3 = tl.load(in_ptr4 + tmp2 + 37*tmp1)
    tmp4 = tmp0 + tmp3
    result = tmp4

    return result
""",
        )


class MaskMod(TestCase):
    maxDiff = None

    def test_causal(self):
        self.assertExpectedInline(
            forward_text("causal", "mask_mod"),
            """\
@triton.jit
def mask_mod(arg_Q, arg_K, arg_V, arg_MAX_SCORES, arg_KV_NUM_BLOCKS, arg_KV_INDICES, arg_FULL_KV_NUM_BLOCKS, arg_FULL_KV_INDICES, out_ptr0, b, h, q_idx, kv_idx):
    \"\"\"The user's mask_mod, lowered by Inductor.\"\"\"
    tmp1 = (q_idx)
    tmp2 = (kv_idx)
    tmp3 = tmp1 >= tmp2
    result = tmp3

    return result
""",
        )

    def test_documents(self):
        self.assertExpectedInline(
            forward_text("documents", "mask_mod"),
            """\
@triton.jit
def mask_mod(arg_Q, arg_K, arg_V, arg_MAX_SCORES, arg_KV_NUM_BLOCKS, arg_KV_INDICES, arg_FULL_KV_NUM_BLOCKS, arg_FULL_KV_INDICES, in_ptr8, out_ptr0, b, h, q_idx, kv_idx):
    \"\"\"The user's mask_mod, lowered by Inductor.\"\"\"
    tmp1 = (q_idx)
    tmp2 = tl.load(in_ptr8 + tmp1)
    tmp3 = (kv_idx)
    tmp4 = tl.load(in_ptr8 + tmp3)
    tmp5 = tmp2 == tmp4
    result = tmp5

    return result
""",
        )

    def test_window_and_causal(self):
        self.assertExpectedInline(
            forward_text("window_and", "mask_mod"),
            """\
@triton.jit
def mask_mod(arg_Q, arg_K, arg_V, arg_MAX_SCORES, arg_KV_NUM_BLOCKS, arg_KV_INDICES, arg_FULL_KV_NUM_BLOCKS, arg_FULL_KV_INDICES, out_ptr0, b, h, q_idx, kv_idx):
    \"\"\"The user's mask_mod, lowered by Inductor.\"\"\"
    tmp1 = (q_idx)
    tmp2 = (kv_idx)
    tmp3 = tmp1 >= tmp2
    tmp4 = tl.full([1], -7, tl.int32)
    tmp5 = tmp1 + tmp4
    tmp6 = tmp2 >= tmp5
    tmp7 = tmp3 & tmp6
    result = tmp7

    return result
""",
        )


class ScoreModGrad(TestCase):
    maxDiff = None

    def test_squared(self):
        self.assertExpectedInline(
            backward_text("squared"),
            """\
@triton.jit
def score_mod_grad(arg_FULL_KV_INDICES, arg_K, arg_V, arg_LSE, arg_FULL_KV_NUM_BLOCKS, arg_DO, out_ptr0, score, b, h, q_idx, kv_idx, grad_score):
    \"\"\"Gradient of the user's score_mod for its score, times grad_score.\"\"\"
    tmp3 = (grad_score)
    tmp4 = (score)
    tmp5 = tmp3 * tmp4
    tmp6 = tmp5 + tmp5
    result = tmp6

    return result
""",
        )

    def test_soft_cap(self):
        self.assertExpectedInline(
            backward_text("soft_cap"),
            """\
@triton.jit
def score_mod_grad(arg_FULL_KV_INDICES, arg_K, arg_V, arg_LSE, arg_FULL_KV_NUM_BLOCKS, arg_DO, out_ptr0, score, b, h, q_idx, kv_idx, grad_score):
    \"\"\"Gradient of the user's score_mod for its score, times grad_score.\"\"\"
    tmp7 = (grad_score)
    tmp8 = tl.full([1], 5.0, tl.float32)
    tmp9 = tmp7 * tmp8
    tmp10 = tl.full([1], 1.0, tl.float32)
    tmp11 = (score)
    tmp12 = tl.full([1], 0.2, tl.float32)
    tmp13 = tmp11 * tmp12
    tmp14 = libdevice.tanh(tmp13)
    tmp15 = tmp14 * tmp14
    tmp16 = tmp10 - tmp15
    tmp17 = tmp9 * tmp16
    tmp18 = tmp17 * tmp12
    result = tmp18

    return result
""",
        )

    def test_learned_table_adds_to_its_entries(self):
        self.assertExpectedInline(
            backward_text("learned_table", "scatter_captured_grads"),
            """\
@triton.jit
def scatter_captured_grads(arg_Q, arg_K, arg_V, arg_LSE, arg_DELTA, arg_DO, arg_KV_NUM_BLOCKS, arg_KV_INDICES, arg_FULL_KV_NUM_BLOCKS, arg_FULL_KV_INDICES, in_ptr10, in_ptr11, out_ptr0, score, b, h, q_idx, kv_idx, grad_score, keep, in_range, CHECKED: tl.constexpr):
    \"\"\"Add the gradients of the captured tensors of one [BLOCK_M, BLOCK_N] tile where they were read.

    keep: which weights are not 0. CHECKED: whether queries and keys that are not in_range may occur.
    \"\"\"
    tmp12 = (grad_score)
    grad_0 = tmp12

    tmp13 = (q_idx)
    tmp14 = (kv_idx)
    tmp15 = tmp13 - tmp14
    tmp16 = tl.full([1], 37, tl.int32)
    tmp17 = tmp15 + tmp16
    index_0_0 = tmp17

    grad_0 = tl.where(keep, grad_0, 0.0)
    tl.atomic_add(in_ptr11 + (0 + index_0_0 * 1 + tl.zeros_like(keep).to(tl.int32)), grad_0.to(tl.float64), mask=keep, sem='relaxed')
""",
        )

    def test_learned_query_bias_adds_a_row_at_once(self):
        self.assertExpectedInline(
            backward_text("learned_factor", "scatter_captured_grads"),
            """\
@triton.jit
def scatter_captured_grads(arg_FULL_KV_INDICES, arg_K, arg_V, arg_LSE, arg_FULL_KV_NUM_BLOCKS, arg_DO, in_ptr6, in_ptr7, out_ptr0, score, b, h, q_idx, kv_idx, grad_score, keep, in_range, sums, CHECKED: tl.constexpr):
    \"\"\"Add the gradients of the captured tensors of one [BLOCK_M, BLOCK_N] tile where they were read.

    keep: which weights are not 0. CHECKED: whether queries and keys that are not in_range may occur.
    \"\"\"
    tmp9 = (grad_score)
    tmp10 = (score)
    tmp11 = tmp9 * tmp10
    grad_0 = tmp11

    tmp12 = (q_idx)
    index_0_0 = tmp12

    grad_0 = tl.where(keep, grad_0, 0.0)
    grad_0_sum = tl.sum(grad_0, 1, keep_dims=True).to(tl.float64)
    return (sums[0] + grad_0_sum, )
""",
        )


class LongExpressions(TestCase):
    def test_a_gradient_that_is_broadcast_needs_no_buffer(self):
        """Inductor would keep an expression of over 30 operations before it broadcasts it."""
        points = torch.randn(64, 3, requires_grad=True)

        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            s = F.hardtanh(s, -1.5, 2.5) - 0.1 * ((points[q] - points[k]) ** 2).sum(-1)
            return torch.sign(s) * torch.sqrt(s.abs() + 1.0)

        self._assert_numbers_of_points_are_added(score_mod)

    def _assert_numbers_of_points_are_added(self, score_mod: Callable[..., Tensor]) -> None:
        inputs = [torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3)]
        generated = generate_code(
            lambda q, k, v: flexhop.flex_attention(q, k, v, score_mod=score_mod),
            *inputs, grad=True,
        )  # fmt: skip
        for part in ("grad_query_blocks", "grad_key_value_blocks"):
            added = generated.kernel_with(part).function_text("add_row_sums")
            self.assertEqual(added.count("tl.atomic_add"), 3)  # the numbers of a row's point

    def test_rows_of_numbers_need_no_buffer(self):
        """Inductor would look for the buffers that are concatenated, or make one."""

        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s - torch.stack([q - k, k - q, 2 * k - q]).max()

        inputs = [torch.randn(1, 2, 64, 16) for _ in range(3)]
        generated = generate_code(
            lambda q, k, v: flexhop.flex_attention(q, k, v, score_mod=score_mod), *inputs
        )
        text = generated.kernel_with("score_mod").function_text("score_mod")
        self.assertEqual(text.count("tl.maximum("), 2)
