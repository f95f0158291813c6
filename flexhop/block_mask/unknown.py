"""The operator `flexhop_unknown_blocks`: evaluates a mask in the unknown blocks.

Intervals in a graph give each block one of four states. How many are unknown is data, so it may
not be a shape: the operator takes and returns the states of all blocks. A kernel reads each state
and evaluates the mask if it must (lowering/open_blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.block_mask.scores import CHUNK_ELEMENTS, MAPPED
from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.operators import hop

NONE, SOME, EVERY, UNKNOWN = range(4)  # states of a block


class UnknownArgs(NamedTuple):
    """Operands in graphs."""

    states: Tensor  # [B', H', R, C] int8
    lengths: Tensor  # [2] int32: M and N
    mask_mod: Callable[..., Tensor]
    sizes: tuple[int, int, int, int]  # B', H', M, N
    block: tuple[int, int]
    sources: str  # source_fingerprint(), for the keys of Inductor's caches
    captures: tuple[Any, ...] = ()


unknown_blocks = hop.Operator("flexhop_unknown_blocks", UnknownArgs, ("mask_mod",))


def states_of(keep: Callable[..., Tensor], args: UnknownArgs, part: Tensor) -> Tensor:
    """The states of some blocks, from all of their scores: [U] int8.

    Args:
        keep: the mask, as a function of its indices alone.
        args: of the operator.
        part: [U] int64, indices into the flat tensor of states.
    """
    _, heads, rows, columns = args.states.shape
    (height, width), (_, _, q_len, kv_len) = args.block, args.sizes
    row, column = part // columns % rows, part % columns
    b, h = part // columns // rows // heads, part // columns // rows % heads
    q = row[:, None] * height + torch.arange(height, device=part.device)
    k = column[:, None] * width + torch.arange(width, device=part.device)
    q, k = q.clamp(max=q_len - 1), k.clamp(max=kv_len - 1)
    mapped = torch.vmap(torch.vmap(keep, in_dims=MAPPED[0]), in_dims=MAPPED[1])
    with IndexMode():
        kept = torch.vmap(mapped)(*(index.to(torch.int32) for index in (b, h, q, k)))
    # One sum, so that compiled code has one reader of the scores and does not store them.
    count = kept.expand(part.shape[0], height, width).sum((1, 2), dtype=torch.int64)
    found = torch.where(count == height * width, EVERY, torch.where(count > 0, SOME, NONE))
    return found.to(torch.int8)


def keep_of(args: UnknownArgs) -> Callable[..., Tensor]:
    """The mask as a function of its indices."""
    return lambda *indices: args.mask_mod(*indices, *args.captures)


@hop.register_dense(unknown_blocks)
def _dense(*operands: Any) -> tuple[Tensor]:
    args = UnknownArgs(*operands)
    found = args.states.clone(memory_format=torch.contiguous_format)
    left = (found.flatten() == UNKNOWN).nonzero().flatten()
    size = max(1, CHUNK_ELEMENTS // (args.block[0] * args.block[1]))
    with torch.no_grad():
        for part in left.split(size) if len(left) else ():
            found.view(-1)[part] = states_of(keep_of(args), args, part)
    return (found,)


@hop.register_fake(unknown_blocks)
def _fake(*operands: Any) -> tuple[Tensor]:
    return (torch.empty(operands[0].shape, dtype=torch.int8, device=operands[0].device),)


def _examples(*operands: Any) -> tuple[list[Any]]:
    args = UnknownArgs(*operands)
    index = args.lengths.new_zeros
    return ([*(index(()) for _ in range(4)), *args.captures],)


hop.register_proxy(unknown_blocks, ("flexhop_mask",), _examples, IndexMode)
hop.register_functionalize(unknown_blocks, lambda *_: None)


@hop.register_autograd(unknown_blocks)
def _autograd(*operands: Any) -> tuple[Tensor]:
    """States have no gradient."""
    with hop.below_autograd():
        return unknown_blocks(*operands)
