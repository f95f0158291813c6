"""Inductor: compile a kernel in a worker before the graph that launches it is lowered.

AOTAutograd lowers the backward graph when the first backward pass runs. Its kernel would then be
compiled after the forward kernel, although both are known at the same time. Kernels compiled here
go to Triton's disk cache, where Inductor's workers find them. If the text turns out to differ, or
compilation fails, Inductor compiles as usual. Names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config, ir
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import _load_triton_kernel_from_source
from torch._inductor.utils import clear_on_fresh_cache
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node

from flexhop.compat.graphs import shared_graphs
from flexhop.compat.kernels.machine_code import compile_by_worker, compile_here
from flexhop.compat.workers import chained as chained_jobs

__all__ = [
    "begin",
    "finish",
    "gradient_strides",
    "is_useful",
    "local_memory",
    "operand_nodes",
    "origin",
    "placeholders",
    "start",
    "start_soon",
    "traced",
]

# Workers may be few, and Python waits for them at exit: at most this much work at a time.
_MOST = 3
_MANY_NODES = 40  # Inductor takes at least 5 ms for each: to lower, to fuse and to write


class _Jobs(dict[str, Future[None]]):
    """Jobs by the hash of their text; cleared together with Inductor's caches."""

    cache_clear = dict.clear


_jobs = clear_on_fresh_cache(_Jobs())


def is_useful() -> bool:
    """Whether the graph being lowered has a backward pass, and kernels may be compiled."""
    trains = not (V.graph.is_inference or V.graph.is_backward or V.graph.aot_mode)
    may = get_compile_threads() > 1 and not config.force_disable_caches
    return trains and may and torch.cuda.is_initialized()


def traced(name: str) -> GraphModule | None:
    """The backward trace of the call being lowered; None if unknown."""
    return shared_graphs.found(V.graph.current_node).get(name)


def gradient_strides(out: torch.Tensor) -> list[int]:
    """The probable strides of the gradient of the node's first result, [B, H, M, D].

    In a model, all heads of a row are multiplied by a matrix, whose gradient has them side by
    side. For a graph's output, AOTAutograd assumes a contiguous gradient, or one like the output
    (2.13, if sizes are static).
    """
    _, heads, rows, columns = out.shape
    row = heads * columns
    readers = _first_result_readers()
    permuted = _find_permuted(readers, [0, 2, 1, 3])
    of_tokens = [user for n in readers if _drops_batch(n) for user in n.users]
    is_packed = (packed := _find_permuted(of_tokens, [1, 0, 2])) is not None
    by_row = packed if is_packed else permuted
    if _is_like_output(out, by_row):
        batch, *others = out.stride()
        return [heads * others[0] if is_packed else batch, *others]
    if by_row is not None:
        return [row if is_packed else rows * row, columns, row, 1]
    return [heads * rows * columns, rows * columns, columns, 1]


def _is_like_output(out: torch.Tensor, reader: Node | None) -> bool:
    """Whether a result, or the output that reads it, has a gradient with the output's layout."""
    is_output = reader is None or all(n.op == "output" for n in reader.users)
    is_fixed = not any(isinstance(n, torch.SymInt) for n in (*out.shape, *out.stride()))
    return functorch_config.guess_tangent_strides_as_outputs and is_output and is_fixed


def _first_result_readers() -> list[Node]:
    results = (n for n in V.graph.current_node.users if n.target is operator.getitem)
    return [user for result in results if result.args[1] == 0 for user in result.users]


def _find_permuted(readers: Sequence[Node], order: list[int]) -> Node | None:
    """The first node that is this permutation."""
    permute = torch.ops.aten.permute.default
    return next((n for n in readers if n.target is permute and list(n.args[1]) == order), None)


def _drops_batch(node: Node) -> bool:
    """Whether a node removes a leading dimension of 1."""
    return node.target is torch.ops.aten.squeeze.dim and node.args[1] == 0


def operand_nodes() -> tuple[Any, ...]:
    """Operands of the node being lowered, as nodes of its graph."""
    return V.graph.current_node.args


def origin(node: Node) -> Node:
    """The node that a node is a view of."""
    aten = torch.ops.aten
    views = (aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten.alias.default)
    while node.target in views:
        (node, *_) = node.all_input_nodes
    return node


