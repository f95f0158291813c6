"""Exceptions whose message template is a class attribute, formatted with the facts."""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Iterable
from operator import index
from typing import Any, ClassVar

import torch


class Worded(BaseException):
    """An exception whose text is `message`, formatted with its facts."""

    message: ClassVar[str]
    _names: ClassVar[set[str]]  # in `message`; read once, because Dynamo cannot trace the reading

    def __init_subclass__(cls) -> None:
        cls._names = {name for _, name, _, _ in string.Formatter().parse(cls.message) if name}

    def __init__(self, **facts: object) -> None:
        self.facts = facts
        words = self.words()
        if self._names != set(words):
            names = sorted(self._names)
            raise TypeError(f"{type(self).__name__} tells {names}, not {sorted(words)}")
        # Not super().__init__(...), which Dynamo cannot trace for an exception.
        self.args = (self.message.format(**words),)

    def words(self) -> dict[str, object]:
        """The values for `message`: the facts, unless a class formats them differently."""
        return self.facts

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the facts; the text is formatted again."""
        return functools.partial(type(self), **self.facts), (), self.__dict__


class FlexhopError(Worded, Exception):
    """Base of every error that flexhop raises on purpose."""

    message = "flexhop failed."
    # Raises an error in code that Dynamo traces; compat/dynamo/hooks.py sets it.
    refuse: ClassVar[Callable[[type[FlexhopError], dict[str, Any]], None] | None] = None

    def __init__(self, **facts: object) -> None:
        if torch.compiler.is_dynamo_compiling() and FlexhopError.refuse is not None:
            numbers = {name: index(n) for name, n in facts.items() if type(n) is int}
            FlexhopError.refuse(type(self), facts | numbers)  # without symbols
        Worded.__init__(self, **facts)


def shape_text(sizes: Iterable[Any]) -> str:
    """Sizes as in "[2, 4, 128]".

    Under dynamic shapes, Dynamo (2.11, 2.13) can format a size, but no tuple of sizes.
    """
    text = ", ".join([f"{int(size)}" for size in sizes])
    return f"[{text}]"
