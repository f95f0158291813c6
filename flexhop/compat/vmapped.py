"""Reading with index tensors, and conversions, under `torch.vmap`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor


def index(tensor: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """`aten.index` of leading dimensions, under any number of vmaps.

    2.11 to 2.15: where tensors are fake, an index that is the same for all of a batch must not
    follow one of a batch, else the batching rule fails an assertion. What is the same for all goes
    first, with its dimension.

    Args:
        tensor: of at least as many dimensions as there are indices.
        indices: one for each leading dimension; 0-d where some are of a batch and some not.
    """
    batched = [is_batchedtensor(item) for item in indices]
    if any(batched) and not all(batched) and all(item.dim() == 0 for item in indices):
        order = sorted(range(len(indices)), key=batched.__getitem__)
        tensor = tensor.movedim(order, list(range(len(order))))
        indices = [indices[number] for number in order]
    return torch.ops.aten.index.Tensor(tensor, list(indices))


def convert(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`prims.convert_element_type` under any number of vmaps, for which it has no batching rule.

    PyTorch (2.11 to 2.15) would compute one element after the other, and warn.
    """
    if is_batchedtensor(tensor):
        return tensor.to(dtype)
    return torch.ops.prims.convert_element_type.default(tensor, dtype)
