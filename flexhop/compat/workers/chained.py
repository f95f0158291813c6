"""Inductor's workers: a job whose kernel another worker is compiling waits for it.

A forward kernel is known when its node is lowered, but Inductor asks for it when it has lowered,
fused and written the whole graph: a second later in a model. So it is compiled ahead. If Inductor
asked at once, a second worker would compile the same; after the first, it finds the kernel in
Triton's cache. Names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import _load_triton_kernel_from_source
from torch._inductor.runtime.compile_tasks import _worker_compile_triton
from torch._inductor.utils import clear_on_fresh_cache

__all__ = ["announce"]


class _Early(dict[str, Future[Any]]):
    """Jobs by the text that Triton's cache goes by; cleared together with Inductor's caches."""

    cache_clear = dict.clear


_early = clear_on_fresh_cache(_Early())


def announce(name: str, source: str, job: Future[Any]) -> None:
    """Let Inductor's job for this kernel wait for `job`, which a worker does."""
    _early[_functions(name, source)] = job
    pool = AsyncCompile.process_pool()
    if not isinstance(pool.submit, _Submit):
        pool.submit = _Submit(pool.submit)  # type: ignore[method-assign]


def _functions(name: str, source: str) -> str:
    """A kernel's functions without Inductor's name for it, which numbers a graph's kernels."""
    return source.partition("@gluon.jit")[2].replace(name, "").strip()


class _Submit:
    """The method `submit` of Inductor's pool, which holds back jobs that wait for others."""

    def __init__(self, submit: Callable[..., Future[Any]]) -> None:
        self._submit = submit

    def __call__(self, job: Callable[..., Any], *args: Any, **keywords: Any) -> Future[Any]:
        early = _awaited(job, args)
        if early is None or early.done():
            return self._submit(job, *args, **keywords)
        later: Future[Any] = Future()
        send = functools.partial(self._send, later, job, *args, **keywords)
        # In a thread: the pool holds a lock while it finishes a job.
        early.add_done_callback(lambda _: _sender().submit(send))
        return later

    def _send(self, later: Future[Any], job: Callable[..., Any], *args: Any, **more: Any) -> None:
        try:
            self._submit(job, *args, **more).add_done_callback(lambda done: _copy(done, later))
        except Exception as error:  # a closed pool, say, as whoever waits will see
            later.set_exception(error)


def _awaited(job: Any, args: tuple[Any, ...]) -> Future[Any] | None:
    """The job that a job for a kernel waits for."""
    if not _early or job is not _worker_compile_triton:
        return None
    load = args[0]
    if getattr(load, "func", None) is not _load_triton_kernel_from_source:
        return None
    return _early.get(_functions(*load.args[:2]))


def _copy(done: Future[Any], later: Future[Any]) -> None:
    try:
        later.set_result(done.result())
    except BaseException as error:  # whoever waits raises it
        later.set_exception(error)


@functools.cache
def _sender() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="flexhop-later")
