"""A block mask as a part of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

from flexhop.block_mask import BlockMask


class HeldMask(nn.Module):
    """Holds a BlockMask as modules hold buffers: it moves with `.to`, `.cuda` and `.cpu`.

        self.window = HeldMask(create_block_mask(sliding_window(512), None, None, 4096, 4096))
        ...
        attention(hidden, block_mask=self.window())

    It is not in `state_dict`, like a buffer with persistent=False: a mask is made, not learned.

    Args:
        mask: what mask_mod captured moves too, in closures, partials and objects.
    """

    def __init__(self, mask: BlockMask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self) -> BlockMask:
        """The mask, where the module is."""
        return self.mask

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.mask = self.mask.map_tensors(fn)
        return self
