"""Processes of one group that start once and run many functions.

They speak gloo. With FLEXHOP_TEST_DEVICE=cuda each has a GPU of its own, and GPUs speak NCCL.
"""

from __future__ import annotations

import os
import queue
import socket
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.problems import DEVICE
from tests.processes import new_processes

TIMEOUT = 240  # seconds for one function


class Fleet:
    """`size` ranks, each of which runs what `run` is given. They start with its first call."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[BaseProcess] = []

    def _start(self) -> None:
        context = new_processes()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory()
        self._orders = [context.SimpleQueue() for _ in range(self.size)]
        self._answers = context.Queue()
        self._processes = [
            context.Process(
                target=_serve,
                args=(rank, self.size, port, orders, self._answers, self._folder.name),
                daemon=True,
            )
            for rank, orders in enumerate(self._orders)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results of function(*arguments) by rank; a failure on any rank fails here."""
        if not self._processes:
            self._start()
        for orders in self._orders:
            orders.put((function, arguments))
        results: dict[int, Any] = {}
        failures: list[str] = []
        while len(results) < self.size:
            # Ranks that wait for one that failed will not come.
            patience = 10 if failures else TIMEOUT
            try:
                rank, failed, value = self._answers.get(timeout=patience)
            except queue.Empty:
                missing = sorted({*range(self.size)} - results.keys())
                failures.append(f"no answer from ranks {missing}")
                self._kill()
                break
            results[rank] = value
            if failed:
                failures.append(f"rank {rank}:\n{value}")
        if failures:
            raise AssertionError("\n".join(failures))
        return [results[rank] for rank in range(self.size)]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self._processes = []
        self._folder.cleanup()

    def close(self) -> None:
        """End the processes; another `run` starts new ones."""
        if not self._processes:
            return
        for orders in self._orders:
            orders.put(None)
        for process in self._processes:
            process.join(20)
        self._kill()


def _serve(rank: int, size: int, port: int, orders: Any, answers: Any, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank))
    # One per rank: PyTorch 2.12 to 2.15 takes graphs of other CPU ranks for its own, with the
    # names of their process groups.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / str(rank))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    backend = "gloo"
    if DEVICE.type == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, rank=rank, world_size=size)
    while (order := orders.get()) is not None:
        function, arguments = order
        try:
            torch.manual_seed(0)
            answers.put((rank, False, function(*arguments)))
        except Exception:
            answers.put((rank, True, traceback.format_exc()))
    dist.destroy_process_group()
