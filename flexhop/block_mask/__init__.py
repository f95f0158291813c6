"""Block masks: which blocks of keys each block of queries visits."""

from torch.serialization import add_safe_globals

from flexhop.block_mask.creation import create_block_mask, create_mask
from flexhop.block_mask.mask import BlockMask

__all__ = [
    "BlockMask",
    "create_block_mask",
    "create_mask",
]

# Pickles name the public module, so this room's files may move.
BlockMask.__module__ = __name__
# torch.load(weights_only=True) may create masks: saving.py reads only data.
add_safe_globals([BlockMask])
