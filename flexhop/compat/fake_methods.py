"""Methods of tensors that start CUDA before they look at what kind of tensor they have.

In place of PyTorch's while code is generated for a GPU that is not there (fake_gpu.py). Names are
the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["copy", "getitem", "invert"]

_plain_getitem = torch.Tensor.__getitem__


def copy(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy in place."""
    return torch.ops.aten.copy_.default(into, source, non_blocking)


def getitem(values: torch.Tensor, items: Any) -> torch.Tensor:
    """Slices, None, `...`, numbers and index tensors, one dimension after the other."""
    if values.device.type != "cuda":
        return _plain_getitem(values, items)
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
    """Whether an item of an index leaves, or makes, a dimension."""
    return item is None or isinstance(item, (slice, torch.Tensor))


def invert(values: torch.Tensor) -> torch.Tensor:
    """Each bit turned, or each bool."""
    return torch.ops.aten.bitwise_not.default(values)
