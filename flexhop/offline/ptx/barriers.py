"""Barriers in shared memory: mbarrier objects, which count arrivals and bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

__all__ = ["Barriers"]


@dataclasses.dataclass
class _Barrier:
    """count: arrivals of a phase; pending: those still to come; bytes: likewise, of copies."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0


class Barriers:
    """The mbarrier objects of one program, by address.

    Attributes:
        on_phase: is told of each barrier whose phase is over.
    """

    def __init__(self) -> None:
        self.on_phase: Callable[[int], None] | None = None
        self._barriers: dict[int, _Barrier] = {}

    def clear(self) -> None:
        """Forget all."""
        self._barriers.clear()

    def init(self, address: int, count: int) -> None:
        """Make one for `count` arrivals a phase."""
        self._barriers[address] = _Barrier(count, count)

    def invalidate(self, address: int) -> None:
        """Its memory may hold something else."""
        self._at(address)
        del self._barriers[address]

    def expect(self, address: int, size: int) -> None:
        """More bytes belong to the phase."""
        self._at(address).bytes += size

    def arrive(self, address: int, times: int = 1) -> None:
        """Threads are there."""
        barrier = self._at(address)
        if barrier.pending < times:
            raise RuntimeError(f"the barrier at {address} has more arrivals than {barrier.count}")
        barrier.pending -= times
        self._complete(barrier, address)

    def deliver(self, address: int, size: int) -> None:
        """Bytes of a copy have come."""
        barrier = self._at(address)
        barrier.bytes -= size
        self._complete(barrier, address)

    def is_over(self, address: int, parity: int) -> bool:
        """Whether the phase of this parity is over."""
        return self._at(address).phase != parity

    def show(self, address: int) -> str:
        """Its state in words."""
        return str(self._barriers.get(address))

    def _at(self, address: int) -> _Barrier:
        barrier = self._barriers.get(address)
        if barrier is None:
            raise RuntimeError(f"there is no barrier at {address}")
        return barrier

    def _complete(self, barrier: _Barrier, address: int) -> None:
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.phase ^= 1
            barrier.pending = barrier.count
            if self.on_phase is not None:
                self.on_phase(address)
