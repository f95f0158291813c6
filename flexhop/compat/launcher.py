"""Triton 3.6: build a kernel's launcher while a worker compiles the kernel.

Kernels that need scratch memory, as all do that make descriptors for the tensor memory
accelerator, are not launched by Inductor's own code. Triton 3.6 writes a C function for their
signature and has the system's compiler build it, when the kernel is there: a quarter of a second
in which nothing else happens. Here a thread does so before, and leaves it in Triton's cache.
Triton 3.7 has one launcher for all kernels. Names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache

__all__ = ["build", "build_driver"]


def build(choice: Any) -> None:
    """Begin to build the launcher of a choice of a template, if its Triton wants one.

    Nobody waits for it: what is missing in the end, or failed, Triton builds, and reports.
    """
    if torch.cuda.is_initialized() and not config.cpp_wrapper and is_needed():
        _thread().submit(_build, kernel_of(choice))


def build_driver() -> None:
    """Begin to build Triton's interface to the driver, which workers and launchers need."""
    _thread().submit(lambda: import_module("triton.runtime").driver.active)


def is_needed() -> bool:
    """Whether Triton builds launchers."""
    return hasattr(_driver(), "make_launcher")


def _driver() -> Any:
    return import_module("triton.backends.nvidia.driver")  # there need be none


def kernel_of(choice: Any) -> Any:
    """The kernel of a choice, in the module that was generated for it."""
    request = choice.bmreq
    module = PyCodeCache.load_by_key_path(request.module_cache_key, request.module_path)
    return getattr(module, request.kernel_name)


# As if the kernel needed no scratch: nothing of this is in the text.
_METADATA = SimpleNamespace(
    global_scratch_size=0, global_scratch_align=1,
    profile_scratch_size=0, profile_scratch_align=1,
    launch_cooperative_grid=False, launch_pdl=False,
)  # fmt: skip


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="flexhop_launcher")


def _build(kernel: Any) -> Any:
    """The launcher of a kernel, whose text goes by the signature."""
    signature = kernel.triton_meta["signature"]
    source = SimpleNamespace(fn=kernel.fn, constants={}, signature=signature)
    return _driver().CudaLauncher(source, _METADATA)
