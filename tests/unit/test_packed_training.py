"""The example that packs documents and trains: one graph, and a loss that falls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.programs import INDUCTOR, python

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))


def test_packs_are_full_and_speeches_are_kept_apart():
    import packed_training as example

    settings = example.Settings("cpu", 500, 8, 16, 2, 1, 1)
    speeches = [torch.arange(start, start + 60 + start) for start in (0, 7, 30)]
    for seed in range(20):
        torch.manual_seed(seed)
        pack = example.pack(speeches, settings)
        assert pack.inputs.shape == pack.targets.shape == (500,)
        assert pack.offsets.shape == (9,) and pack.offsets[-1] == 500
        assert int(pack.lengths.sum()) == 500
        ends = pack.offsets[1:].long() - 1
        assert (pack.targets[ends] == -100).all()
        inside = pack.targets != -100
        assert torch.equal(pack.targets[inside], pack.inputs.roll(-1)[inside])


@pytest.mark.slow
def test_the_loss_falls():
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [python(*INDUCTOR), str(ROOT / "examples" / "packed_training.py")]
    done = subprocess.run(
        [*command, "--device", "cpu", "--steps", "12"],
        capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "times as many if padded" in done.stdout
