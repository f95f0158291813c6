"""When asynchronous work happens: copies and products run at any time before somebody waits."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from flexhop.offline.ptx.races import Op

__all__ = [
    "ANY_ORDER",
    "Asynchronous",
    "Pending",
    "Schedule",
    "When",
    "finish_groups",
    "read_groups",
]

_SHARE = 0.3  # of what was begun, each time that something may happen


When = Literal["early", "late", "random"]


class Schedule(NamedTuple):
    """When things happen that a GPU may do at any time.

    when: asynchronous copies and products run "early" (at once), "late" (not before somebody
        waits) or at "random" times.
    seed: of the order of threads and of random times.
    """

    when: When = "random"
    seed: int = 0


ANY_ORDER = Schedule()


@dataclasses.dataclass
class Pending:
    """Work that was started.

    Args:
        run: does it.
        ops: what is noted of it, to find races.
        read: reads what it needs of shared memory, which may then be overwritten; None: it has no
            such part.
        done: whether it was done.
    """

    run: Callable[[], None]
    ops: Sequence[Op] = ()
    read: Callable[[], None] | None = None
    done: bool = False

    def finish(self) -> None:
        """Do it, unless it was done."""
        if not self.done:
            self.done = True
            self.run()


class Asynchronous:
    """Work under way.

    Args:
        schedule: when it is done.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.when = schedule.when
        self._random = random.Random(schedule.seed)
        self._pending: list[Pending] = []

    def start(
        self,
        run: Callable[[], None],
        ops: Sequence[Op] = (),
        read: Callable[[], None] | None = None,
    ) -> Pending:
        """Begin work."""
        one = Pending(run, ops, read)
        if self.when == "early" or (self.when == "random" and self._random.random() < _SHARE):
            one.finish()
        else:
            self._pending.append(one)
        return one

    def some(self) -> None:
        """Let time pass."""
        if self.when == "random" and self._pending and self._random.random() < _SHARE:
            self.one()

    def one(self) -> bool:
        """Do something that was begun; False: there is nothing."""
        self._pending = [one for one in self._pending if not one.done]
        if not self._pending:
            return False
        number = self._random.randrange(len(self._pending)) if self.when == "random" else 0
        self._pending[number].finish()
        return True


def read_groups(groups: list[list[Pending]], kept: int) -> list[Pending]:
    """Let all but the last `kept` closed groups read what they need; those that had not."""
    number = max(len(groups) - 1 - kept, 0)
    read = [one for group in groups[:number] for one in group if one.read is not None]
    for pending in read:
        if pending.read is not None and not pending.done:
            pending.read()
        pending.read = None
    return read


def finish_groups(groups: list[list[Pending]], kept: int) -> list[Pending]:
    """Do what all but the last `kept` closed groups have begun. The last of the list is open."""
    number = max(len(groups) - 1 - kept, 0)
    ended = [pending for group in groups[:number] for pending in group]
    for pending in ended:
        pending.finish()
    del groups[:number]
    return ended
