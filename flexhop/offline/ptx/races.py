"""Accesses of shared memory that nothing orders.

Every warp has a clock of what it knows: of which accesses of each warp, and of which asynchronous
work, it can be sure that they are over. Barriers pass that on. Two accesses of a byte, one of them
a write, need an order. Asynchronous copies and products see memory through a proxy of their own:
what a thread has stored needs a fence as well. Threads of a warp count as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from flexhop.offline.ptx.memory import bytes_of

__all__ = ["Op", "Race", "Races", "Use"]

_KINDS = ("product", "copy")  # asynchronous work; of each kind, a warp's is over in order


Use = Literal["load", "store", "use"]


class Race(RuntimeError):
    """Nothing orders two accesses of shared memory."""


class Op(NamedTuple):
    """Asynchronous work of a warp: its number, and what it knows when it is over."""

    number: int
    warp: int
    knows: _Knowledge


class _Knowledge(NamedTuple):
    """What a warp or a barrier knows. clock, fenced: up to which of its steps each warp's accesses
    are over, and through a fence for asynchronous proxies; done: asynchronous work."""

    clock: np.ndarray
    fenced: np.ndarray
    done: np.ndarray

    def copy(self) -> _Knowledge:
        return _Knowledge(*(part.copy() for part in self))

    def learn(self, other: _Knowledge) -> None:
        """Add what another knows."""
        for mine, new in zip(self, other, strict=True):
            np.maximum(mine, new, out=mine)


class Races:
    """What is known of accesses of one program's shared memory.

    Args:
        data: the bytes of shared memory.
        threads: of the program.
        show: tells the number of the instruction that runs.
        name: gives the text of an instruction, for errors.
    """

    def __init__(
        self, data: np.ndarray, threads: int, show: Callable[[], int], name: Callable[[int], str]
    ) -> None:
        self._data, self._warps = data, -(-threads // 32)
        self._show, self._name = show, name
        self.clear()

    def clear(self) -> None:
        """A program begins."""
        count = self._warps
        self._known = [self._nothing() for _ in range(count)]
        for warp, known in enumerate(self._known):
            known.clock[warp] = 1
        self._ops = 0
        self._places: list[int] = []  # of asynchronous work
        # Of each byte: the last write, by a warp at a step of its clock or by asynchronous work,
        # whose numbers begin behind those of warps; and the last read by each warp.
        self._writer = np.full(len(self._data), -1, np.int32)
        self._written = np.zeros((2, len(self._data)), np.int32)  # step, instruction
        self._read = np.zeros((2, len(self._data), count), np.int32)
        # And the last asynchronous read that each warp began; 0: none.
        self._read_by = {kind: np.zeros((len(self._data), count), np.int32) for kind in _KINDS}
        self._gathered: dict[int, _Knowledge] = {}
        self._released: dict[int, _Knowledge] = {}

    def _nothing(self) -> _Knowledge:
        count = self._warps
        clock, fenced = np.zeros((2, count), np.int32)
        return _Knowledge(clock, fenced, np.zeros(1, bool))

    # What warps do.

    def access(
        self, numbers: np.ndarray, addresses: np.ndarray, size: int, use: Use,
        values: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Threads access bytes of shared memory.

        Args:
            numbers: of the threads.
            addresses: for each, or for all.
            size: bytes of each.
            use: "use" is what barriers and atomic operations do: in any order, after stores.
            values: bytes of a store, if known. Nobody can tell when a store happens that changes
                nothing, such as one by all threads.
        """
        warps = numbers // 32
        addresses = np.broadcast_to(np.atleast_1d(addresses), numbers.shape)
        for warp in np.unique(warps).tolist():
            here = warps == warp
            places = bytes_of(addresses[here], size)
            if use == "store" and values is not None:
                places = places[self._change(places, values[here].reshape(-1))]
            known, step = self._known[warp], self._known[warp].clock[warp]
            self._after_writes(places, known, known.clock)
            if use == "store":
                self._after_reads(places, known)
                self._writer[places] = warp
                self._written[:, places] = [[step], [self._show()]]
            elif use == "load":
                self._read[:, places, warp] = [[step], [self._show()]]

    def _change(self, places: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Which bytes a store changes. It happens, for the next warp to see."""
        changed = self._data[places] != values
        self._data[places] = values
        return changed

    def begin(
        self, warp: int, reads: np.ndarray, writes: np.ndarray, kind: str = "copy",
        is_generic: bool = False,
    ) -> Op:  # fmt: skip
        """A warp starts asynchronous work.

        Args:
            warp: its number.
            reads: addresses of bytes in shared memory.
            writes: likewise.
            kind: "product" or "copy".
            is_generic: it needs no fence.
        """
        known = self._known[warp]
        fenced = known.clock if is_generic else known.fenced
        self._after_writes(reads, known, fenced)
        self._after_writes(writes, known, fenced)
        self._after_reads(writes, known)
        number = self._ops
        self._ops += 1
        self._places.append(self._show())
        if number >= len(known.done):
            self._grow(2 * number + 16)
        self._read_by[kind][reads, warp] = number + 1
        self._writer[writes] = self._warps + number
        knows = self._known[warp].copy()
        knows.done[number] = True
        return Op(number, warp, knows)

    def finish(self, ops: Sequence[Op]) -> None:
        """Warps have waited for one piece of work.

        The four warps of a warpgroup multiply together: a product that is over for one of them is
        over for all. Kernels rely on it when one thread tells that a factor is no longer read.
        """
        numbers = [op.number for op in ops]
        for op in ops:
            self._learn(self._known[op.warp], op.knows)
            self._known[op.warp].done[numbers] = True

    def meet(self, numbers: np.ndarray) -> None:
        """Threads are at a barrier of threads."""
        warps = np.unique(numbers // 32).tolist()
        together = self._nothing_grown()
        for warp in warps:
            self._learn(together, self._known[warp])
        for warp in warps:
            self._learn(self._known[warp], together)
            self._known[warp].clock[warp] += 1

    def fence(self, numbers: np.ndarray) -> None:
        """Threads let asynchronous proxies see what they know."""
        for warp in np.unique(numbers // 32).tolist():
            known = self._known[warp]
            np.maximum(known.fenced, known.clock, out=known.fenced)
            known.clock[warp] += 1

    def end(self) -> None:
        """The program is over, and its shared memory belongs to another one."""
        size = max(len(known.done) for known in self._known)
        is_done = np.any([_widened(known, size).done for known in self._known], 0)
        left = np.flatnonzero(~is_done[: self._ops])
        if len(left):
            where = self._name(self._places[int(left[0])])
            raise Race(f"the program ends before somebody has waited for {where}")

    # Barriers in memory.

    def arrive(self, thread: int, barrier: int) -> None:
        """A thread arrives at a barrier."""
        warp = thread // 32
        self._gather(barrier, self._known[warp])
        self._known[warp].clock[warp] += 1

    def deliver(self, op: Op, barrier: int) -> None:
        """Asynchronous work arrives at a barrier."""
        self._gather(barrier, op.knows)

    def complete(self, barrier: int) -> None:
        """A phase of a barrier is over."""
        self._released[barrier] = self._gathered.get(barrier, self._nothing()).copy()

    def wait(self, numbers: np.ndarray, barriers: np.ndarray) -> None:
        """Threads have seen that phases of barriers are over."""
        for warp, barrier in {*zip((numbers // 32).tolist(), barriers.tolist(), strict=True)}:
            if barrier in self._released:
                self._learn(self._known[warp], self._released[barrier])

    def _gather(self, barrier: int, known: _Knowledge) -> None:
        gathered = self._gathered.setdefault(barrier, self._nothing_grown())
        if len(gathered.done) < len(known.done):
            gathered = self._gathered[barrier] = _widened(gathered, len(known.done))
        self._learn(gathered, known)

    def _nothing_grown(self) -> _Knowledge:
        return _widened(self._nothing(), len(self._known[0].done))

    def _grow(self, size: int) -> None:
        self._known = [_widened(known, size) for known in self._known]

    @staticmethod
    def _learn(known: _Knowledge, new: _Knowledge) -> None:
        # `new` may be older than the newest work.
        known.learn(_widened(new, len(known.done)))

    # Whether accesses have an order.

    def _after_writes(self, places: np.ndarray, known: _Knowledge, steps: np.ndarray) -> None:
        """Writes of these bytes are over."""
        writers = self._writer[places]
        is_warp = (writers >= 0) & (writers < self._warps)
        late = np.zeros(len(places), bool)
        late[is_warp] = self._written[0, places[is_warp]] > steps[writers[is_warp]]
        is_work = writers >= self._warps
        late[is_work] = ~known.done[writers[is_work] - self._warps]
        if late.any():
            place = int(places[late][0])
            writer = int(self._writer[place])
            if writer < self._warps:
                known_order = self._written[0, place] <= known.clock[writer]
                reason = "no fence.proxy.async stands between" if known_order else "nothing orders"
                where = int(self._written[1, place])
                raise Race(self._tell(place, f"warp {writer} wrote it", where, reason))
            raise Race(
                self._tell(place, "may still be written", self._places[writer - self._warps])
            )

    def _after_reads(self, places: np.ndarray, known: _Knowledge) -> None:
        """Reads of these bytes are over."""
        late = self._read[0, places] > known.clock
        if late.any():
            at, warp = (int(part[0]) for part in late.nonzero())
            place = int(places[at])
            where = int(self._read[1, place, warp])
            raise Race(self._tell(place, f"warp {warp} reads it", where))
        for table in self._read_by.values():
            ops = table[places]
            late = (ops > 0) & ~known.done[np.maximum(ops - 1, 0)]
            if late.any():
                at, warp = (int(part[0]) for part in late.nonzero())
                where = self._places[int(ops[at, warp]) - 1]
                raise Race(self._tell(int(places[at]), "may still be read", where))

    def _tell(self, place: int, other: str, where: int, reason: str = "nothing orders") -> str:
        return (
            f"byte {place} of shared memory: {reason} this access and another one: {other} in "
            f"{self._name(where)}"
        )


def _widened(known: _Knowledge, size: int) -> _Knowledge:
    """With room for `size` pieces of work."""
    missing = size - len(known.done)
    if missing <= 0:
        return known
    return known._replace(done=np.concatenate([known.done, np.zeros(missing, bool)]))
