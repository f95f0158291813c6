"""The example that trains over ranks: one is killed, and the run goes on from its checkpoint."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.programs import INDUCTOR, python

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_training_goes_on_after_a_rank_is_killed(tmp_path):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    launch = "-m torch.distributed.run --standalone --nproc_per_node=2 --max-restarts=1".split()
    example = [str(ROOT / "examples" / "long_context.py"), "--device", "cpu", "--steps", "9"]
    done = subprocess.run(
        # Rank 1 is in step 7 when rank 0 is in step 6 at least, and has printed step 5.
        [python(*INDUCTOR), *launch, *example, "--folder", str(tmp_path), "--kill-rank-at", "7"],
        capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    steps = re.findall(r"step +(\d+) +loss (\d+\.\d+)", done.stdout)
    assert [int(step) for step, _ in steps] == [0, 5, 5, 8]
    # The second attempt begins with the weights that the first one had after step 4.
    assert steps[1] == steps[2]
    assert float(steps[-1][1]) < float(steps[0][1])
