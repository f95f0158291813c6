"""Inductor: have a worker compile a kernel before the graph that launches it is lowered.

AOTAutograd lowers the backward graph when the first backward pass runs, so its kernel would be
compiled after the forward kernel, although both are known together. What is compiled here is left
in Triton's cache on disk, where Inductor's workers find it. If the text turns out to be another
one, or compiling fails, Inductor compiles as ever. Names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config, ir
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import _load_triton_kernel_from_source
from torch._inductor.runtime.compile_tasks import _worker_compile_triton
from torch._inductor.virtualized import V
from torch.fx import GraphModule

from flexhop.compat import shared

__all__ = ["finish", "gradient_strides", "is_useful", "stand_ins", "start", "traced"]

# Workers may be few, and Python waits for them when it ends: so much may be of no use at a time.
_MOST = 2

_jobs: dict[str, Future[None]] = {}  # when each ends, by the hash of its text


def is_useful() -> bool:
    """Whether the graph that is lowered now has a backward pass, and kernels may be compiled."""
    trains = not (V.graph.is_inference or V.graph.is_backward or V.graph.aot_mode)
    may = get_compile_threads() > 1 and not config.force_disable_caches
    return trains and may and torch.cuda.is_initialized()


def traced(name: str) -> GraphModule | None:
    """A graph of the call that is lowered now, traced for the backward pass; None if unknown."""
    return shared.found(V.graph.current_node).get(name)


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
    if request.module_cache_key not in _jobs and len(running) < _MOST:
        source = Path(request.module_path).read_text()
        job, ended = _submit(request.kernel_name, source), Future[None]()
        job.add_done_callback(lambda _: ended.set_result(None))  # the kernel itself is not kept
        _jobs[request.module_cache_key] = ended


def _submit(name: str, source: str) -> Future[Any]:
    """Have a worker compile a kernel, as Inductor has it: Triton's cache tells workers apart from
    this process, because they may have another ptxas."""
    folders = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    environment = {folder: os.environ[folder] for folder in folders if folder in os.environ}
    load = partial(_load_triton_kernel_from_source, name, source)
    return AsyncCompile.process_pool().submit(_worker_compile_triton, load, environment, {})


def finish(choice: Any) -> None:
    """Wait for a choice that was begun, if Inductor will ask a worker for the same text.

    If it failed, Inductor tries again, and reports.
    """
    job = _jobs.get(choice.bmreq.module_cache_key)
    if job is not None and AsyncCompile.use_process_pool():
        wait([job])
