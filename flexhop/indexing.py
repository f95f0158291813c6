"""Indexing captured tensors with 0-d index tensors, traceable and without a host synchronisation.

`table[h, q_idx - kv_idx]` inside a mod indexes with 0-d tensors, which plain `Tensor.__getitem__`
turns
into `.item()`. `IndexMode` rewrites such reads to `aten.index`, which tracing, vmap and autograd
all carry.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _is_index_tensor(item: object) -> bool:
    return isinstance(item, Tensor) and not item.is_floating_point() and not item.is_complex()


def _index(tensor: Tensor, items: tuple[Any, ...]) -> Tensor:
    """tensor[items] for leading items that are 0-d integer tensors or ints."""
    device = next(item.device for item in items if isinstance(item, Tensor))
    indices = [
        torch.full((), item, dtype=torch.int32, device=device) if isinstance(item, int) else item
        for item in items
    ]
    return torch.ops.aten.index.Tensor(tensor, indices)


class IndexMode(TorchFunctionMode):
    """Rewrite `tensor[i, j, ...]` with 0-d integer tensors among the indices to `aten.index`."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Intercept `__getitem__`; everything else passes."""
        if func is torch.Tensor.__getitem__:
            tensor, items = args
            items = items if isinstance(items, tuple) else (items,)
            if tensor.dim() == 0 and items in ((), (Ellipsis,)):
                return tensor
            plain = all(
                _is_index_tensor(item) or (isinstance(item, int) and not isinstance(item, bool))
                for item in items
            )
            if plain and any(isinstance(item, Tensor) for item in items):
                return _index(tensor, items)
        return func(*args, **(kwargs or {}))
