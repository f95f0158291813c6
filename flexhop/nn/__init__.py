"""Modules: attention with its projections, a KV cache, and a holder for block masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

from flexhop.block_mask import BlockMask
from flexhop.block_mask.lists import by_memory
from flexhop.nn.attention import Attention, Cache

__all__ = ["Attention", "Cache", "HeldMask"]


class HeldMask(nn.Module):
    """Holds a BlockMask like a buffer: it moves with `.to`, `.cuda` and `.cpu`.

        self.window = HeldMask(create_block_mask(sliding_window(512), None, None, 4096, 4096))
        ...
        attention(hidden, block_mask=self.window())

    Like a buffer with persistent=False, it is not in `state_dict`.

    Args:
        mask: the mask. Tensors that mask_mod captured move too, in closures, partials and objects.
    """

    def __init__(self, mask: BlockMask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self) -> BlockMask:
        """The mask, on the module's device."""
        return self.mask

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.mask = self.mask.map_tensors(by_memory(fn))
        return self
