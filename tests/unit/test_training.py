"""The training example: the same losses with flexhop and SDPA, and after a checkpoint."""

import dataclasses
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning", "ignore::UserWarning")
def test_losses_are_equal_and_training_goes_on(tmp_path: Path) -> None:
    import training as example

    sizes = {"length": 190, "batch": 2, "width": 32, "heads": 4, "kv_heads": 2, "layers": 2}
    settings = example.Settings("flexhop", "cpu", **sizes, steps=4, compiled=False)
    losses = example.train(settings)
    wanted = example.train(dataclasses.replace(settings, attention="sdpa"))
    assert losses == pytest.approx(wanted, rel=1e-4)
    assert losses[-1] < losses[0]
    path = tmp_path / "run.pt"
    halves = [
        example.train(dataclasses.replace(settings, steps=steps), path) for steps in (2, 4, 4)
    ]
    assert halves[0] + halves[1] == pytest.approx(losses, rel=1e-6)
    assert halves[2] == []
