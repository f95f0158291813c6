"""Attention over a mesh of ranks: plans, and the context in which calls follow them.

Runs on torch.distributed: DeviceMesh, functional collectives, DTensor. See docs/distributed.md.
"""

from flexhop.distributed.context import context_parallel
from flexhop.distributed.cost import AttentionShape, Cost, Machine
from flexhop.distributed.packed import PackedSequences
from flexhop.distributed.plan import MaskPlan, Plan, make_plan

__all__ = [
    "AttentionShape",
    "Cost",
    "Machine",
    "MaskPlan",
    "PackedSequences",
    "Plan",
    "context_parallel",
    "make_plan",
]
