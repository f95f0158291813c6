"""Functions that capture torch.func's wrapper tensors, as functions of plain tensors.

Dynamo does not trace a function that captures such a tensor, or one inside a transform. Its
tensors are therefore replaced by plain ones of the same shape, and its outputs are converted back.
"""

from __future__ import annotations

import contextlib
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

from flexhop.compat.mods.held import Held
from flexhop.compat.operators.transforms import is_forward_mode, is_tracked

__all__ = [
    "Exchange",
    "apart",
    "are_tensors",
    "has_checkpoint_policy",
    "is_bare",
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
        self._originals: dict[int, Tensor] = {}
        self._plain: dict[int, Tensor] = {}
        self._alive: list[Tensor] = []  # ids are unique while tensors live
        # Modules as well: torch.func.functional_call exchanges their parameters.
        self._held = Held(self._stand_in, lambda value: True)

    def plain(self, value: Any) -> Any:
        """The same value with plain tensors; the value itself if it holds no others."""
        return self._held.map(value)

    def back(self, values: Any) -> Any:
        """Convert output tensors back."""
        return tree_map(
            lambda t: self._originals.get(id(t), t) if isinstance(t, Tensor) else t, values
        )

    def _stand_in(self, value: Tensor) -> Tensor:
        if not is_functorch_wrapped_tensor(value):
            return value
        if id(value) not in self._plain:
            plain = torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device=value.device
            )
            # Dynamo asks whether a torch.autograd.Function that reads it has a gradient.
            plain.requires_grad_(is_tracked(value))
            self._plain[id(value)], self._originals[id(plain)] = plain, value
            self._alive += [value, plain]
        return self._plain[id(value)]
