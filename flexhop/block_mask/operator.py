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
from flexhop.compat.operators import hop, transforms
from flexhop.compat.operators.overloads import register_composite
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


def _fold(count: int, mapped: Any, operands: Any) -> tuple[ListsArgs, Any]:
    """torch.vmap of a graph that creates a mask: see hop.register_vmap."""
    args, is_mapped = ListsArgs(*operands), ListsArgs(*mapped).captures
    if True not in is_mapped:
        return args, lambda lists: [(each, False) for each in lists]
    batch = args.sizes[0]

    def keep(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *captures: Any) -> Tensor:
        own = (c[b // batch] if m is True else c for c, m in zip(captures, is_mapped, strict=True))
        return args.mask_mod(b % batch, h, q_idx, kv_idx, *own)

    folded = args._replace(mask_mod=keep, sizes=(count * batch, *args.sizes[1:]))
    return folded, lambda lists: [(each.unflatten(0, (count, batch)), True) for each in lists]


hop.register_vmap(block_lists, _fold)


@hop.register_autograd(block_lists)
def _autograd(*operands: Any) -> tuple[Tensor, ...]:
    """Lists have no gradient."""
    with hop.below_autograd():
        return block_lists(*operands)
