"""Inductor's workers: import the modules that Gluon kernels need, before the first compilation.

A worker's first compilation starts with imports and with building Triton's driver interface: 0.3 s
on top of a kernel that takes two. Jobs rotate, so nearly every kernel of a first call meets a
worker that has never compiled. Hence their common parent imports once, before it forks them. If
Inductor has started them already, each imports while Dynamo traces the graph. Inductor ends
workers that were idle for a minute, hence once every half minute. Names are the same in torch 2.11
to 2.15.
"""

from __future__ import annotations

import os
import time
from functools import partial
from importlib import import_module

import torch
from torch._inductor import async_compile, config
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codegen.common import init_backend_registration
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

from flexhop.compat.kernels import launcher
from flexhop.compat.workers import parent as worker
from flexhop.compat.workers.early import NEEDED

__all__ = ["register_patterns", "start_pool", "start_workers", "warm_workers"]

# What sympy imports for its first sum.
_SYMBOLS = (
    "sympy.calculus.accumulationbounds",
    "sympy.matrices.expressions",
    "sympy.tensor.tensor",
)

_last: list[float] = []  # when workers were last warmed


def start_workers() -> None:
    """Start Inductor's workers if they do not run; this returns before they do.

    Meanwhile, this process does what it would do for its first kernel: half a second of reading
    Triton's files, which are part of every cache key, a quarter for the patterns that Inductor
    looks for in every graph, and imports, which take a fifth to a half in a first graph.
    """
    if not start_pool():
        return
    init_backend_registration()
    for module in _SYMBOLS:
        import_module(module)
    if HAS_TRITON:
        triton_key()
        for module in NEEDED:
            import_module(module)
    if torch.cuda.is_available():
        register_patterns(torch.device("cuda", torch.cuda.current_device()))


def start_pool(*modules: str) -> bool:
    """Start Inductor's workers if they do not run, and may; whether they may.

    modules: what kernels import besides NEEDED.
    """
    if not _may_start():
        return False
    if not _has_started():
        _create_pool(modules)
    AsyncCompile.use_process_pool()  # asks whether it is ready, behind nothing else
    return True


def _may_start() -> bool:
    # Since 2.13, daemonic processes have none.
    allowed = getattr(async_compile, "_process_pool_allowed", lambda: True)
    return get_compile_threads() > 1 and bool(allowed())


def _has_started() -> bool:
    return AsyncCompile.process_pool.cache_info().currsize > 0


def _create_pool(modules: tuple[str, ...]) -> None:
    """Have Inductor create its pool; the workers' parent imports before it forks them."""
    pool_class, pickler = async_compile.SubprocPool, worker.Pickler()
    os.environ[worker.MODULES] = ",".join((*NEEDED, *modules))
    async_compile.SubprocPool = partial(pool_class, pickler=pickler)  # type: ignore[misc]
    try:
        AsyncCompile.process_pool()
    finally:
        async_compile.SubprocPool = pool_class  # type: ignore[misc]
        os.environ.pop(worker.MODULES, None)


def register_patterns(device: torch.device) -> None:
    """Register Inductor's patterns for graphs on a device; later calls find them registered."""
    from torch._inductor.fx_passes import joint_graph, post_grad  # after the workers have begun

    joint_graph.lazy_init(device)  # by position: the arguments are the key of a cache
    post_grad.lazy_init()


def warm_workers(*modules: str) -> None:
    """Make all workers import a kernel's imports, and `modules`; does nothing without workers."""
    if not _may_start():
        return
    now = time.monotonic()
    if _last and now - _last[-1] < config.quiesce_async_compile_time / 2:
        return
    _last[:] = [now]
    # As Inductor sets it with its first kernel: workers look there, too.
    os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(torch.cuda.current_device()))
    launcher.build_driver()
    start_pool(*modules)
    pool = AsyncCompile.process_pool()
    if isinstance(getattr(pool, "pickler", None), worker.Pickler):
        return  # their parent has imported
    for _ in range(get_compile_threads()):
        pool.submit(prepare_worker, modules)


def prepare_worker(modules: tuple[str, ...]) -> None:
    """Import in a worker that has a parent without the imports."""
    worker.prepare([*NEEDED, *modules])
