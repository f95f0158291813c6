"""Inductor on a CPU: what reads sums waits until they are added."""

from __future__ import annotations

import torch
from torch._inductor import config

import flexhop  # noqa: F401  # repairs it


def test_readers_wait_for_additions():
    """They read zeros. Inductor's graph cache would hide both the fault and its mend."""

    def call(x, y):
        large = y @ x  # read early and late, so that another order saves memory
        values = (x * large.mean()) @ y
        places = torch.arange(100)
        sums = torch.zeros(4, 8).index_put(
            (places[:, None] % 4, places % 8), values, accumulate=True
        )
        once, part = sums.sigmoid(), large[:4, :8]  # one loop of 32; its readers have two loops
        return once * part, once + part, once - part, once / part

    x, y = torch.rand(100, 100) / 100, torch.rand(100, 100)
    with config.patch(fx_graph_cache=False):
        found = torch.compile(call)(x, y)
    torch.testing.assert_close(found, call(x, y))
