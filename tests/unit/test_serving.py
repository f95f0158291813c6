"""The serving example: every way of generating gives the same tokens."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexhop.cache import paged
from tests.programs import INDUCTOR, python

ROOT = Path(__file__).resolve().parents[2]


class OnDevice(TorchDispatchMode):
    """Refuse operators that read or make tensors elsewhere than on the meta device.

    Reading a value from that device, or a shape that depends on one, fails by itself.
    """

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += 1
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            assert not isinstance(leaf, torch.Tensor) or leaf.is_meta, func
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_captured_step_reads_nothing_on_the_host(dtype, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import serving
    import serving_caches

    model = serving_caches.Model().to("meta")
    settings = serving_caches.Settings(model, "meta", dtype, is_compiled=False)
    cache = serving_caches.Pages(settings, 16, 2)
    cache.flex = lambda query, *rest, **named: torch.empty_like(query)  # a kernel
    cache.admit(0, 40)
    engine = serving.Engine(settings, cache, 2)
    monkeypatch.setattr(paged, "_is_capturing", lambda tensor: True)
    with torch.no_grad(), OnDevice() as watch:
        engine._step()
    assert watch.count > 100
    monkeypatch.setattr(paged, "_is_capturing", lambda tensor: False)
    with torch.no_grad(), OnDevice(), pytest.raises((NotImplementedError, RuntimeError)):
        engine._step()  # the check of positions, which is left out of graphs, would wait


@pytest.mark.slow
@pytest.mark.parametrize("cache", [[], ["--fp8"]], ids=["fp32", "fp8"])
def test_all_ways_of_generating_agree(cache):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    arguments = ["--requests", "4", "--slots", "2", "--pages", "16", *cache]
    done = subprocess.run(
        [python(*INDUCTOR), str(ROOT / "examples" / "serving.py"), *arguments],
        capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r" tokens/s$", done.stdout, re.M)) == 4
    assert "up to 2 requests shared 16 pages" in done.stdout  # others waited
    assert int(re.findall(r"(\d+) chunks", done.stdout)[0]) > 4  # prompts came in parts
    assert done.stdout.endswith("all the same\n")
    assert ("float8_e4m3fn" in done.stdout) == bool(cache)
