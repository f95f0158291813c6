"""The operator `flexhop_block_lists`: how Dynamo passes a mask to the analysis.

Dynamo traces the mask_mod into its own graph and lifts its captured tensors. AOTAutograd or
make_fx, which trace the operator afterwards, record the operators that find the lists instead: no
graph that reaches a compiler contains it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.block_mask.graphed import Mask
from flexhop.block_mask.scores import Grid
from flexhop.compat import hop, transforms
from flexhop.compat.composite import register_composite
from flexhop.mods.functions import MaskMod


class ListsDoor(NamedTuple):
    """Operands as Dynamo sees them."""

    probe: Tensor  # on the device of the lists
    mask_mod: MaskMod
    sizes: tuple[int, int, int, int]  # B, H, M, N
    block: tuple[int, int]
    sides: tuple[bool, bool]  # whether to list full blocks separately, and the query side


class ListsArgs(NamedTuple):
    """Operands in graphs."""

    probe: Tensor
    mask_mod: Callable[..., Tensor]
    sizes: tuple[int, int, int, int]
    block: tuple[int, int]
    sides: tuple[bool, bool]
    sources: str  # source_fingerprint()
    captures: tuple[Any, ...] = ()


class BlockLists(hop.Operator):
    """find(mask_mod, grid, sides, in_graph=) -> lists; creation.py sets it."""

    find: Callable[..., tuple[Tensor, ...]]


block_lists = BlockLists("flexhop_block_lists", ListsArgs, ("mask_mod",), door=ListsDoor)


def _run(operands: tuple[Any, ...], *, in_graph: bool) -> tuple[Tensor, ...]:
    args = ListsArgs(*operands)
    mask_mod = Mask(args.mask_mod, args.captures)
    grid = Grid(*args.sizes, args.block, args.probe.device)
    with torch.no_grad():
        return block_lists.find(mask_mod, grid, args.sides, in_graph=in_graph)


@hop.register_dense(block_lists)
def _dense(*operands: Any) -> tuple[Tensor, ...]:
    return _run(operands, in_graph=False)


@register_composite(block_lists)
def _traced(*operands: Any) -> tuple[Tensor, ...]:
    return _run(operands, in_graph=True)


hop.register_checkpoint(block_lists)
transforms.register_constant(block_lists)


@hop.register_autograd(block_lists)
def _autograd(*operands: Any) -> tuple[Tensor, ...]:
    """Lists have no gradient."""
    with hop.below_autograd():
        return block_lists(*operands)
