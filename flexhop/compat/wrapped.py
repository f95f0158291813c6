"""Functions that capture torch.func's wrapper tensors, as functions of plain tensors.

Dynamo does not trace a function that captures such a tensor, or one inside a transform. Its
tensors are therefore replaced by plain ones of the same shape, and its outputs are converted back.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from flexhop.compat.transforms import is_forward_mode

__all__ = [
    "Exchange",
    "apart",
    "are_tensors",
    "has_checkpoint_policy",
    "is_bare",
    "is_filled",
    "is_quiet",
    "is_transformed",
]

_TENSORS = (Tensor, torch.nn.Parameter)
_PLAIN = (*_TENSORS, int, float, type(None))


def is_transformed() -> bool:
    """Whether a torch.func transform is active."""
    return peek_interpreter_stack() is not None


def is_bare(values: Iterable[Any]) -> bool:
    """Whether only reverse mode is active: no mode, transform or tensor subclass."""
    return _is_reverse_mode_alone() and all(type(t) in _PLAIN for t in values)


def are_tensors(values: Iterable[Any]) -> bool:
    """Whether values are tensors of no subclass, and of no transform, not even one that ended."""
    return all([type(t) in _TENSORS and not is_functorch_wrapped_tensor(t) for t in values])


def is_quiet() -> bool:
    """Whether nothing but autograd can see or change a call: no mode, transform, autocast or
    tracer."""
    return (
        _is_reverse_mode_alone()
        and not torch._C._is_any_autocast_enabled()
        and not torch._C._is_tracing()
        and _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY) is None
    )


def _is_reverse_mode_alone() -> bool:
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._is_torch_function_mode_enabled()
        and not is_transformed()
        and not is_forward_mode()
    )


def has_checkpoint_policy() -> bool:
    """Whether selective activation checkpointing asks a policy which results to keep."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    modes = _get_current_dispatch_mode_stack()
    return any(
        isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode)) for mode in modes
    )


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Temporarily leave every torch.func transform and every dispatch mode."""
    with contextlib.ExitStack() as stack:
        if is_transformed():
            stack.enter_context(temporarily_clear_interpreter_stack())
        if _get_current_dispatch_mode_stack():
            stack.enter_context(_disable_current_modes())
        yield


class Exchange:
    """Replaces wrapped tensors by plain ones, in everything that a function holds."""

    def __init__(self) -> None:
        """Start with none."""
        self.originals: dict[int, Tensor] = {}
        self.known: dict[int, Any] = {}
        self.alive: list[Any] = []  # ids are unique while objects live

    def plain(self, value: Any) -> Any:
        """The same value with plain tensors; the value itself if it holds no others."""
        if id(value) not in self.known:
            self.known[id(value)] = value  # in a cycle, values seen before stay as they are
            self.alive.append(value)
            self.known[id(value)] = self._plain(value)
        return self.known[id(value)]

    def back(self, values: Any) -> Any:
        """Convert output tensors back."""
        return tree_map(
            lambda t: self.originals.get(id(t), t) if isinstance(t, Tensor) else t, values
        )

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._stand_in(value) if is_functorch_wrapped_tensor(value) else value
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            function, args, keywords = map(self.plain, parts)
            changed = any(
                a is not b for a, b in zip((function, args, keywords), parts, strict=True)
            )
            return functools.partial(function, *args, **keywords) if changed else value
        if isinstance(value, types.MethodType):
            owner, function = self.plain(value.__self__), self.plain(value.__func__)
            is_same = owner is value.__self__ and function is value.__func__
            return value if is_same else types.MethodType(function, owner)
        if type(value) in (list, tuple):
            items = [self.plain(item) for item in value]
            is_same = all(a is b for a, b in zip(items, value, strict=True))
            return value if is_same else type(value)(items)
        if type(value) is dict:
            items = {key: self.plain(item) for key, item in value.items()}
            return value if all(items[key] is value[key] for key in value) else items
        return self._object(value)

    def _stand_in(self, value: Tensor) -> Tensor:
        plain = torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=value.device
        )
        self.originals[id(plain)] = value
        self.alive.append(plain)
        return plain

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        cells = value.__closure__ or ()
        held = [cell.cell_contents for cell in cells if is_filled(cell)]
        changed = [self.plain(item) for item in held]
        defaults, keywords = self.plain(value.__defaults__), self.plain(value.__kwdefaults__)
        is_same = all(a is b for a, b in zip(held, changed, strict=True))
        if is_same and defaults is value.__defaults__ and keywords is value.__kwdefaults__:
            return value
        rest = iter(changed)
        closure = tuple(types.CellType(next(rest)) if is_filled(c) else c for c in cells)
        made = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, defaults, closure
        )
        made.__kwdefaults__ = keywords
        return made

    def _object(self, value: Any) -> Any:
        """Replace in modules, whose parameters torch.func.functional_call exchanges, and in plain
        objects."""
        if isinstance(value, (type, types.ModuleType)) or not hasattr(value, "__dict__"):
            return value
        fields = self.plain(vars(value))
        if fields is vars(value):
            return value
        made = copy.copy(value)
        made.__dict__.update(fields)
        return made


def is_filled(cell: types.CellType) -> bool:
    """Whether a closure's cell has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a name that is assigned later
        return False
    return True
