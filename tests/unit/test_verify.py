"""flexhop.verify: right calls pass, wrong ones are found and written down."""

import pytest
import torch

import flexhop
from flexhop import KernelOptions, create_block_mask, flex_attention, varlen_attention
from flexhop.ops import forward
from tests.unit.ops.support import quiet

pytestmark = quiet
LENGTHS = (67, 45)
BIAS = torch.tensor([0.0, 1.0, float("nan"), 0.0])


def operands(dtype=torch.float32, heads=(4, 2), width=24):
    torch.manual_seed(0)
    sizes = [(2, heads[0], LENGTHS[0]), (2, heads[1], LENGTHS[1]), (2, heads[1], LENGTHS[1])]
    return [torch.randn(*size, width, dtype=dtype) for size in sizes]


def call(q, k, v, bias, **keywords):
    blocks = create_block_mask(
        lambda b, h, i, j: i >= j + 2, None, None, *LENGTHS, device="cpu", BLOCK_SIZE=16
    )
    return flex_attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h] * (i - j), block_mask=blocks,
        enable_gqa=True, **keywords,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_right(dtype):
    found = flexhop.verify(call, *operands(dtype), torch.rand(4) * 0.1, backend="aot_eager")
    assert len(found.calls) == 1 and found.ok, str(found)
    assert set(found.calls[0].ratios) == {"out", "lse", "grad_query", "grad_key", "grad_value"}


def test_several_calls_with_dropout():
    def model(q, k, v, bias):
        out = call(q, k, v, bias, dropout_p=0.3)
        return flex_attention(out, k, v, enable_gqa=True)

    found = flexhop.verify(model, *operands(), torch.rand(4) * 0.1, backend="aot_eager")
    assert len(found.calls) == 2 and found.ok, str(found)


def test_packed_and_learned():
    def model(q, k, v, bias):
        packed = (t.transpose(1, 2).flatten(0, 1) for t in (q[:, :, :45], k, v))
        starts = torch.tensor([0, 40, 90], dtype=torch.int32)
        return varlen_attention(
            *packed, starts, enable_gqa=True, score_mod=lambda s, b, h, i, j: s * bias[h]
        )

    bias = torch.rand(4).requires_grad_()
    found = flexhop.verify(model, *operands(), bias, backend="aot_eager")
    (check,) = found.calls
    assert check.ok and "grad_capture_0" in check.ratios, str(found)


def test_caches():
    q, k, v = operands(torch.bfloat16)
    found = flexhop.verify(
        flex_attention, q, k.half(), v.half(), enable_gqa=True, backend="aot_eager",
        k_mod=lambda x, b, h, j: x * 0.5, v_mod=lambda x, b, h, j: x + h,
    )  # fmt: skip
    (check,) = found.calls
    assert check.ok and {*check.ratios} == {"out", "lse"}, str(found)


@pytest.mark.parametrize("field", [0, 1])
def test_a_wrong_row_is_found_and_written(monkeypatch, tmp_path, field):
    plain = forward.attend

    def wrong(args):
        results = list(plain(args))
        results[field] = results[field].clone()
        results[field][1, 2, -1] += 0.01
        return tuple(results)

    monkeypatch.setattr(forward, "attend", wrong)
    found = flexhop.verify(
        call, *operands(), torch.rand(4) * 0.1, backend="aot_eager", folder=tmp_path
    )
    (check,) = found.calls
    name = ("out", "lse")[field]
    assert not found.ok and check.ratios[name] > 1
    assert check.worst[name] == (1, 2, LENGTHS[0] - 1)
    saved = torch.load(check.reproducer, weights_only=False)
    assert saved["ratios"] == check.ratios and "bias" in saved["mods"]["score_mod"]
    assert saved["operands"]["query"].shape == (2, 4, LENGTHS[0], 24)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_where_a_nan_comes_from(name):
    tensors = operands()
    tensors[("query", "key", "value").index(name)][1, 1, 5, 3] = float("nan")
    found = flexhop.verify(flex_attention, *tensors, enable_gqa=True, backend="aot_eager")
    assert found.ok and f"{name}[1, 1, 5]" in found.calls[0].origin


@pytest.mark.parametrize(
    ("mod", "words"),
    [
        (lambda s, b, h, i, j: torch.where((i == 7) & (j == 3), s.abs() / 0, s), "= [0, 0, 7, 3]"),
        (lambda s, b, h, i, j: s + BIAS[h], "captured tensors that are not finite: 0"),
        (lambda s, b, h, i, j: torch.sqrt(s - s) + s, "the derivative of score_mod"),
    ],
)
def test_nans_of_mods(mod, words):
    found = flexhop.verify(
        flex_attention, *operands(), score_mod=mod, enable_gqa=True, backend="aot_eager"
    )
    assert words in found.calls[0].origin


def test_options_pass_and_compiled_functions_are_unwrapped():
    run = torch.compile(flex_attention)
    found = flexhop.verify(
        run, *operands(), enable_gqa=True, backend="aot_eager",
        kernel_options=KernelOptions(deterministic=True),
    )  # fmt: skip
    assert found.ok and str(found).startswith("correct: [2, 4, 67, 24]")
    assert (
        str(flexhop.verify(torch.neg, torch.ones(2)))
        == "The function made no flex_attention call."
    )
