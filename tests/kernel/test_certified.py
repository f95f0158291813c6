"""FLEXHOP_VERIFY: compiled calls that check themselves."""

import pytest
import torch

import flexhop
from flexhop import PageTable, create_block_mask, errors, flex_attention
from flexhop.ops.verification import certified, checking

LENGTHS = (67, 45)


def operands():
    torch.manual_seed(0)
    sizes = ((4, LENGTHS[0]), (2, LENGTHS[1]), (2, LENGTHS[1]))
    query, key, value = (torch.randn(2, *size, 24) for size in sizes)
    return [t.requires_grad_() for t in (query, key, value, torch.rand(4) * 0.1)]


@torch.compile
def train(query, key, value, slopes, blocks):
    out, aux = flex_attention(
        query, key, value, score_mod=lambda s, b, h, i, j: s + slopes[h] * (i - j),
        block_mask=blocks, enable_gqa=True, dropout_p=0.3,
        return_aux=flexhop.AuxRequest(lse=True, max_scores=True),
    )  # fmt: skip
    return out.sum() + aux.lse[:, :, 2:].sum()


def given():
    blocks = create_block_mask(
        lambda b, h, i, j: i >= j + 2, None, None, *LENGTHS, device="cpu", BLOCK_SIZE=16
    )
    return *operands(), blocks


def check_with_another_scale(args, results, sample):
    return checking.check_results(args._replace(scale=args.scale * 1.1), results, sample)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("FLEXHOP_VERIFY", "1")
    monkeypatch.setenv("FLEXHOP_VERIFY_DIR", str(tmp_path))
    monkeypatch.setattr(certified, "_CHECKS", certified.collections.deque())
    return tmp_path


def test_training_is_checked_and_errors_are_found(fresh, monkeypatch):
    train(*given()).backward()
    found = flexhop.verified()
    assert found.ok, str(found)
    forward, backward = found.calls
    assert {*forward.ratios} == {"out", "lse", "max_scores"}
    assert {*backward.ratios} == {"grad_query", "grad_key", "grad_value", "grad_capture_0"}

    # A NaN is no error, but it has a source.
    values = given()
    values[1].data[1, 1, 5, 3] = float("nan")
    with pytest.warns(errors.NanWarning, match=r"out\[.*comes from key\[.*1, 5\]"):
        train(*values)
    assert flexhop.verified().ok

    # As if a kernel had used another scale.
    monkeypatch.setattr(certified, "check_results", check_with_another_scale)
    monkeypatch.setenv("FLEXHOP_STRICT", "0")
    with pytest.warns(errors.WrongResultWarning, match="WRONG"):
        train(*given())
    wrong = next(call for call in flexhop.verified().calls if not call.ok)
    saved = torch.load(wrong.reproducer, weights_only=False)
    assert wrong.reproducer.parent == fresh and saved["ratios"] == wrong.ratios
    assert saved["operands"]["query"].shape == (2, 4, 67, 24) and saved["mods"]["score_mod"]
    monkeypatch.setenv("FLEXHOP_STRICT", "1")
    with pytest.raises(errors.WrongResultError, match="WRONG"):
        train(*given())


@pytest.mark.usefixtures("fresh")
def test_a_cache_in_pages_is_checked():
    torch.manual_seed(0)
    query = torch.randn(3, 4, 1, 16, dtype=torch.bfloat16)
    key, value = (torch.randint(-9, 9, (9, 2, 8, 16), dtype=torch.int8) for _ in range(2))
    table = PageTable(
        torch.randperm(9).view(3, 3).int(), 8, torch.tensor([24, 1, 13], dtype=torch.int32)
    )

    @torch.compile
    def decode(query):
        return flex_attention(
            query, key, value, page_table=table, enable_gqa=True,
            k_mod=lambda x, b, h, j: x * 0.1 + b, v_mod=lambda x, b, h, j: x * (0.1 + h),
        )  # fmt: skip

    decode(query)
    (check,) = flexhop.verified().calls
    assert check.ok and {*check.ratios} == {"out", "lse"}, str(check)


def test_one_call_of_every_hundred_is_due():
    site = certified.Site(tuple, (), every=100, number=3)
    due = [number for number in range(5000) if site.is_due()]
    assert due[0] == 0 and [number // 100 for number in due] == list(range(50))
    assert len({number % 32 for number in due}) > 20  # 32 layers that share a site


def test_a_call_that_is_not_due_reads_nothing(monkeypatch):
    monkeypatch.setattr(certified, "_SITES", [certified.Site(tuple, (), 100, 0, due=1)])
    certified._certify(None, None, None, 0)
    assert certified._SITES[0].calls == 1


@pytest.mark.parametrize("text", ["often", "-1", "0.5"])
def test_a_wrong_number_is_refused(monkeypatch, text):
    monkeypatch.setenv("FLEXHOP_VERIFY", text)
    with pytest.raises(errors.OptionValueError, match="a number of calls"):
        flex_attention(*operands()[:3], enable_gqa=True)