@contextmanager
def placeholders(layouts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Buffers of these layouts, for operands that this graph lacks; removed at the end."""
    buffers = {n: ir.InputBuffer(name=f"ahead_{n}", layout=x) for n, x in layouts.items()}
    known = V.graph.name_to_buffer
    known.update((buffer.get_name(), buffer) for buffer in buffers.values())
    try:
        yield {name: ir.TensorBox.create(buffer) for name, buffer in buffers.items()}
    finally:
        for buffer in buffers.values():
            del known[buffer.get_name()]


def start(choice: Any) -> None:
    """Start compiling a choice of a template, unless it was started before or enough others are
    running."""
    running = [job for job in _jobs.values() if not job.done()]
    if choice.bmreq.module_cache_key not in _jobs and len(running) < _MOST:
        _begin(choice)


def start_soon(choice: Any) -> None:
    """Start compiling a choice that this graph will launch.

    Inductor asks for it only when it has lowered and written the whole graph. A worker then finds
    it in Triton's cache, which takes a tenth of a second, so much of the graph must be left.
    """
    is_other = config.cpp_wrapper or V.graph.aot_mode
    if is_other or not (_may_compile() and get_compile_threads() > _MOST and _much_follows()):
        return
    if not AsyncCompile.use_process_pool():
        return
    start(choice)
    request = choice.bmreq
    job = _jobs.get(request.module_cache_key)
    if job is not None and not job.done():
        chained_jobs.announce(request.kernel_name, Path(request.module_path).read_text(), job)


def _much_follows() -> bool:
    """Whether many nodes of the graph are still to be lowered."""
    node = V.graph.current_node
    for _ in range(_MANY_NODES):
        node = node.next
        if node.op == "output":
            return False
    return True


def begin(choice: Any) -> bool:
    """Start compiling a choice whose local memory will be asked for; whether a worker does it."""
    if not _may_compile() or get_compile_threads() <= _MOST:
        return False
    if choice.bmreq.module_cache_key not in _jobs:
        _begin(choice)
    return True


def _may_compile() -> bool:
    """Whether kernels are compiled now."""
    return torch.cuda.is_initialized() and not config.force_disable_caches


def _begin(choice: Any) -> None:
    request = choice.bmreq
    source = Path(request.module_path).read_text()
    _jobs[request.module_cache_key] = _submit(request.kernel_name, source)


def _submit(name: str, source: str) -> Future[int]:
    """Compile a kernel as Inductor would, and measure its local memory.

    In a worker if there are any: Triton's cache distinguishes them from this process, because they
    may have another ptxas.
    """
    load = partial(_load_triton_kernel_from_source, name, source)
    folders = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    environment = {folder: os.environ[folder] for folder in folders if folder in os.environ}
    if get_compile_threads() > 1:
        return _send(partial(compile_by_worker, load, environment))
    job: Future[int] = Future()
    try:
        job.set_result(compile_here(load))
    except Exception as error:  # as a worker returns it
        job.set_exception(error)
    return job


def _send(compile_kernel: Callable[[], int]) -> Future[int]:
    """Have a worker compile, without waiting for workers that are still starting.

    The pipe to them is shorter than a kernel's text, and they read nothing for the five seconds in
    which they import PyTorch.
    """
    is_ready = AsyncCompile.use_process_pool()
    submit = AsyncCompile.process_pool().submit
    if is_ready:
        return submit(compile_kernel)
    return _sender().submit(lambda: submit(compile_kernel).result())


@functools.cache
def _sender() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST, thread_name_prefix="flexhop-sender")


def finish(choice: Any) -> None:
    """Wait for a choice that was started, if Inductor will ask a worker for the same text.

    If it failed, Inductor compiles again and reports the error.
    """
    job = _jobs.get(choice.bmreq.module_cache_key)
    if job is not None and AsyncCompile.use_process_pool():
        wait([job])


def local_memory(choice: Any) -> int | None:
    """Local memory per thread of a choice's kernel, in bytes; compiles it if necessary.

    None if kernels are not compiled now, or if this one fails to compile, which Inductor will
    report.
    """
    if not _may_compile():
        return None
    if choice.bmreq.module_cache_key not in _jobs:
        _begin(choice)
    job = _jobs[choice.bmreq.module_cache_key]
    return None if job.exception() is not None else job.result()
