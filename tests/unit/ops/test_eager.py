"""The specification itself: against dense attention written out, in memory, and in manners."""

import contextlib
import math
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flexhop
from flexhop.errors import EagerWarning
from flexhop.ops import dispatch, eager
from tests.case_inputs import copy_inputs, make_inputs
from tests.cases import BY_NAME, CASES
from tests.judging import reference_outcome, run

# Everything else is exercised as the oracle of the kernel tiers.
NAMES = [
    "none", "none_lengths_1", "none_longer_query", "negative_scale", "zero_scale", "lse_gradient",
    "trigonometric", "causal_block_20", "empty_and", "empty_rows_half", "empty_rows_first",
    "head_dependent", "batch_dependent", "documents_two_step", "captured_matrix", "listed",
    "listed_full", "listed_causal", "two_step", "which", "one_element", "unrolled_distance",
    "learned_table", "learned_4d", "learned_symmetric", "learned_indirect", "learned_scalar",
    "learned_empty_rows", "learned_grouped", "learned_nested", "head_dim_1", "head_dims_24_94",
    "group_3_of_2", "kv_batch_shared_mask_per_batch", "layout_column", "layout_expanded",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerWarning)
        yield


def _double(name: str):
    case = BY_NAME[name]
    return case, copy_inputs(case, make_inputs(case), torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_equals_dense_autograd_in_double_precision(name, monkeypatch):
    case, inputs = _double(name)
    dense = reference_outcome(case, inputs)
    # Chunks of 16 queries; the kernel tiers run the specification in one chunk.
    monkeypatch.setattr(eager, "CHUNK_ELEMENTS", 1)
    found = run(case, copy_inputs(case, inputs))
    for key, value in found.tensors.items():
        torch.testing.assert_close(value, dense.tensors[key], msg=lambda m, key=key: f"{key}: {m}")


def test_every_case_has_a_unique_name_and_a_learned_capture_that_exists():
    for case in CASES:
        captures = make_inputs(case).captures
        assert all(getattr(captures, name).requires_grad for name in case.learned)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() // leaf.element_size()
                 for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]  # fmt: skip
        self.largest = max([self.largest, *sizes])
        return result


@pytest.mark.parametrize("grad", [False, True])
def test_memory_stays_below_the_square_of_the_length(grad, monkeypatch):
    monkeypatch.setattr(eager, "CHUNK_ELEMENTS", 1 << 14)
    length = 700
    tensors = [torch.randn(1, 1, length, 8, requires_grad=grad) for _ in range(3)]
    mask = flexhop.create_block_mask(flexhop.masks.causal, None, None, length, length, "cpu")
    with LargestTensor() as mode:
        out = flexhop.flex_attention(*tensors, lambda s, b, h, q, k: s * 2 + (q - k), mask)
        if grad:
            out.sum().backward()
    assert mode.largest < length * length // 8


def test_prints_and_stops_in_mods_work(capsys):
    seen = []

    def score_mod(score, b, h, q_idx, kv_idx):
        print("score_mod was here", score.dtype)
        seen.append(q_idx)
        return score

    tensors = [torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3)]
    flexhop.flex_attention(*tensors, score_mod).sum().backward()
    assert "score_mod was here torch.float32" in capsys.readouterr().out
    assert seen
    with pytest.raises(ZeroDivisionError):
        flexhop.flex_attention(*tensors, lambda s, b, h, q, k: s * (1 // 0))


def test_one_warning_per_process_names_torch_compile():
    tensors = [torch.randn(1, 1, 4, 8) for _ in range(3)]
    dispatch.reset_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flexhop.flex_attention(*tensors)
        flexhop.flex_attention(*tensors)
    found = [w for w in caught if issubclass(w.category, EagerWarning)]
    assert len(found) == 1
    assert "torch.compile" in str(found[0].message)
    assert found[0].filename == __file__


def test_never_compiles(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("eager compiled something")

    monkeypatch.setattr(torch, "compile", refuse)
    tensors = [torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3)]
    flexhop.flex_attention(*tensors).sum().backward()


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_each_input_alone_may_require_a_gradient(wanted):
    full = [torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3)]
    flexhop.flex_attention(*full).square().sum().backward()
    some = [t.detach().requires_grad_(w) for t, w in zip(full, wanted, strict=True)]
    flexhop.flex_attention(*some).square().sum().backward()
    for tensor, reference, want in zip(some, full, wanted, strict=True):
        assert (tensor.grad is not None) == want
        if want:
            torch.testing.assert_close(tensor.grad, reference.grad)


def test_only_a_capture_requires_a_gradient():
    bias = torch.randn(2, requires_grad=True)
    tensors = [torch.randn(1, 2, 9, 8) for _ in range(3)]
    out = flexhop.flex_attention(*tensors, lambda s, b, h, q, k: s * bias[h])
    out.square().sum().backward()
    assert bias.grad is not None and bias.grad.abs().sum() > 0


def test_backward_twice_and_inference_mode():
    tensors = [torch.randn(1, 1, 5, 8, requires_grad=True) for _ in range(3)]
    out = flexhop.flex_attention(*tensors).sum()
    out.backward(retain_graph=True)
    first = tensors[0].grad.clone()
    out.backward()
    torch.testing.assert_close(tensors[0].grad, 2 * first)
    with torch.inference_mode():
        assert not flexhop.flex_attention(*tensors).requires_grad


def test_gradcheck_with_a_captured_bias_and_lse():
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bias = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)

    def attention(query, key, value, bias):
        out, aux = flexhop.flex_attention(
            query, key, value, lambda s, b, h, q, k: torch.sin(s) + bias[h, q - k + 4],
            return_aux=flexhop.AuxRequest(lse=True),
        )  # fmt: skip
        return out, aux.lse

    assert torch.autograd.gradcheck(attention, (*leaves, bias), fast_mode=True)


def test_dense_by_hand():
    """Four numbers that can be checked on paper."""
    query = torch.tensor([[[[1.0], [0.0]]]])
    key, value = torch.tensor([[[[0.0], [math.log(3.0)]]]]), torch.tensor([[[[0.0], [4.0]]]])
    out = flexhop.flex_attention(query, key, value, scale=1.0)
    torch.testing.assert_close(out.flatten(), torch.tensor([3.0, 2.0]))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_without_data_are_one_chunk(device: str):
    """With data, this call has 1,024 chunks."""
    modes = {"cpu": FakeTensorMode(), "meta": contextlib.nullcontext()}
    count = 0

    def score_mod(score, b, h, q_idx, kv_idx):
        nonlocal count
        count += 1
        return score + slopes[h] * (kv_idx - q_idx)

    with modes[device]:
        shape = (4, 16, 8192, 64)
        inputs = [torch.empty(shape, device=device, requires_grad=True) for _ in range(3)]
        slopes = torch.empty(16, device=device, requires_grad=True)
        out = flexhop.flex_attention(*inputs, score_mod)
        out.sum().backward()
    assert out.shape == shape and count <= 2  # one forward, one for the backward pass
    assert [t.grad.shape for t in (*inputs, slopes)] == [t.shape for t in (*inputs, slopes)]
