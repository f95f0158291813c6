"""The serving example: every way of generating gives the same tokens."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("cache", [[], ["--fp8"]], ids=["fp32", "fp8"])
def test_all_ways_of_generating_agree(cache):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    arguments = ["--requests", "4", "--slots", "2", "--pages", "16", *cache]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "serving.py"), *arguments],
        capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r" tokens/s$", done.stdout, re.M)) == 4
    assert "up to 2 requests shared 16 pages" in done.stdout  # others waited
    assert int(re.findall(r"(\d+) chunks", done.stdout)[0]) > 4  # prompts came in parts
    assert done.stdout.endswith("all the same\n")
    assert ("float8_e4m3fn" in done.stdout) == bool(cache)
