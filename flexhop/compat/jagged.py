"""The ragged dimension of a jagged nested tensor, which has no public accessor.

2.11 to 2.15: `NestedTensor._ragged_idx`, an int that Dynamo reads as a constant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["is_jagged", "ragged_dim", "token_count"]


def is_jagged(tensor: Tensor) -> bool:
    """Whether a tensor is nested, of layout torch.jagged."""
    return tensor.is_nested and tensor.layout == torch.jagged


def ragged_dim(tensor: Tensor) -> int:
    """The ragged dimension of a jagged nested tensor, counted with the batch."""
    jagged: Any = tensor
    return int(jagged._ragged_idx)


def token_count(tensor: Tensor) -> int:
    """Tokens in the buffer of a jagged nested tensor, including holes."""
    return tensor.values().size(ragged_dim(tensor) - 1)
