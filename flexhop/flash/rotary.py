"""Rotary position embedding, as flash-attn's cache function applies it."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate pairs of columns by the angles of their token's position.

    Args:
        x: [B, S, H, D]. The first R columns are rotated, the others stay.
        cos, sin: [P, R / 2], by position and pair.
        positions: [B, S] integers, or [B, 1] for one position per sequence.
        interleaved: pairs are columns (0, 1), (2, 3), ...; otherwise (0, R/2), (1, R/2 + 1), ...

    Returns:
        x's shape and dtype; computed in fp32, or fp64 for fp64.

    Source: Su et al. 2021, RoFormer (arXiv 2104.09864), equation 34.
    """
    width = 2 * cos.size(1)
    wide = torch.promote_types(x.dtype, torch.float32)
    cosines, sines = (t[positions][:, :, None].to(wide) for t in (cos, sin))
    turned = x[..., :width].to(wide)
    pairs = (-1, 2) if interleaved else (2, -1)
    axis = -1 if interleaved else -2
    first, second = turned.unflatten(-1, pairs).unbind(axis)
    rotated = (first * cosines - second * sines, first * sines + second * cosines)
    turned = torch.stack(rotated, axis).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., width:]), -1)
