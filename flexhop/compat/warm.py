"""Inductor's workers: import the modules that Gluon kernels need, before the first compilation.

A worker's first compilation starts with imports and with building Triton's driver interface: 0.3 s
on top of a kernel that takes two. Jobs rotate, so nearly every kernel of a first call meets a
worker that has never compiled. Here all workers import while Dynamo traces the graph. Inductor
ends workers that were idle for a minute, hence once every half minute. Names are the same in torch
2.11 to 2.15.
"""

from __future__ import annotations

import gc
import os
import time
from importlib import import_module

import torch
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

from flexhop.compat import launcher

__all__ = ["register_patterns", "start_workers", "warm_workers"]

_NEEDED = (
    "triton.compiler.code_generator",
    "torch._inductor.runtime.triton_heuristics",
    "flexhop.compat.gluon_runtime",
)
_last: list[float] = []  # when workers were last warmed


def start_workers() -> None:
    """Start Inductor's workers if they do not run; this returns before they do.

    Meanwhile, this process does what it would do for its first kernel: half a second of reading
    Triton's files, which are part of every cache key, a quarter for the patterns that Inductor
    looks for in every graph, and imports.
    """
    if get_compile_threads() <= 1:
        return
    AsyncCompile.use_process_pool()
    if HAS_TRITON:
        triton_key()
        for module in _NEEDED:
            import_module(module)
    if torch.cuda.is_available():
        register_patterns(torch.device("cuda", torch.cuda.current_device()))


def register_patterns(device: torch.device) -> None:
    """Register Inductor's patterns for graphs on a device; later calls find them registered."""
    from torch._inductor.fx_passes import joint_graph, post_grad  # after the workers have begun

    joint_graph.lazy_init(device)  # by position: the arguments are the key of a cache
    post_grad.lazy_init()


def warm_workers(*modules: str) -> None:
    """Make all workers import a kernel's imports, and `modules`; does nothing without workers."""
    if get_compile_threads() <= 1:
        return
    now = time.monotonic()
    if _last and now - _last[-1] < config.quiesce_async_compile_time / 2:
        return
    _last[:] = [now]
    # As Inductor sets it with its first kernel: workers look there, too.
    os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(torch.cuda.current_device()))
    launcher.build_driver()
    AsyncCompile.use_process_pool()  # checks whether workers exist, and must come first
    for _ in range(get_compile_threads()):
        AsyncCompile.process_pool().submit(prepare_worker, modules)


def prepare_worker(modules: tuple[str, ...]) -> None:
    """Import in a worker, then freeze its garbage collector.

    Otherwise its first kernel triggered a collection of all of PyTorch's objects: 0.15 s.
    """
    for module in (*_NEEDED, *modules):
        import_module(module)
    gc.freeze()
