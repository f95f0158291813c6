"""Processes that prepare side by side, and then measure one after the other.

Compilation takes most of a benchmark's time and needs no GPU to itself; the measurement does. A
worker calls `wait_for_turn` when it is prepared, and prints its result with `answer`.
"""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

_READY, _ANSWER = "READY", "ANSWER "


def wait_for_turn() -> None:
    """Say that everything is prepared, and go on when nobody else measures."""
    print(_READY, flush=True)
    sys.stdin.readline()


def answer(result: dict[str, Any]) -> None:
    """Hand a worker's result over; a later one replaces it."""
    print(_ANSWER + json.dumps(result), flush=True)


def last_words(text: str) -> str:
    """The error in what a process wrote, or its last line."""
    lines = text.strip().splitlines() or ["without a word"]
    named = re.compile(r"(\[rank\d+\]: )?([\w.]*(Error|Exception)|[\w.]+\.[A-Z]\w+)\b")
    errors = [line for line in lines if named.match(line)]
    return (errors or lines)[-1][:300]


class _Worker(NamedTuple):
    process: subprocess.Popen[str]
    errors: Any  # the file of its stderr, which would fill a pipe

    def read(self, start: str) -> str:
        """Its next line that starts so; empty when it ended without one."""
        assert self.process.stdout is not None
        return next((line for line in self.process.stdout if line.startswith(start)), "")

    def finish(self) -> dict[str, Any] | str:
        """Let it measure: its result, or its last words."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        lines = [line for line in self.process.stdout if line.startswith(_ANSWER)]
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()
        if lines:
            return json.loads(lines[-1].removeprefix(_ANSWER))
        self.errors.seek(0)
        return f"process ended: {last_words(self.errors.read())}"


def _start(command: Sequence[str]) -> _Worker:
    errors = tempfile.TemporaryFile("w+")  # closed with the worker
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-m", *command], stdin=pipe, stdout=pipe, stderr=errors, text=True
    )
    return _Worker(process, errors)


def in_turn(
    commands: Sequence[Sequence[str]], at_once: int, seconds: float | None = None
) -> list[dict[str, Any] | str]:
    """What workers found, or the last words of those that died.

    Args:
        commands: a module and its options for each.
        at_once: how many prepare at a time; they measure when all of these are prepared.
        seconds: workers that run after this time are ended.
    """
    found: list[dict[str, Any] | str] = []
    started: list[_Worker] = []

    def end() -> None:
        for worker in started:
            worker.process.kill()

    timer = threading.Timer(seconds or 0.0, end)
    if seconds is not None:
        timer.start()
    for first in range(0, len(commands), at_once):
        workers = [_start(command) for command in commands[first : first + at_once]]
        started += workers
        for worker in workers:
            worker.read(_READY)
        found += [worker.finish() for worker in workers]
    timer.cancel()
    return found
