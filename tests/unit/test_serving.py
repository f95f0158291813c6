"""The serving example: with and without caches, the same tokens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_all_ways_of_generating_agree():
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "serving.py"), "--requests", "5"],
        capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "all tokens are the same" in done.stdout
    assert "up to 4 requests shared" in done.stdout
