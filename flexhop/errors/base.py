"""Exceptions whose message template is a class attribute, formatted with the facts; warnings."""

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


class FlexhopWarning(Worded, UserWarning):
    """Base class of flexhop's warnings; `warnings.warn(EagerWarning())`."""

    message = "flexhop warns."


class EagerWarning(FlexhopWarning):
    """A call without torch.compile, which is slow."""

    message = (
        "flex_attention called without torch.compile: it computes the scores in plain PyTorch, "
        "which is meant for debugging. Use torch.compile(flex_attention) for the fused kernels."
    )


class KernelFallbackWarning(FlexhopWarning):
    """A kernel failed to compile, so another one, or none, is used."""

    message = (
        "A flexhop kernel failed to compile, so another one runs instead, perhaps more slowly. "
        "Please report this with the mod and the shapes: {candidate}. FLEXHOP_STRICT=1 makes it "
        "an error."
    )


class OptionIgnoredWarning(FlexhopWarning):
    """Options that tune only PyTorch's kernels."""

    message = "Kernel options that tune only PyTorch's own kernels were ignored: {names}."


class TorchVersionWarning(FlexhopWarning):
    """A PyTorch version that flexhop was not tested with."""

    message = "flexhop supports torch {supported}, but this is {found}; it may not work."


class ReturnLseDeprecationWarning(FlexhopWarning, FutureWarning):
    """A deprecated argument."""

    message = "return_lse is deprecated; pass return_aux=AuxRequest(lse=True) instead."
