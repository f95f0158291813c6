"""Block masks: which blocks of keys each block of queries visits."""

from flexhop.block_mask.creation import create_block_mask, create_mask
from flexhop.block_mask.mask import BlockMask

__all__ = [
    "BlockMask",
    "create_block_mask",
    "create_mask",
]

# Pickles name the public module, which outlives the files of this room.
BlockMask.__module__ = __name__
