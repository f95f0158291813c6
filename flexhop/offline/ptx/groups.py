"""Threads that are at the same instruction, and why they wait."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from flexhop.offline.ptx.state import Threads

__all__ = ["SIZES", "Deadlock", "Group", "Wait"]

SIZES = {"warp": 32, "warpgroup": 128}


class Deadlock(RuntimeError):
    """All threads wait for each other."""


@dataclasses.dataclass
class Wait:
    """Why a group does not go on.

    Args:
        key: what groups have in common that go on together.
        show: tells the reason in words.
        is_over: asks whether it may go on; None: somebody else lets it.
    """

    key: tuple[str, int]
    show: Callable[[], str]
    is_over: Callable[[], bool] | None = None


class Group:
    """Threads at the same instruction.

    Args:
        numbers: of the threads, sorted.
        place: the number of their next instruction.
        wait: why they do not go on.
    """

    def __init__(self, numbers: np.ndarray, place: int, wait: Wait | None = None) -> None:
        self.numbers, self.place, self.wait = numbers, place, wait
        first, count = int(numbers[0]), len(numbers)
        is_range = int(numbers[-1]) - first + 1 == count
        # numpy reads a slice without a copy.
        self.threads: Threads = slice(first, first + count) if is_range else numbers
        # Units, of which all threads are here.
        self.whole = {
            unit for unit, size in SIZES.items() if len(np.unique(numbers // size)) * size == count
        }

    @property
    def is_ready(self) -> bool:
        """Whether it may go on."""
        if self.wait is None:
            return True
        return self.wait.is_over is not None and self.wait.is_over()

    def waits_for(self, key: tuple[str, int]) -> bool:
        """Whether it waits for what others with this key wait for."""
        return self.wait is not None and self.wait.key == key

    def __str__(self) -> str:
        reason = self.wait.show() if self.wait else "may go on"
        return f"threads {self.numbers[0]} to {self.numbers[-1]} ({reason})"
