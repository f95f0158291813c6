"""Triton 3.6: build a kernel's launcher while a worker compiles the kernel.

Inductor's own code does not launch kernels that need scratch memory, such as all kernels with
tensor memory accelerator descriptors. For their signature, Triton 3.6 writes a C function and has
the system compiler build it once the kernel exists. That is a quarter of a second in which nothing
else happens. Here a thread builds it earlier and stores it in Triton's cache. Triton 3.7 has one
launcher for all kernels. Names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import ast
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor import config

__all__ = ["build", "build_driver"]


def build(choice: Any) -> None:
    """Start building the launcher of a template choice, if its Triton needs one.

    Nothing waits for it. If it is missing in the end, or failed, Triton builds it and reports
    errors.
    """
    if torch.cuda.is_initialized() and not config.cpp_wrapper and is_needed():
        _thread().submit(_build_for, choice.bmreq.module_path)


def build_driver() -> None:
    """Start building Triton's driver interface, which workers and launchers need."""
    _thread().submit(lambda: import_module("triton.runtime").driver.active)


def is_needed() -> bool:
    """Whether Triton builds launchers."""
    return hasattr(_driver(), "make_launcher")


def _driver() -> Any:
    return import_module("triton.backends.nvidia.driver")  # there may be none


def signature_of(text: str) -> dict[str, str]:
    """Names and types of a kernel's arguments, from its generated text.

    To execute the text would take as long as everything else that this process does for it.
    """
    (found,) = re.findall(r"'signature': (\{[^{}]*\})", text)
    return ast.literal_eval(found)


# As if the kernel needed no scratch memory: the text does not depend on it.
_METADATA = SimpleNamespace(
    global_scratch_size=0, global_scratch_align=1,
    profile_scratch_size=0, profile_scratch_align=1,
    launch_cooperative_grid=False, launch_pdl=False,
)  # fmt: skip


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="flexhop_launcher")


def _build_for(path: str) -> Any:
    """Build the launcher of a kernel in a generated file."""
    return _build(signature_of(Path(path).read_text()))


def _build(signature: dict[str, str]) -> Any:
    """Build a kernel's launcher; its text depends on the signature."""
    source = SimpleNamespace(fn=None, constants={}, signature=signature)
    return _driver().CudaLauncher(source, _METADATA)
