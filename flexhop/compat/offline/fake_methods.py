"""Tensor methods that initialise CUDA before they check the kind of tensor, or that name a CPU.

They replace PyTorch's while code is generated for an absent GPU (fake_gpu.py). Names are the same
in torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

__all__ = ["Slices", "claims_gpu", "copy", "invert"]


def copy(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy in place."""
    return torch.ops.aten.copy_.default(into, source, non_blocking)


class Slices(TorchFunctionMode):
    """Indexing of tensors on the GPU.

    A mode, because `__getitem__` cannot be patched: once it is set in the class and removed again,
    CPython treats tensors as sequences, and torch.tensor([a, b]) fails.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Intercept reads and writes of parts of tensors on the GPU, and `new_tensor`."""
        if function is torch.Tensor.__getitem__ and args[0].device.type == "cuda":
            return _getitem(*args)
        if function is torch.Tensor.__setitem__ and args[0].device.type == "cuda":
            return _setitem(*args)
        if function is torch.Tensor.new_tensor and args[0].device.type == "cuda":
            form = {"dtype": args[0].dtype, "device": args[0].device, **(kwargs or {})}
            return torch.tensor(*args[1:], **form)
        if function is torch.Tensor.to and not isinstance(args[0], FakeTensor):
            if any(_is_gpu(given) for given in (*args[1:], *(kwargs or {}).values())):
                return args[0].clone()  # a constant of the program: only its name is in the code
        return function(*args, **(kwargs or {}))


def _is_gpu(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def _setitem(values: torch.Tensor, items: Any, source: Any) -> None:
    """Write to a view."""
    part = _getitem(values, items)
    if isinstance(source, torch.Tensor):
        torch.ops.aten.copy_.default(part, source)
    else:
        torch.ops.aten.fill_.Scalar(part, source)


def _getitem(values: torch.Tensor, items: Any) -> torch.Tensor:
    """Slices, None, `...`, numbers and index tensors, one dimension after the other."""
    spelled = list(items) if isinstance(items, tuple) else [items]
    named = sum(item is not None and item is not Ellipsis for item in spelled)
    if Ellipsis not in [item for item in spelled if not isinstance(item, torch.Tensor)]:
        spelled.append(Ellipsis)
    where = next(n for n, item in enumerate(spelled) if item is Ellipsis)
    spelled[where : where + 1] = [slice(None)] * (values.dim() - named)
    axis, indices = 0, []
    for item in spelled:
        if item is None:
            values = values.unsqueeze(axis)
        elif isinstance(item, slice):
            values = torch.ops.aten.slice.Tensor(values, axis, item.start, item.stop)
        elif not isinstance(item, torch.Tensor):
            values, axis = values.select(axis, item), axis - 1
        axis += 1
        indices.append(item if isinstance(item, torch.Tensor) else None)
    if all(item is None for item in indices):
        return values
    kept = [item for item, given in zip(indices, spelled, strict=True) if _keeps(given)]
    return torch.ops.aten.index.Tensor(values, kept)


def _keeps(item: Any) -> bool:
    """Whether an item of an index keeps or adds a dimension."""
    return item is None or isinstance(item, (slice, torch.Tensor))


def invert(values: torch.Tensor) -> torch.Tensor:
    """Invert each bit, or each bool."""
    return torch.ops.aten.bitwise_not.default(values)


@contextlib.contextmanager
def claims_gpu() -> Iterator[None]:
    """Let fake tensors say that they are on a GPU, to decompositions that ask.

    `log_sigmoid` has another result there, for example. Their device stays the CPU.
    """
    with contextlib.ExitStack() as stack:
        for name, answer in {"is_cuda": True, "is_cpu": False}.items():
            stack.enter_context(mock.patch.object(FakeTensor, name, answer, create=True))
        yield
