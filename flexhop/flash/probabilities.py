"""The softmax weights, signed by dropout, that flash-attn returns for tests.

They come from the operator itself: attention to the columns of an identity gives the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexhop.ops.call import MAX_HEAD_DIM
from flexhop.ops.dropout_seed import Dropout, dropout_mask


def signed_probabilities(
    weigh: Callable[[Tensor], Tensor],
    like: Tensor,
    sizes: tuple[int, int, int, int],
    drop: Dropout,
) -> Tensor:
    """Softmax weights, negative if dropped.

    Args:
        weigh: attention without dropout, to values [N, at most 576]: [B, Hq, M, as many].
        like: a tensor with the dtype and device of the values.
        sizes: B, Hq, M, N.
        drop: the call's dropout, with its seed.

    Returns:
        [B, Hq, M, N].
    """
    assert drop.seed is not None
    columns = torch.eye(sizes[3], dtype=like.dtype, device=like.device).split(MAX_HEAD_DIM, 1)
    weights = torch.cat([weigh(part.contiguous()) for part in columns], -1)
    return torch.where(dropout_mask(drop.seed, drop.p, sizes), weights, -weights)


def unpack_rows(
    packed: Tensor, offsets: tuple[Tensor, Tensor], longest: tuple[int, int]
) -> Tensor:
    """Convert [H, T, U] of packed tokens to [S, H, longest query, longest key], padded with 0."""
    rows, has_row = _places(offsets[0], longest[0], packed.size(1))
    columns, has_column = _places(offsets[1], longest[1], packed.size(2))
    picked = packed[:, rows[:, :, None], columns[:, None, :]].transpose(0, 1)
    exists = has_row[:, None, :, None] & has_column[:, None, None, :]
    return torch.where(exists, picked, 0.0)


def _places(offsets: Tensor, longest: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Index of each token of each sequence, [S, longest], and whether it exists."""
    place = offsets[:-1, None] + torch.arange(longest, device=offsets.device)
    return place.clamp(max=tokens - 1), place < offsets[1:, None]
