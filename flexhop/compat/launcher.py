"""Triton 3.6: build a kernel's launcher while a worker compiles the kernel.

Inductor's own code does not launch kernels that need scratch memory, such as all kernels with
tensor memory accelerator descriptors. For their signature, Triton 3.6 writes a C function and has
the system compiler build it once the kernel exists. That is a quarter of a second in which nothing
else happens. Here a thread builds it earlier and stores it in Triton's cache. Triton 3.7 has one
launcher for all kernels. Names are the same in torch 2.11 to 2.15.
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
    """Start building the launcher of a template choice, if its Triton needs one.

    Nothing waits for it. If it is missing in the end, or failed, Triton builds it and reports
    errors.
    """
    if torch.cuda.is_initialized() and not config.cpp_wrapper and is_needed():
        _thread().submit(_build, kernel_of(choice))


def build_driver() -> None:
    """Start building Triton's driver interface, which workers and launchers need."""
    _thread().submit(lambda: import_module("triton.runtime").driver.active)


def is_needed() -> bool:
    """Whether Triton builds launchers."""
    return hasattr(_driver(), "make_launcher")


def _driver() -> Any:
    return import_module("triton.backends.nvidia.driver")  # there may be none


def kernel_of(choice: Any) -> Any:
    """The kernel of a choice, in its generated module."""
    request = choice.bmreq
    module = PyCodeCache.load_by_key_path(request.module_cache_key, request.module_path)
    return getattr(module, request.kernel_name)


# As if the kernel needed no scratch memory: the text does not depend on it.
_METADATA = SimpleNamespace(
    global_scratch_size=0, global_scratch_align=1,
    profile_scratch_size=0, profile_scratch_align=1,
    launch_cooperative_grid=False, launch_pdl=False,
)  # fmt: skip


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="flexhop_launcher")


def _build(kernel: Any) -> Any:
    """Build a kernel's launcher; its text depends on the signature."""
    signature = kernel.triton_meta["signature"]
    source = SimpleNamespace(fn=kernel.fn, constants={}, signature=signature)
    return _driver().CudaLauncher(source, _METADATA)
