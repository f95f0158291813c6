"""Run Inductor's GPU wrapper on CPU tensors, with another kernel launcher.

The wrapper allocates buffers, launches kernels and returns results. It needs only the few GPU
names that are replaced here. They are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch._inductor.async_compile as async_compile
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import GridExpr

__all__ = ["launch_grid", "load_wrapper", "triton_helpers"]

Launch = Callable[..., None]
Allocate = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]


def load_wrapper(
    code: str, make_kernel: Callable[[str, str], Launch], allocate: Allocate
) -> Callable[[list[Any]], Sequence[Any]]:
    """Execute Inductor's output code with its kernels and buffers replaced.

    Args:
        code: output code for "cuda".
        make_kernel: `make_kernel(name, source)` returns the function that replaces the kernel. It
            is called with the kernel's positional arguments; for templates, the grid's sizes come
            last.
        allocate: `allocate(size, stride, dtype)` returns a new CPU buffer.

    Returns:
        The wrapper's `call`: takes the list of graph inputs, on the CPU, and returns the outputs.
    """

    class Compiler:
        def triton(self, name: str, source: str, **_: Any) -> types.SimpleNamespace:
            kernel = make_kernel(name, source)

            def run(*args: Any, stream: Any = None) -> None:
                kernel(*args)

            return types.SimpleNamespace(run=run)

        def wait(self, scope: dict[str, Any]) -> None:
            """Does nothing: there is no background compilation."""

    names: dict[str, Any] = {"__name__": "flexhop_wrapper"}
    with (
        mock.patch.object(async_compile, "AsyncCompile", Compiler),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", _zero, create=True),
        # CPU-only builds of some versions lack it; it is only looked up.
        mock.patch.object(torch._C._dynamo.guards, "_empty_strided_cuda", allocate, create=True),
    ):
        exec(compile(code, "<inductor output code>", "exec"), names)
    names.update(empty_strided_cuda=allocate, get_raw_stream=_zero, device=_cpu)

    def call(inputs: list[Any]) -> Sequence[Any]:
        with (
            mock.patch.object(torch.cuda, "_DeviceGuard", contextlib.nullcontext),
            mock.patch.object(torch.cuda, "set_device", _zero),
        ):
            return names["call"](inputs)

    return call


def _zero(*_: Any) -> int:
    return 0


def _cpu(*_: Any, **__: Any) -> torch.device:
    return torch.device("cpu")


def launch_grid(
    inductor_meta: dict[str, Any], sizes: dict[str, int], blocks: dict[str, int]
) -> tuple[int, int, int]:
    """The grid that Inductor launches a kernel with.

    Args:
        inductor_meta: from the kernel's decorator; holds the kind of grid.
        sizes: the kernel's scalar arguments, e.g. {"xnumel": 2048}; for templates the grid itself.
        blocks: the block sizes, e.g. {"XBLOCK": 64}.

    Returns:
        Number of programs along x, y and z.
    """
    grid = GridExpr.from_meta(inductor_meta, dict(blocks), mode="python")
    x, y, z = grid.eval_slow({**sizes, **blocks})
    return x, y, z
