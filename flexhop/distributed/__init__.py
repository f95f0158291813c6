"""Attention over a mesh of ranks: plans, and the context in which calls follow them.

Runs on torch.distributed: DeviceMesh, functional collectives, DTensor. See docs/distributed.md.
"""

from flexhop.distributed.context import context_parallel
from flexhop.distributed.cost import AttentionShape, Cost, Machine
from flexhop.distributed.decode import (
    decode_attention,
    decode_mask,
    local_lengths,
    local_positions,
)
from flexhop.distributed.packed import PackedSequences
from flexhop.distributed.plan import MaskPlan, Plan, make_plan
from flexhop.distributed.tensor_parallel import (
    local_block_mask,
    shift_mask_mod,
    shift_score_mod,
)
from flexhop.distributed.words import explain, picture
from flexhop.ops.replicated import sum_gradient

__all__ = [
    "AttentionShape",
    "Cost",
    "Machine",
    "MaskPlan",
    "PackedSequences",
    "Plan",
    "context_parallel",
    "decode_attention",
    "decode_mask",
    "explain",
    "local_block_mask",
    "local_lengths",
    "local_positions",
    "make_plan",
    "picture",
    "shift_mask_mod",
    "shift_score_mod",
    "sum_gradient",
]
