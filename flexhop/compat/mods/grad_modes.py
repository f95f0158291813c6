"""`torch.no_grad()` inside a mod, as a traced graph says it.

A trace into operators drops the switches of grad mode that Dynamo records, and derivatives of the
graph would go through what they enclose. Names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

__all__ = ["DetachMode"]


class DetachMode(TorchFunctionMode):
    """Detach what functions return while gradients are off; to trace a mod with gradients on."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the function."""
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            return result
        return pytree.tree_map_only(torch.Tensor, _detach, result)


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.detach.default(tensor) if tensor.is_floating_point() else tensor
