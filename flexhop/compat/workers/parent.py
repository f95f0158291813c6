"""Inductor's workers: their parent imports what kernels need, before it forks them.

Inductor lets the creator of its workers' parent choose how jobs are pickled, by a class that the
parent imports and instantiates. This one pickles as usual. Names are the same in torch 2.11 to
2.15.
"""

from __future__ import annotations

import contextlib
import gc
import os
from importlib import import_module

from torch._inductor.compile_worker.subproc_pool import SubprocPickler

__all__ = ["MODULES", "Pickler", "prepare"]

MODULES = "FLEXHOP_WORKER_MODULES"  # variable for the parent of workers


class Pickler(SubprocPickler):
    """Pickles jobs. In the parent of the workers, its creation imports the modules of MODULES."""

    def __init__(self) -> None:
        modules = os.environ.pop(MODULES, "")
        if modules:
            prepare(modules.split(","))


def prepare(modules: list[str]) -> None:
    """Import modules, then freeze the garbage collector.

    Otherwise a worker's first kernel triggered a collection of all of PyTorch's objects: 0.15 s.
    A module that cannot be imported is left to the kernel that needs it.
    """
    for module in modules:
        with contextlib.suppress(ImportError):
            import_module(module)
    gc.freeze()
