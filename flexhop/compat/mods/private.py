"""Run a mod on values of its own: see writes.py. torch 2.11 to 2.15."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexhop.compat.mods.writes import Writes, written_by

__all__ = ["private"]


class _Written(BaseException):
    """A mod is about to write; no `except` of a user catches it."""


class _Notice(TorchFunctionMode):
    """Stops before the first write."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if written_by(func, args, kwargs or {}) is not None:
            raise _Written
        return func(*args, **(kwargs or {}))


class _Private(TorchFunctionMode):
    """Writes to values that a mod was given or made change them in this run alone."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self.own = {id(value): value for value in inputs}
        self.writes = Writes(self._call, _tensor, lambda value: id(value) not in self.own)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.writes.run(func, args, kwargs or {})

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        self.own |= {id(each): each for each in pytree.tree_leaves(result)}
        return result


def _tensor(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def private(mod: Callable[..., Any]) -> Callable[..., Any]:
    """The mod with operations that make new values in place of writes to its own ones.

    A mod that writes to nothing runs as it is, a mod that writes begins twice.
    """

    @functools.wraps(mod, updated=())
    def run(*inputs: Any) -> Any:
        try:
            with _Notice():
                return mod(*inputs)
        except _Written:
            with _Private(inputs) as mode:
                result = mod(*inputs)
        return mode.writes.latest(result)

    return run
