"""Results cached on functions that later calls reuse."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

__all__ = ["is_marked", "keeping", "kept", "mark", "remember"]

_KEY = "flexhop_kept"
F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")


def mark(function: F) -> F:
    """Mark a function that later calls will pass again, so results can be cached on it."""
    if not is_marked(function):
        setattr(function, _KEY, {})
    return function


def is_marked(function: Any) -> bool:
    """Whether `mark` was called with it."""
    return hasattr(function, _KEY)


def kept(function: Any) -> dict[Hashable, Any]:
    """The cache of a marked function. It lives as long as the function."""
    return getattr(function, _KEY)


def keeping(key: Hashable, function: Any, make: Callable[[], Any]) -> Any:
    """The cached result of `make` for a marked function; for others, call it."""
    if not is_marked(function):
        return make()
    known = kept(function)
    if key not in known:
        known[key] = make()
    return known[key]


def remember(known: dict[Any, V], key: Hashable, value: V, most: int) -> V:
    """Insert a value into a cache of limited size; evicts the oldest."""
    if len(known) >= most:
        del known[next(iter(known))]
    known[key] = value
    return value
