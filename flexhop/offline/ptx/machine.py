"""One program of a kernel: its threads, and who of them runs next.

Threads run in groups that are at the same instruction. A branch that they do not agree on splits a
group. Groups that wait at the same place become one again, because warps execute some instructions
as a whole.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from flexhop.offline.ptx import accesses, flow, matrices, transfers
from flexhop.offline.ptx.arithmetic import arithmetic
from flexhop.offline.ptx.barriers import Barriers
from flexhop.offline.ptx.common import Found, Maker, simple
from flexhop.offline.ptx.copies import TensorMap
from flexhop.offline.ptx.groups import SIZES, Deadlock, Group, Wait
from flexhop.offline.ptx.memory import GlobalMemory, SharedMemory
from flexhop.offline.ptx.order import Asynchronous, Pending, Schedule
from flexhop.offline.ptx.parse import Instruction, Program
from flexhop.offline.ptx.races import Races
from flexhop.offline.ptx.state import Registers, Threads

__all__ = ["Machine"]

_QUANTUM = 4096  # instructions that a group runs before another one does, at most
_MAKERS: dict[str, Maker] = {
    **accesses.MAKERS, **flow.MAKERS, **transfers.MAKERS, **matrices.MAKERS,
}  # fmt: skip
# What orders accesses that happen in order here, or is advice.
_WITHOUT_EFFECT = (
    "fence", "membar", "setmaxnreg", "griddepcontrol", "prefetch", "wgmma.fence", "nanosleep",
    "createpolicy",
)  # fmt: skip


@dataclasses.dataclass
class _Step:
    """An instruction that is ready to run.

    Args:
        run: for threads whose guard holds.
        choose: instead of it: for a group and those threads, what happens to the group: None: it
            goes on; a number: it goes there; a Wait: it waits before this instruction; "split":
            other groups have taken its place.
        unit: of which all threads must be here, or "".
        guard: its predicate, of all threads.
        is_negated: whether the predicate must be False.
        text: for errors.
    """

    run: Callable[[Threads], None] | None
    choose: Callable[[Group, Threads], Any] | None
    unit: str
    guard: np.ndarray | None
    is_negated: bool
    text: str


class Machine:
    """A multiprocessor with one program of a kernel.

    Args:
        program: the kernel.
        memory: global memory.
        shared: bytes of shared memory.
        symbols: addresses of arrays, and values of parameters.
        schedule: what is left to chance.
    """

    def __init__(
        self,
        program: Program,
        memory: GlobalMemory,
        shared: int,
        symbols: dict[str, int],
        schedule: Schedule,
    ) -> None:
        self.program, self.memory = program, memory
        self.shared = SharedMemory(shared)
        self.registers = Registers(program, symbols | dict.fromkeys(program.local, 0))
        # Of all threads, one behind the other.
        self.local = SharedMemory(program.threads * sum(program.local.values()))
        self.races: Races | None = None
        self.barriers = Barriers()
        self.later = Asynchronous(schedule)
        self.maps: dict[int, TensorMap] = {}
        # What was begun, in closed groups and one that is open: by threads that store boxes, warps
        # that copy, and first threads of warpgroups that multiply.
        self.stores: dict[int, list[list[Pending]]] = {}
        self.copies: dict[int, list[list[Pending]]] = {}
        self.products: dict[int, list[list[Pending]]] = {}
        self._random = random.Random(schedule.seed)
        self._steps: list[_Step | None] = [None] * len(program.instructions)
        self._groups: list[Group] = []
        self._executed = 0
        self._place = 0  # of the instruction that runs

    def watch(self) -> None:
        """Look for races from the first program on."""
        text = self.program.instructions
        self.races = Races(
            self.shared.data, self.program.threads, lambda: self._place,
            lambda place: text[place].text[:200],
        )  # fmt: skip
        self.barriers.on_phase = self.races.complete

    def start(self, special: dict[str, int]) -> None:
        """Begin a program.

        Args:
            special: values of special registers, such as %ctaid.x.
        """
        self.registers.clear(special)
        self.shared.clear()
        if self.races is not None:
            self.races.clear()
        for record in (self.barriers, self.maps, self.stores, self.copies, self.products):
            record.clear()
        self._groups = [Group(self.registers.threads, 0)]

    def run(self, limit: int) -> bool:
        """Run until all threads have ended, or for `limit` instructions; whether they have.

        Raises:
            Deadlock: all threads wait.
        """
        end = self._executed + limit
        while self._groups and self._executed < end:
            ready = [group for group in self._groups if group.is_ready]
            if ready:
                self.later.some()
                group = self._random.choice(ready)
                group.wait = None
                self._advance(group)
            elif not self.later.one():
                where = [f"{g} before {self._step(g.place).text}" for g in self._groups]
                raise Deadlock(f"{self.program.name}: all threads wait: " + "; ".join(where))
        if self._groups:
            return False
        if self.races is not None:
            self.races.end()
        while self.later.one():  # also what nobody waited for is done, and not by a later program
            pass
        return True

    def meet(self, group: Group, name: int, count: int) -> Wait | str:
        """A group comes to a barrier of `count` threads; when all are there, they go on."""
        key = ("barrier", name)
        here = [group, *(one for one in self._groups if one.waits_for(key))]
        excess = sum(len(one.numbers) for one in here) - count
        if excess > 0:  # they come to the barrier's next round
            first, rest = group.numbers[:-excess], group.numbers[-excess:]
            return self.split(group, [(first, group.place), (rest, group.place)])
        if excess < 0:
            return Wait(key, lambda: f"waits for {count} threads at barrier {name}")
        places = {one.place for one in here}
        if self.races is not None:
            self.races.meet(np.concatenate([one.numbers for one in here]))
        self._replace(here, [(_union(here, place), place + 1) for place in sorted(places)])
        return "split"

    def split(self, group: Group, parts: list[tuple[np.ndarray, int]]) -> str:
        """Replace a group by others: their threads, and where they go on."""
        self._replace([group], parts)
        return "split"

    def _replace(self, groups: list[Group], parts: list[tuple[np.ndarray, int]]) -> None:
        self._groups = [group for group in self._groups if group not in groups]
        self._groups += [Group(numbers, place) for numbers, place in parts if len(numbers)]

    def _advance(self, group: Group) -> None:
        """Let a group run until it waits, ends or splits, or its time is over."""
        for _ in range(_QUANTUM):
            step = self._steps[group.place] or self._step(group.place)
            self._executed += 1
            if step.unit and step.unit not in group.whole:
                self._gather(group, step.unit)
                return
            active = group.threads
            if step.guard is not None:
                holds = step.guard[active] != step.is_negated
                if not holds.all():
                    if not holds.any():
                        group.place += 1
                        continue
                    active = group.numbers[holds]
            outcome = self._execute(step, group, active)
            if isinstance(outcome, int):
                group.place = outcome
                continue
            if isinstance(outcome, Wait):
                group.wait = outcome
            return

    def _execute(self, step: _Step, group: Group, active: Threads) -> int | Wait | str:
        """Where the group goes on; or why it does not."""
        self._place = group.place
        try:
            if step.choose is None:
                assert step.run is not None
                step.run(active)
                return group.place + 1
            outcome = step.choose(group, active)
            return group.place + 1 if outcome is None else outcome
        except Exception as error:
            error.add_note(f"in {self.program.name}, {group}: {step.text[:300]}")
            raise

    def _gather(self, group: Group, unit: str) -> None:
        """A group waits here for the rest of its warps or warpgroups."""
        key = ("whole", group.place)
        group.wait = Wait(key, lambda: f"waits for the rest of its {unit}s")
        here = [one for one in self._groups if one.waits_for(key)]
        numbers = _union(here, group.place)
        units, counts = np.unique(numbers // SIZES[unit], return_counts=True)
        is_full = np.isin(numbers // SIZES[unit], units[counts == SIZES[unit]])
        if is_full.any():
            wait, place = group.wait, group.place
            self._replace(here, [(numbers[is_full], place)])
            if not is_full.all():
                self._groups.append(Group(numbers[~is_full], place, wait))

    def _step(self, place: int) -> _Step:
        """An instruction, made ready when it runs for the first time."""
        step = self._steps[place]
        if step is None:
            instruction = self.program.instructions[place]
            guard = instruction.guard
            row = None if guard is None else self.registers.view(guard[0], "pred")
            is_negated = guard is not None and guard[1]
            step = _Step(*self._find(instruction), row, is_negated, instruction.text)
            self._steps[place] = step
        return step

    def _find(self, instruction: Instruction) -> Found:
        opcode = instruction.opcode
        for prefix, make in _MAKERS.items():
            if opcode == prefix or opcode.startswith(prefix + "."):
                return make(instruction, self)
        if opcode.startswith(_WITHOUT_EFFECT):
            return simple(lambda threads: None)
        run = arithmetic(instruction, self.registers)
        if run is None:
            raise NotImplementedError(f"the emulator has no {opcode}: {instruction.text[:200]}")
        return simple(run)


def _union(groups: list[Group], place: int) -> np.ndarray:
    """The threads of groups that are at one instruction."""
    return np.sort(np.concatenate([one.numbers for one in groups if one.place == place]))
