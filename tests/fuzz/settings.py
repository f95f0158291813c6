"""Settings of PyTorch for thousands of compilations, none of which is used again.

Nothing here changes a kernel of flexhop.
"""

from __future__ import annotations

import gc
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config

from flexhop.offline import cubin


def compile_quickly(device: str) -> None:
    """For this process, and all problems in it."""
    # Nothing is compiled twice.
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    if device == "cuda":
        # Inductor's own kernels: one configuration each, instead of a race of several.
        torch._inductor.config.triton.autotune_pointwise = False
    # To count spills, machine code is taken apart: an eighth of the time, and nobody asks here.
    mock.patch.object(cubin, "_sass", lambda binary: "").start()
    # Graphs make millions of objects, and most of them live until the problem ends.
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
