"""Tensors without values, and a mode that sees every operator applied to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import _disabled_torch_function_impl
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from flexhop.compat.modes import DispatchMode

_BEFORE_DISPATCH = torch._C.DispatchKey.PreDispatch
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


class Watch(DispatchMode):
    """Calls `record(operator, args, kwargs)` in place of every operator.

    torch.export records operators before dispatch, above every mode. `record` is called in that
    state again; the watched code is not, since export's trace refuses stand-ins. 2.11 to 2.15.
    """

    def __init__(self, record: Callable[..., Any]) -> None:
        super().__init__()
        self._record = record

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A region in which this mode sees every operator, also under torch.export."""
        included = torch._C._dispatch_tls_local_include_set()
        self._is_exporting = included.has(_BEFORE_DISPATCH)
        with _included(included.remove(_BEFORE_DISPATCH)), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_exporting:
            return self._record(func, args, kwargs or {})
        included = torch._C._dispatch_tls_local_include_set()
        with _included(included | torch._C.DispatchKeySet(_BEFORE_DISPATCH)):
            return self._record(func, args, kwargs or {})


def _included(keys: Any) -> contextlib.AbstractContextManager[Any]:
    """A region that runs with these dispatch keys added to those of tensors."""
    return torch._C._ForceDispatchKeyGuard(keys, torch._C._dispatch_tls_local_exclude_set())


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
