"""What Triton's interpreter makes for every operation, made once: types, shapes, checks of types.

Most operations of a kernel have few elements, and cost what Triton does in Python around them.
Triton 3.6 to 3.9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from flexhop.offline.quick_operators import quick

__all__ = ["bind", "repairs"]

# The code that every function marked as a builtin shares.
_BUILTIN = tl.core.builtin(lambda: None).__code__
_NUMBERS = (tl.float32, tl.int32, tl.int1, tl.int64, tl.float64)


def repairs() -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and replacement of each function."""
    yield tl.tensor, "__init__", _make_tensor(tl.tensor.__init__)
    yield tl.block_type, "__init__", _make_block_type(tl.block_type.__init__)
    # The interpreter's builder makes the same type once more.
    yield tl.block_type, "to_ir", lambda self, builder: self
    semantic = TritonSemantic
    yield semantic, "broadcast_impl_value", _broadcast(semantic.broadcast_impl_value)
    original = semantic.binary_op_type_checking_impl
    yield semantic, "binary_op_type_checking_impl", _check_types(original)


def bind(member: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the language, usable outside of a kernel."""
    # Without the check that it is used inside.
    is_plain = getattr(member, "__code__", None) is _BUILTIN
    function = member.__wrapped__ if is_plain else member  # type: ignore[attr-defined]

    def call(*args: Any, **keywords: Any) -> Any:
        keywords["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **keywords)

    return quick(member, call)


def _make_tensor(original: Callable[..., None]) -> Callable[..., None]:
    """All that a tensor has but its values follows from its type."""
    scalars: dict[str, dict[str, Any]] = {}

    def make(self: Any, handle: Any, type: Any) -> None:
        if type.__class__ is tl.dtype:
            kept = scalars.setdefault(type.name, {})
        else:
            kept = type.__dict__.get("_kept")
        if kept:
            self.__dict__.update(kept)
            self.handle = handle
            return
        original(self, handle, type)
        if kept is not None:
            kept.update(vars(self))
            del kept["handle"]

    return make


def _make_block_type(original: Callable[..., None]) -> Callable[..., None]:
    """A block type of numbers follows from a name and a few lengths."""
    known: dict[Any, dict[str, Any]] = {}

    def make(self: Any, element_ty: Any, shape: Any) -> None:
        if element_ty.__class__ is not tl.dtype:
            original(self, element_ty, shape)
            return
        lengths = (n.value if isinstance(n, tl.constexpr) else n for n in shape)
        key = (element_ty.name, *lengths)
        if key not in known:
            original(self, element_ty, shape)
            known[key] = {**vars(self), "_kept": {}}  # for tensors of this type
        self.__dict__.update(known[key])

    return make


def _broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast(self: Any, left: Any, right: Any) -> Any:
        is_block = left.type.is_block()
        if is_block == right.type.is_block() and (not is_block or _have_one_shape(left, right)):
            return left, right
        return original(self, left, right)

    return broadcast


def _is_block(value: tl.tensor) -> bool:
    return isinstance(value.type, tl.block_type)


def _check_types(original: Callable[..., Any]) -> Callable[..., Any]:
    """Two blocks of one type stay as they are; only quotients of narrow floats get another."""

    def check(self: Any, left: Any, right: Any, *flags: Any, **named: Any) -> Any:
        if isinstance(left, tl.tensor) and isinstance(right, tl.tensor):
            is_one = left.dtype is right.dtype and left.dtype in _NUMBERS
            if is_one and _is_block(left) and _is_block(right):
                if _have_one_shape(left, right):
                    return left, right
        return original(self, left, right, *flags, **named)

    return check


def _have_one_shape(left: Any, right: Any) -> bool:
    return left.type.shape.values == right.type.shape.values
