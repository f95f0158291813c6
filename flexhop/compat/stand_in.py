"""Tensors without values, and a mode that sees every operator applied to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _disabled_torch_function_impl
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

_REFUSED = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)


class StandIn(Tensor):
    """A tensor with a shape, dtype and device but no values; usable only under `Watch`.

    2.11 to 2.15.
    """

    __torch_function__ = _disabled_torch_function_impl

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        """Make one."""
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a tensor that stands for a value, outside of its trace")


class Watch(TorchDispatchMode):
    """Calls `record(operator, args, kwargs)` in place of every operator."""

    def __init__(self, record: Callable[..., Any]) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._record(func, args, kwargs or {})


def reads_or_writes(operator: Any) -> bool:
    """Whether an operator reads a value, or changes a tensor in place."""
    return operator in _REFUSED or operator._schema.is_mutable


def is_random(operator: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has its own values: it is not fake, batched or of a subclass."""
    is_known = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return is_known and not is_functorch_wrapped_tensor(tensor) and not tensor.is_meta


def is_traced(tensor: Tensor) -> bool:
    """Whether a tensor belongs to one of PyTorch's traces and has no values yet."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor)) and not tensor.is_meta
