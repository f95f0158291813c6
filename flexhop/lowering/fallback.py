"""If a graph does not compile: once more with care, and once more without kernels.

Usually nothing here has an effect: kernels are compiled by Inductor's workers, after all of them
were chosen. If that, or the lowering, fails, the graph is lowered again. Then each candidate is
compiled at once, and one that fails makes room for the next: another tile, another dialect, the
definition by chunks. If that does not find the fault, the last attempt has the definition alone.
FLEXHOP_STRICT=1 makes the first failure an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from flexhop.compat import machine_code, retry
from flexhop.errors import FlexhopError, KernelFallbackWarning
from flexhop.lowering.problem import UNREAD, Problem

Stage = Literal["usual", "careful", "definition"]
R = TypeVar("R")
VARIABLE = "FLEXHOP_STRICT"
_MOST_WORDS = 200  # characters of a failure


class NoCandidate(Exception):
    """Every candidate of a kernel failed."""


class _State(threading.local):
    """Where the lowering of this thread stands: which attempt, and what failed in it."""

    stage: Stage = "usual"

    def __init__(self) -> None:
        self.failures: list[str] = []


_state = _State()
_known: dict[Problem, list[str]] = {}


def is_careful() -> bool:
    """Whether each candidate must be compiled before it is taken."""
    return _state.stage == "careful"


def is_without_kernels() -> bool:
    """Whether this attempt has the definition alone."""
    return _state.stage == "definition"


def is_strict() -> bool:
    """Whether the user wants a failure to be an error."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def attempt(words: str, make: Callable[[], R], problem: Problem | None = None) -> R | None:
    """What `make` gives, or None if it fails while the lowering is careful.

    Args:
        words: for the candidate, in warnings and reports.
        make: generates it.
        problem: of the call, so that `explain` can say what failed.
    """
    if not is_careful():
        return make()
    try:
        return make()
    except FlexhopError:
        raise  # what the user must know
    except Exception as error:  # of any kind: Inductor's, Triton's, ptxas', our own
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
    """Compile a graph once more, after `error`.

    Args:
        error: the first attempt's.
        again: compiles the graph.

    Raises:
        Exception: `error`, if nothing helps, or FLEXHOP_STRICT is set.
    """
    if is_strict() or isinstance(error.__cause__ or error, FlexhopError):
        raise error
    for stage in ("careful", "definition"):
        with _in_stage(stage) as failures:
            try:
                result = again()
            except Exception:  # the first error is reported if nothing helps
                continue
        if stage == "definition":
            failures = [f"kernels of a graph: {_first_line(error)}"]
        if failures:
            warnings.warn(KernelFallbackWarning(candidate="; ".join(failures)), stacklevel=2)
        return result
    raise error


@contextlib.contextmanager
def _in_stage(stage: Any) -> Iterator[list[str]]:
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
    """Candidates for calls like this that failed in this process, and why."""
    return tuple(_known.get(_key(problem), ()))


def forget() -> None:
    """Forget which candidates failed."""
    _known.clear()


def _key(problem: Problem) -> Problem:
    """The facts that forward and backward, and `explain`, see alike."""
    return dataclasses.replace(
        problem, grad=UNREAD, key_len_varies=False, bulk_obstacle="", tangents=()
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_MOST_WORDS]


def install() -> None:
    """Let Inductor ask `recover` when a graph with our operators does not compile."""
    retry.retry_graphs(recover)
