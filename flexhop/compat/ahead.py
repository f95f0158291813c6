"""Inductor: compile a kernel in the background before the graph that launches it is lowered.

AOTAutograd lowers the backward graph when the first backward pass runs, so its kernel would be
compiled after the forward kernel, although both are known together. What is compiled here is left
in Triton's cache on disk, where Inductor finds it. If the text turns out to be another one, or
compiling fails, Inductor compiles as ever, and reports. Names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config, ir
from torch._inductor.async_compile import get_compile_threads
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path
from torch._inductor.virtualized import V

__all__ = ["finish", "gradient_strides", "is_useful", "stand_ins", "start"]

# Python waits for threads when it ends, so only so much is begun that may be of no use.
_MOST = 2

_pool = ThreadPoolExecutor(_MOST, thread_name_prefix="flexhop_compile")
_jobs: dict[str, Future[None]] = {}  # by the hash of the text


def is_useful() -> bool:
    """Whether the graph that is lowered now has a backward pass, and kernels may be compiled."""
    trains = not (V.graph.is_inference or V.graph.is_backward or V.graph.aot_mode)
    may = get_compile_threads() > 1 and not config.force_disable_caches
    return trains and may and torch.cuda.is_initialized()


def gradient_strides(out: torch.Tensor) -> list[int]:
    """Strides that the gradient of the node's first result, [B, H, M, D], will probably have.

    In a model all heads of a row are multiplied by a matrix, whose gradient has them side by side.
    Of a graph's output AOTAutograd takes the gradient to be contiguous (2.11), or like the output.
    """
    _, heads, rows, columns = out.shape
    if _is_read_by_row():
        return [rows * heads * columns, columns, heads * columns, 1]
    if functorch_config.guess_tangent_strides_as_outputs:
        return list(out.stride())
    return [heads * rows * columns, rows * columns, columns, 1]


def _is_read_by_row() -> bool:
    """Whether what follows reads the first result [B, H, M, D] as [B, M, H, D]."""
    results = (n for n in V.graph.current_node.users if n.target is operator.getitem)
    users = (user for result in results if result.args[1] == 0 for user in result.users)
    permute = torch.ops.aten.permute.default
    return any(n.target is permute and list(n.args[1]) == [0, 2, 1, 3] for n in users)


@contextmanager
def stand_ins(layouts: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Buffers of these layouts, for operands that this graph does not have; gone at the end."""
    buffers = [ir.InputBuffer(name=f"ahead_{name}", layout=x) for name, x in layouts.items()]
    known = V.graph.name_to_buffer
    known.update((buffer.get_name(), buffer) for buffer in buffers)
    try:
        yield [ir.TensorBox.create(buffer) for buffer in buffers]
    finally:
        for buffer in buffers:
            del known[buffer.get_name()]


def start(choice: Any) -> None:
    """Begin to compile a choice of a template, unless it was begun before or enough others are."""
    request = choice.bmreq
    running = [job for job in _jobs.values() if not job.done()]
    if request.module_cache_key in _jobs or len(running) >= _MOST:
        return
    module = PyCodeCache.load_by_key_path(request.module_cache_key, request.module_path)
    kernel = getattr(module, request.kernel_name)
    _jobs[request.module_cache_key] = _pool.submit(_compile, kernel)


def _compile(kernel: Any) -> None:
    _set_triton_ptxas_path()  # as Inductor's workers do, since the cache asks for its version
    kernel.precompile(warm_cache_only=True)


def finish(choice: Any) -> None:
    """Wait for a choice that was begun, if its text is the same; its failure is Inductor's."""
    job = _jobs.get(choice.bmreq.module_cache_key)
    if job is not None:
        wait([job])
