"""In-place operations inside a mod, as operations that make new values.

`score += bias[h]`, `score.clamp_(-1, 1)`, `row[0] = score`: a mod owns the tensors that it is
given and those that it makes. But an index is shared by all scores and may lack the dimensions of
what is added to it, autograd refuses writes to its leaves, and no kernel writes. So each write
makes a new value, and what follows reads that one instead. Names are the same in torch 2.11 to
2.15.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flexhop.compat.mods.indexing import is_placed, put
from flexhop.compat.storage import shares_memory

__all__ = ["UnknownWriteError", "Writes", "written_by"]

Function = Callable[..., Any]
_OPERATORS = {
    f"i{name.rstrip('_')}": getattr(operator, name)
    for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift",
        "rshift", "matmul",
    )
}  # fmt: skip
_OPERATORS |= {f"__{name}__": function for name, function in _OPERATORS.items()}
_SET = ("__setitem__", "setitem")
_READ = ("__getitem__", "getitem")
# Switches of autograd and the like: they change no value.
_NO_WRITES = ("requires_grad_", "share_memory_", "_set_grad_enabled", "rename_")
# Views with as many elements as their base, in the same order.
_RESHAPED = (
    "view", "reshape", "unsqueeze", "squeeze", "flatten", "ravel", "unflatten", "view_as",
    "reshape_as", "alias", "contiguous", "to", "float", "double", "type", "type_as",
)  # fmt: skip


class UnknownWriteError(Exception):
    """A write to a part of a tensor in a way that is not known; says to which."""


def name_of(function: Function) -> str:
    """The name of a function, method or overload, without the overload."""
    return getattr(function, "__name__", "").split(".")[0]


def written_by(function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operand that a call writes to, or None."""
    name = name_of(function)
    if kwargs.get("out") is not None:
        return kwargs["out"]
    if name in _NO_WRITES:
        return None
    is_method = getattr(function, "__module__", "") != operator.or_.__module__
    ends = is_method and name.endswith("_") and not name.endswith("__")
    if ends or name in _OPERATORS or name in _SET or _is_in_place(function, args, kwargs):
        return args[0] if args else kwargs.get("input", kwargs.get("self"))
    return None


