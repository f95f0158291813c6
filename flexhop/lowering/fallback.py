"""If a graph does not compile, retry: first carefully, then without kernels.

Usually nothing here has an effect: Inductor's workers compile kernels after all of them were
chosen. If that, or the lowering, fails, the graph is lowered again. Then each candidate is
compiled at once. If one fails, the next is tried: another tile, another dialect, the chunked
reference. If that does not help, the last attempt uses only the reference. FLEXHOP_STRICT=1 turns
the first failure into an error. A compiler that aborts is a failure (compat/kernels/isolated.py).

Nothing is written down for other processes: Inductor's cache keeps the graph that compiled, so the
next process loads it and compiles no candidate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import warnings
from collections.abc import Callable, Generator
from typing import Any, Literal, TypeVar

from flexhop.compat.graphs import retry
from flexhop.compat.kernels import machine_code
from flexhop.errors import FlexhopError, KernelFallbackWarning
from flexhop.lowering.problem import UNREAD, Problem

Stage = Literal["usual", "careful", "definition"]
R = TypeVar("R")
VARIABLE = "FLEXHOP_STRICT"
_MOST_WORDS = 200  # most characters of a failure message


class NoCandidate(Exception):
    """Every candidate of a kernel failed."""


class _State(threading.local):
    """This thread's state: the current attempt, and its failures."""

    stage: Stage = "usual"

    def __init__(self) -> None:
        self.failures: list[str] = []


_state = _State()
_known: dict[Problem, list[str]] = {}


def is_careful() -> bool:
    """Whether each candidate must compile before it is chosen."""
    return _state.stage == "careful"


def is_without_kernels() -> bool:
    """Whether this attempt uses only the reference."""
    return _state.stage == "definition"


def is_strict() -> bool:
    """Whether failures are errors (FLEXHOP_STRICT)."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def attempt(words: str, make: Callable[[], R], problem: Problem | None = None) -> R | None:
    """The result of `make`, or None if it fails in careful mode.

    Args:
        words: name of the candidate, for warnings and reports.
        make: generates it.
        problem: the call's problem, so that `explain` can report failures.
    """
    if not is_careful():
        return make()
    try:
        return make()
    except FlexhopError:
        raise  # errors for the user
    except Exception as error:  # any error: Inductor's, Triton's, ptxas', our own
        if not isinstance(error, NoCandidate):
            _note(f"{words}: {_first_line(error)}", problem)
        return None


def check_compiles(choice: Any, problem: Problem) -> None:
    """Compile a candidate now.

    Raises:
        Exception: it does not compile, or needs more shared memory than there is.
    """
    needed = machine_code.shared_memory(choice)
    if needed > problem.device.shared_memory:
        raise NoRoom(
            f"it needs {needed} bytes of shared memory, but the GPU has "
            f"{problem.device.shared_memory}"
        )


class NoRoom(Exception):
    """A candidate needs more than a GPU has."""


def recover(error: Exception, again: Callable[[], R]) -> R:
    """Compile a graph again, after `error`.

    Args:
        error: the error of the first attempt.
        again: compiles the graph.

    Raises:
        Exception: `error`, if nothing helps, or FLEXHOP_STRICT is set.
    """
    # An error that tells the user what to change is not retried.
    if is_strict() or isinstance(error.__cause__ or error, FlexhopError):
        raise error
    for stage in ("careful", "definition"):
        with _in_stage(stage) as failures:
            try:
                result = again()
            except Exception:  # if nothing helps, the first error is raised
                continue
        if stage == "definition":
            failures = [f"kernels of a graph: {_first_line(error)}"]
        if failures:
            warnings.warn(KernelFallbackWarning(candidate="; ".join(failures)), stacklevel=2)
        return result
    raise error


@contextlib.contextmanager
def _in_stage(stage: Any) -> Generator[list[str], None, None]:
    before = _state.stage, _state.failures
    _state.stage, _state.failures = stage, []
    try:
        yield _state.failures
    finally:
        _state.stage, _state.failures = before


def _note(words: str, problem: Problem | None) -> None:
    if words not in _state.failures:
        _state.failures.append(words)
    if problem is not None:
        known = _known.setdefault(_key(problem), [])
        if words not in known:
            known.append(words)


def known_failures(problem: Problem) -> tuple[str, ...]:
    """Candidates for such calls that failed in this process, and why."""
    return tuple(_known.get(_key(problem), ()))


def forget() -> None:
    """Forget which candidates failed."""
    _known.clear()


def _key(problem: Problem) -> Problem:
    """The facts that are the same in forward, backward and `explain`."""
    # Facts that only one direction or only the compiler knows must not hide a failure.
    return dataclasses.replace(
        problem,
        grad=UNREAD,
        key_len_varies=False,
        bulk_obstacle="",
        tangents=(),
        value_is_key=False,
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_MOST_WORDS]


def install() -> None:
    """Make Inductor call `recover` if a graph with our operators does not compile."""
    retry.retry_graphs(recover)
