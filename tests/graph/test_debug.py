"""FLEXHOP_DEBUG prints each stage while a graph is traced and lowered."""

from collections.abc import Iterator

import pytest
import torch

import flexhop
from flexhop.masks import causal
from flexhop.offline import generate_code
from flexhop.options import debug


@pytest.fixture
def all_stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(debug.VARIABLE, ",".join(debug.STAGES))
    debug.reread()
    yield
    monkeypatch.delenv(debug.VARIABLE)
    debug.reread()


@pytest.mark.usefixtures("all_stages")
def test_every_stage_is_printed(capsys: pytest.CaptureFixture[str]):
    slopes = torch.rand(2, requires_grad=True)
    mask = flexhop.create_block_mask(causal, None, None, 64, 64, BLOCK_SIZE=32, device="cpu")
    operands = [torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3)]

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    def attend(query, key, value):
        return flexhop.flex_attention(query, key, value, score_mod=alibi, block_mask=mask)

    generate_code(attend, *operands, grad=True)
    captured = capsys.readouterr()
    titles = [line for line in captured.err.splitlines() if line.startswith("--- flexhop ")]
    for title in ("graph: score", "graph: mask", "graph: joint"):
        assert f"--- flexhop {title}" in titles
    for title in ("problem: forward", "problem: backward"):
        assert titles.count(f"--- flexhop {title}") == 1
    for kernel in ("forward", "grad_query", "grad_key_value"):
        assert titles.count(f"--- flexhop kernel: {kernel}") == 1
        # The kernel for query has one more part: it sums the gradient of the slopes.
        part = "_row_sums" if kernel == "grad_query" else ""
        assert f"--- flexhop source: flexhop_{kernel}{part}" in titles
    assert "ge = aten.ge.Tensor(q_idx, kv_idx)" in captured.err
    assert "query_len = 64" in captured.err
    assert "reason: table for sm_90" in captured.err
    assert "def score_mod(" in captured.err
