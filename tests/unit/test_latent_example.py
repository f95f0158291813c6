"""The example of latent attention: decoding from latent vectors is the function that trains."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_decoding_is_the_function_that_trains(capsys: pytest.CaptureFixture[str]) -> None:
    import latent_attention as example

    torch.manual_seed(0)
    layer = example.LatentAttention(dataclasses.replace(example.ON_CPU, length=17, steps=6))
    losses = example.train(layer, "cpu", compiled=False)
    assert losses[-1] < losses[0]
    assert example.compare(layer, "cpu", compiled=False) < 1e-5
    assert "has 576 numbers instead of 1280" in capsys.readouterr().out
