"""What is kept with a function that comes again and again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

__all__ = ["is_marked", "keeping", "kept", "mark", "remember"]

_KEY = "flexhop_kept"
F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")


def mark(function: F) -> F:
    """Note that later calls will hand out the same object, so that work on it can be kept."""
    if not is_marked(function):
        setattr(function, _KEY, {})
    return function


def is_marked(function: Any) -> bool:
    """Whether `mark` was called with it."""
    return hasattr(function, _KEY)


def kept(function: Any) -> dict[Hashable, Any]:
    """Where results that belong to a marked function are kept. They live as long as it does."""
    return getattr(function, _KEY)


def keeping(key: Hashable, function: Any, make: Callable[[], Any]) -> Any:
    """What `make` returned the first time for a marked function; for others it is called."""
    if not is_marked(function):
        return make()
    known = kept(function)
    if key not in known:
        known[key] = make()
    return known[key]


def remember(known: dict[Hashable, V], key: Hashable, value: V, most: int) -> V:
    """Enter a value among at most so many; the oldest makes room."""
    if len(known) >= most:
        del known[next(iter(known))]
    known[key] = value
    return value
