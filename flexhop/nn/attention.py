"""A transformer layer's attention: projections, with flex_attention in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexhop.attention import flex_attention
from flexhop.block_mask import BlockMask
from flexhop.errors import ModArgumentError
from flexhop.mods.functions import ScoreMod


class Attention(nn.Module):
    """Multi-head attention with your own score and mask functions.

    Under `torch.compile`, attention is one fused kernel; the projections are plain linear layers.
    Sizes: B batches, M queries, N keys, width W, head size D.

    Args:
        width: W, features per token.
        heads: number of query heads.
        kv_heads: number of key heads, a divisor of `heads`; `heads` by default.
        head_dim: D; W / heads by default.
        bias: whether the projections have biases.
        rotary_base: base of rotary position embedding, usually 10000; None: no rotation. Pairs are
            the two halves of a head, as in Llama.
        qk_norm: normalize each query and key over D (RMSNorm), before the rotation.
        sinks: learn one logit per head that takes part in the softmax but has no value, as in
            gpt-oss.
        dropout: probability of dropping a softmax weight in training.
        device, dtype: device and dtype of the parameters.

    Raises:
        ModArgumentError: sizes that do not divide, an odd D with rotary embedding, or a base that
            is not positive.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        rotary_base: float | None = None,
        qk_norm: bool = False,
        sinks: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        self.head_dim = _head_dim(width, heads, self.kv_heads, head_dim, rotary_base)
        self.rotary_base, self.dropout = rotary_base, dropout
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        linear = {"bias": bias, **make}
        self.query = nn.Linear(width, heads * self.head_dim, **linear)
        self.key = nn.Linear(width, self.kv_heads * self.head_dim, **linear)
        self.value = nn.Linear(width, self.kv_heads * self.head_dim, **linear)
        self.out = nn.Linear(heads * self.head_dim, width, **linear)
        self.query_norm = nn.RMSNorm(self.head_dim, **make) if qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(self.head_dim, **make) if qk_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(heads, **make)) if sinks else None

    def forward(
        self,
        hidden: Tensor,
        context: Tensor | None = None,
        *,
        score_mod: ScoreMod | None = None,
        block_mask: BlockMask | Any | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        kernel_options: Any = None,
    ) -> Tensor:
        """Attend.

        Args:
            hidden: [B, M, W], the source of queries.
            context: [B, N, W], the source of keys and values; `hidden` by default.
            score_mod, block_mask, kernel_options: as for `flex_attention`. Without a mask, every
                query sees every key.
            positions: [M] or [B, M] integers, the tokens' positions, for the rotation. By default
                0 to M - 1, or continuing after the cached tokens.
            cache: keys and values of earlier tokens. The new ones are added, and queries see all
                slots of the cache: pass a block_mask that hides the empty ones.

        Returns:
            [B, M, W].
        """
        source = hidden if context is None else context
        query = self.query_norm(self._heads(self.query(hidden)))
        key, value = self.key_norm(self._heads(self.key(source))), self._heads(self.value(source))
        if self.rotary_base is not None:
            if positions is None:
                positions = torch.arange(hidden.size(-2), device=hidden.device)
                positions = positions if cache is None else positions + cache.length
            query = rotate(query, positions, self.rotary_base)
            key = rotate(key, positions, self.rotary_base)
        if cache is not None:
            key, value = cache.add(key, value)
        mixed = flex_attention(
            query, key, value, score_mod=score_mod, block_mask=block_mask,
            enable_gqa=self.heads != self.kv_heads, kernel_options=kernel_options,
            sinks=self.sinks, dropout_p=self.dropout if self.training else 0,
        )  # fmt: skip
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, rows: Tensor) -> Tensor:
        """[B, S, H * D] as [B, H, S, D]."""
        return rows.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)

    def extra_repr(self) -> str:
        """The sizes."""
        rotary = "" if self.rotary_base is None else f", rotary_base={self.rotary_base}"
        sizes = f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"
        return f"{sizes}{rotary}, dropout={self.dropout}"


class Cache(nn.Module):
    """Keys and values of the tokens so far, in tensors of a fixed size.

    Addresses and shapes never change, so a CUDA graph can capture a step. The mask of a step that
    adds tokens:

        mask_mod = flexhop.masks.causal_with_offset(cache.length)

    Args:
        batch: B.
        kv_heads: key heads of the attention.
        capacity: N, the most tokens that it can hold.
        head_dim: D.
        device, dtype: device and dtype of keys and values.
    """

    keys: Tensor
    values: Tensor
    length: Tensor

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shape = (batch, kv_heads, capacity, head_dim)
        for name in ("keys", "values"):
            zeros = torch.zeros(shape, device=device, dtype=dtype)
            self.register_buffer(name, zeros, persistent=False)
        length = torch.zeros((), dtype=torch.int64, device=device)
        self.register_buffer("length", length, persistent=False)

    def add(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, H, M, D]; return all keys and values, [B, H, N, D].

        `advance` updates `length`, once for all layers of a step that share a length.
        """
        where = torch.arange(key.size(2), device=key.device) + self.length
        self.keys.index_copy_(2, where, key.to(self.keys.dtype))
        self.values.index_copy_(2, where, value.to(self.values.dtype))
        return self.keys, self.values

    def advance(self, tokens: int) -> None:
        """Count the tokens of a step; call it after the step."""
        self.length += tokens

    def clear(self) -> None:
        """Remove all tokens."""
        self.length.zero_()


def rotate(heads: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary embedding of [B, H, S, D]; positions [S] or [B, S].

    Source: Su et al. 2021 (arXiv 2104.09864), with the halves of Llama as pairs.
    """
    half = heads.size(-1) // 2
    steps = torch.arange(half, device=heads.device, dtype=torch.float32) / half
    angle = positions[..., None] * base**-steps
    if angle.dim() == 3:
        angle = angle[:, None]
    cos, sin = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def _head_dim(
    width: int, heads: int, kv_heads: int, head_dim: int | None, rotary_base: float | None
) -> int:
    if heads < 1:
        raise _error("heads", heads, "at least 1")
    if kv_heads < 1 or heads % kv_heads:
        raise _error("kv_heads", kv_heads, f"a divisor of {heads}, the number of heads")
    if head_dim is None and width % heads:
        raise _error("heads", heads, f"a divisor of the width {width}, unless head_dim is given")
    size = width // heads if head_dim is None else head_dim
    if size < 1:
        raise _error("head_dim", size, "at least 1")
    if rotary_base is not None and not rotary_base > 0:
        raise _error("rotary_base", rotary_base, "positive")
    if rotary_base is not None and size % 2:
        raise _error("head_dim", size, "even, because rotary embedding needs pairs")
    return size


def _error(argument: str, value: float, allowed: str) -> ModArgumentError:
    return ModArgumentError(
        mod="flexhop.nn.Attention", argument=argument, value=value, allowed=allowed
    )
