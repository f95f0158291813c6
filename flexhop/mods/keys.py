"""k_mod and v_mod: functions applied to each element of key and value as it is read.

    k_mod(k, b, h, kv_idx) -> k    changes one number of a key, before it meets a query
    v_mod(v, b, h, kv_idx) -> v    changes one number of a value

k and v are fp32 (fp64 for fp64 queries), whatever the cache stores; b is the batch, h the key head
and kv_idx the key's position in its sequence. The result is rounded to the dtype of query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from flexhop.errors import ModArgumentError
from flexhop.errors.base import shape_text

if TYPE_CHECKING:
    from flexhop.cache.pages import PageTable


class KeyMod(Protocol):
    """Changes one element of key or value: (x, b, h, kv_idx) -> x."""

    def __call__(self, x: Tensor, b: Tensor, h: Tensor, kv_idx: Tensor, /) -> Tensor:
        """The new element, a floating-point tensor with the shape of `x`."""
        ...


def noop_key(x: Tensor, b: Tensor, h: Tensor, kv_idx: Tensor) -> Tensor:
    """A k_mod or v_mod that returns the element unchanged: a float32 tensor of any shape.

    The indices are integer tensors that broadcast to it. They are unused.
    """
    return x


def same_number(x: Tensor, b: Tensor, h: Tensor, kv_idx: Tensor) -> Tensor:
    """The element unchanged, whatever its stored dtype."""
    return x


class Dequantize(NamedTuple):
    """A k_mod or v_mod: x * scale; see dequantize."""

    scale: Tensor | float
    page_table: PageTable | None = None

    def __call__(self, x: Tensor, b: Tensor, h: Tensor, kv_idx: Tensor) -> Tensor:
        """The element times its scale."""
        scale = self.scale
        if not isinstance(scale, Tensor) or scale.dim() == 0:
            return x * scale
        if scale.dim() == 1:
            return x * scale[h]
        if self.page_table is None:
            return x * scale[b, h, kv_idx]
        pages, page_size, _ = self.page_table
        # Beyond the end of a sequence the scale may be anything; the result is not used.
        page = torch.clamp(pages[b, kv_idx // page_size], 0, scale.size(0) - 1)
        return x * scale[page, h, kv_idx % page_size]

    def expected_shape(self, batch: int, heads: int, length: int, num_pages: int) -> list[int]:
        """The shape that a call requires of the scale."""
        rank = self.scale.dim() if isinstance(self.scale, Tensor) else 0
        if rank < 2:
            return [heads][:rank]
        if self.page_table is None:
            return [batch, heads, length]
        return [num_pages, heads, self.page_table.page_size]


def dequantize(scale: Tensor | float, page_table: PageTable | None = None) -> Dequantize:
    """A k_mod or v_mod that multiplies the elements of a low-precision cache by their scale.

    If the result is the same, kernels multiply once per key instead of once per element.

    Args:
        scale: floating-point. A number or a 0-d tensor for the whole cache; [Hkv], one per key
            head; [B, Hkv, N], one per key, by its position in the sequence; or with page_table [P,
            Hkv, page_size], one per row of the cache.
        page_table: the call's page table, if the scales are paged like the keys.

    Raises:
        ModArgumentError: scale has the wrong rank or dtype.

    Source: per-tensor and per-token scales of KV caches in serving libraries, such as vLLM's
    kv_cache_dtype="fp8".
    """
    if not isinstance(scale, Tensor):
        return Dequantize(float(scale))
    if scale.dim() not in (0, 1, 3) or (page_table is not None and scale.dim() != 3):
        allowed = "[], [Hkv] or [B, Hkv, N]"
        raise ModArgumentError(
            mod="dequantize", argument="the shape of scale", value=shape_text(scale.shape),
            allowed=allowed if page_table is None else "[P, Hkv, page_size]",
        )  # fmt: skip
    if not scale.is_floating_point():
        raise ModArgumentError(
            mod="dequantize", argument="the dtype of scale", value=scale.dtype,
            allowed="floating-point",
        )  # fmt: skip
    return Dequantize(scale, page_table)
