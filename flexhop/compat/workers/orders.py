"""In the early parent of Inductor's workers: import, then become what Inductor starts.

Names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from flexhop.compat.workers.early import NEEDED, PATIENCE

__all__ = ["await_orders"]

_MAIN = "torch._inductor.compile_worker.__main__"
_LONGER = 2 * PATIENCE  # who orders gives up first
_DESCRIPTORS = ("--read-fd", "--write-fd")


def await_orders(descriptor: int) -> None:
    """Import what Inductor's process imports, wait for its command, and run it."""
    main = import_module(_MAIN)
    main.pre_fork_setup()  # it remembers what it computes, for the second time
    for module in NEEDED:
        with contextlib.suppress(ImportError):  # left to the kernel that needs it
            import_module(module)
    with socket.socket(fileno=descriptor) as orders:
        orders.settimeout(_LONGER)
        mark, descriptors, *_ = socket.recv_fds(orders, 1, 8)
        if not mark:  # the other process has ended
            return
        order = _read(orders)
    sys.argv = _prepared(order, descriptors)
    main.main()


def _read(orders: socket.socket) -> dict[str, Any]:
    with orders.makefile("rb") as file:
        return json.load(file)


def _prepared(order: dict[str, Any], descriptors: Sequence[int]) -> list[str]:
    """Environment and output as ordered; returns the command's arguments with the pipes' numbers
    in this process."""
    for name in order["removed"]:
        os.environ.pop(name, None)
    os.environ.update(order["changed"])
    path = order["changed"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path += [folder for folder in path if folder and folder not in sys.path]
    pipes = descriptors[: len(order["numbers"])]
    if order["has_output"]:
        for standard in (1, 2):
            os.dup2(descriptors[-1], standard)
    here = dict(zip(map(str, order["numbers"]), map(str, pipes), strict=True))
    pairs = (argument.partition("=") for argument in order["arguments"])
    return [
        f"{name}={here[value]}" if name in _DESCRIPTORS else f"{name}{sign}{value}"
        for name, sign, value in pairs
    ]
