"""New processes that need not import PyTorch: a server did, once, and forks them.

A new interpreter takes four to five CPU seconds for the modules below. The server has one thread
and has run nothing but imports, so its children know what a new interpreter knows. They have the
environment of the time at which the server was started, not of their parent.
"""

from __future__ import annotations

import functools
from multiprocessing import get_context
from multiprocessing.context import BaseContext

import torch

MODULES = [
    "flexhop.distributed",
    "flexhop.offline",
    "torch._inductor.compile_fx",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
]


@functools.cache
def new_processes() -> BaseContext:
    """Of multiprocessing. The server starts with the first process, and ends with this one."""
    if torch.cuda.is_available():
        return get_context("spawn")  # the server's imports may ask for GPUs; a fork loses them
    context = get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    return context