def _is_in_place(function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function such as relu(x, inplace=True) writes to its first operand."""
    if "inplace" in kwargs:
        return bool(kwargs["inplace"])
    if not any(arg is True for arg in args[1:]):
        return False
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return dict(zip(names, args, strict=False)).get("inplace") is True


class Writes:
    """The latest value of everything that a mod has written to.

    Values are tensors, or nodes of a graph.
    """

    def __init__(
        self, call: Function, example: Callable[[Any], Any], is_capture: Callable[[Any], bool]
    ) -> None:
        """Begin a mod.

        Args:
            call: call(function, args, kwargs) evaluates a function of values.
            example: the tensor, perhaps fake, that a value is, or None.
            is_capture: whether a value belongs to others.
        """
        self.call = call
        self.example = example
        self.is_capture = is_capture
        self.values: dict[int, tuple[Any, Any]] = {}  # by id: an old value, kept alive; a new one
        self.views: list[_View] = []

    def latest(self, value: Any) -> Any:
        """What a value is now."""
        while id(value) in self.values:
            value = self.values[id(value)][1]
        return value

    def run(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Evaluate one call.

        Raises:
            UnknownWriteError: it writes to a part of a value in a way that is not known.
        """
        written = written_by(function, args, kwargs)
        if written is not None and self.example(written) is not None:
            source = self._source(self.latest(written))
            if not self.is_capture(source):
                self._write(function, written, args, kwargs)
                return None if name_of(function) in _SET else self.latest(written)
        args, kwargs = self._now((args, kwargs))
        result = self.call(function, args, kwargs)
        self._note_views(result, function, args, kwargs)
        return result

    def _now(self, tree: Any) -> Any:
        if isinstance(tree, (tuple, list)):
            parts = [self._now(part) for part in tree]
            if hasattr(tree, "_fields"):
                return type(tree)(*parts)
            return tuple(parts) if isinstance(tree, tuple) else parts
        if isinstance(tree, dict):
            return {name: self._now(part) for name, part in tree.items()}
        if isinstance(tree, slice):
            return slice(*map(self._now, (tree.start, tree.stop, tree.step)))
        return self.latest(tree)

    # Views: a write to one is a write to what it shows, and to all that show the same.

    def _note_views(self, result: Any, function: Function, args: Any, kwargs: Any) -> None:
        base = args[0] if args else None
        found = [result] if not isinstance(result, (tuple, list)) else result
        for position, each in enumerate(found):
            if each is base or self.example(each) is None or self.example(base) is None:
                continue
            if shares_memory(self.example(each), self.example(base)):
                place = position if found is result else None
                self.views.append(_View(each, base, function, tuple(args[1:]), kwargs, place))

    def _view(self, value: Any) -> _View | None:
        return next((view for view in self.views if self.latest(view.value) is value), None)

    def _source(self, value: Any) -> Any:
        """What a value is a view of, in the end."""
        view = self._view(value)
        return value if view is None else self._source(self.latest(view.base))

    def _write(
        self, function: Function, written: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        old = self.latest(written)
        source = self._source(old)
        new = self._conform(self._value(function, old, *self._now((args, kwargs))), old)
        while (view := self._view(old)) is not None:
            base = self.latest(view.base)
            new, old = self._placed(view, base, new), base
        self._set(old, new)
        for view in self.views:  # in the order in which they were made
            base, value = self.latest(view.base), self.latest(view.value)
            if self._source(value) is self.latest(source) and value is not base:
                self._set(value, view.again(self.call, base))

    def _set(self, old: Any, new: Any) -> None:
        if new is old or self.latest(new) is old:  # score.copy_(score)
            new = self.call(torch.clone, (old,), {})
        self.values[id(old)] = (old, new)

    def _placed(self, view: _View, base: Any, value: Any) -> Any:
        """The base of a view after the view has got a value."""
        name = name_of(view.function)
        if name in _READ:
            items = view.args[0] if isinstance(view.args[0], tuple) else (view.args[0],)
            return self._with_part(base, items, value)
        if name in _RESHAPED:
            return self.call(torch.reshape, (value, tuple(self.example(base).shape)), {})
        if name == "select":
            return self.call(torch.select_scatter, (base, value, *view.args), view.kwargs)
        raise UnknownWriteError(f"the result of {name}")

    # New values.

    def _value(self, function: Function, old: Any, args: Any, kwargs: Any) -> Any:
        """What a call writes, perhaps in another shape or dtype."""
        name = name_of(function)
        if name in _SET:
            items = args[1] if isinstance(args[1], tuple) else (args[1],)
            return self._with_part(old, items, args[2])
        if kwargs.get("out") is not None:
            return self.call(function, args, {n: v for n, v in kwargs.items() if n != "out"})
        if name in _OPERATORS:
            return self.call(_OPERATORS[name], args, kwargs)
        if name in ("fill_", "copy_", "zero_"):
            return 0 if name == "zero_" else args[1]
        if name.endswith("_"):
            return self.call(_without_underscore(function, name), args, kwargs)
        return self.call(function, *_not_in_place(function, args, kwargs))

    def _with_part(self, old: Any, items: tuple[Any, ...], value: Any) -> Any:
        """`old` after old[items] = value."""
        if is_placed(self.example(old), tuple(map(self._shown, items))):
            return self.call(put, (old, items, value), {})
        items = tuple(item for item in items if item is not None and item is not Ellipsis)
        if all(item == slice(None) for item in items):
            return self._conform(value, old)
        first, *rest = items
        if not isinstance(first, int) or isinstance(first, bool):
            raise UnknownWriteError("a part of a tensor")
        part = self.call(torch.select, (old, 0, first), {})
        part = self._conform(self._with_part(part, tuple(rest), value), part)
        return self.call(torch.select_scatter, (old, part, 0, first), {})

    def _shown(self, item: Any) -> Any:
        example = self.example(item)
        return item if example is None else example

    def _conform(self, value: Any, old: Any) -> Any:
        """A value in the shape and dtype of what it replaces."""
        like, found = self.example(old), self.example(value)
        if found is None:
            return self.call(torch.full_like, (old, value), {})
        if found.dtype != like.dtype:
            if not torch.can_cast(found.dtype, like.dtype):
                raise RuntimeError(
                    f"result type {found.dtype} can't be cast to the desired output type "
                    f"{like.dtype}"
                )
            value = self.call(torch.Tensor.to, (value, like.dtype), {})
        if found.shape != like.shape:
            value = self.call(torch.Tensor.expand, (value, tuple(like.shape)), {})
        return value


class _View(NamedTuple):
    """A view: function(base, *args, **kwargs), or the part of it at a position."""

    value: Any
    base: Any
    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int | None

    def again(self, call: Function, base: Any) -> Any:
        """The same view of another base."""
        found = call(self.function, (base, *self.args), self.kwargs)
        return found if self.place is None else found[self.place]


def _without_underscore(function: Function, name: str) -> Function:
    """The function that computes what another writes, such as torch.Tensor.add of add_."""
    plain = name[:-1]
    if isinstance(function, torch._ops.OpOverload):
        packet = getattr(torch.ops.aten, plain)
        return getattr(packet, function._overloadname)
    for place in (torch.Tensor, torch, torch.nn.functional):
        if hasattr(place, plain):
            return getattr(place, plain)
    raise UnknownWriteError(f"{name}")


def _not_in_place(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if "inplace" in kwargs:
        return args, {**kwargs, "inplace": False}
    place = list(inspect.signature(function).parameters).index("inplace")
    return (*args[:place], False, *args[place + 1 :]), kwargs
