"""The parent of Inductor's workers, started before this process imports Dynamo.

The parent imports PyTorch, Dynamo, Triton and Gluon before it forks workers: four seconds of a
core. Inductor starts it when it is imported itself, after Dynamo, so a first call compiles its
kernel in this process and waits for workers to compile the next. Here it starts when the import of
Dynamo begins. It imports, then waits for the command that Inductor would have started it with.
Names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

from flexhop.compat.imports import after_import

__all__ = ["NEEDED", "PATIENCE", "begin"]

# What nearly every kernel imports.
NEEDED = (
    "triton.compiler.code_generator",
    "torch._inductor.runtime.triton_heuristics",
    "flexhop.compat.kernels.gluon_runtime",
)
PATIENCE = 60.0  # seconds until an early process is not used any more; it ends a while later
_FEWEST_CORES = 4
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
_POOL = "torch._inductor.compile_worker.subproc_pool"


@dataclasses.dataclass(frozen=True)
class _Early:
    process: subprocess.Popen[bytes]
    orders: socket.socket
    environment: dict[str, str] = dataclasses.field(repr=False)
    started: float
    owner: int  # a fork of this process has no use for it


_started: list[_Early] = []


def begin() -> None:
    """Start the parent, unless Inductor may have one already, or wants none."""
    if _started or "torch._inductor.async_compile" in sys.modules or not _may_begin():
        return
    ours, theirs = socket.socketpair()
    environment = _environment()
    code = (
        f"from flexhop.compat.workers.orders import await_orders; await_orders({theirs.fileno()})"
    )
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code], env=environment, pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    _started.append(_Early(process, ours, environment, time.monotonic(), os.getpid()))
    after_import(_POOL, _await_inductor)


def _may_begin() -> bool:
    """Whether Inductor will start workers that can be started now. As its decide_compile_threads,
    which only Inductor can be asked for."""
    threads = os.environ.get(_THREADS)
    is_wanted = threads is None or (threads.isdigit() and int(threads) > 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    is_frozen = getattr(sys, "frozen", False) or not sys.executable
    is_worker = multiprocessing.current_process().daemon
    return is_wanted and cores >= _FEWEST_CORES and not (is_frozen or is_worker)


def _environment() -> dict[str, str]:
    path = os.environ.get("TORCH_CUSTOM_PYTHONPATH", os.pathsep.join(sys.path))
    return {**os.environ, "PYTHONPATH": path, "TORCH_WARM_POOL": "0"}


def _await_inductor() -> None:
    """Hand over the early process to the first pool."""
    pool = sys.modules[_POOL]

    def start(command: list[str], **how: Any) -> Any:
        pool.subprocess = subprocess  # type: ignore[attr-defined]
        return _hand_over(command, **how) or subprocess.Popen(command, **how)

    pool.subprocess = SimpleNamespace(Popen=start)  # type: ignore[attr-defined]


def _hand_over(command: list[str], **how: Any) -> subprocess.Popen[bytes] | None:
    """Let the early process be what `Popen(command, **how)` would start; None if it cannot."""
    early = _started[-1]
    if early.owner != os.getpid():
        return None
    is_late = time.monotonic() - early.started > PATIENCE
    numbers, output = list(how.get("pass_fds", ())), how.get("stdout")
    is_known = set(how) <= {"env", "pass_fds", "stdout", "stderr"} and output == how.get("stderr")
    if early.process.poll() is not None or is_late or not is_known or command[0] != sys.executable:
        early.orders.close()  # it ends
        return None
    changed = {k: v for k, v in how["env"].items() if early.environment.get(k) != v}
    order = {
        "arguments": command[1:],
        "numbers": numbers,
        "has_output": output is not None,
        "changed": changed,
        "removed": sorted(set(early.environment) - set(how["env"])),
    }
    handed = numbers if output is None else [*numbers, output.fileno()]
    with early.orders:
        socket.send_fds(early.orders, [b"."], handed)
        early.orders.sendall(json.dumps(order).encode())
    return early.process
