"""The lists of a block mask in the form that the operators take."""

from __future__ import annotations

from torch import Tensor

from flexhop.block_mask.lists import is_shared
from flexhop.ops.call import MaskFacts

__all__ = ["normalized", "of_heads"]

Lists = tuple[Tensor, ...]


def normalized(lists: Lists) -> tuple[Lists, tuple[int, int]]:
    """Lists with batch and head, which the fields of a mask may omit, and the sizes of both.

    Of batches or heads that share memory, one is left.

    Args:
        lists: numbers of blocks, [B, H, R], and their indices, [B, H, R, W], in turn.
    """
    lists = tuple(_with(3 + place % 2, tensor) for place, tensor in enumerate(lists))
    batch, heads = lists[0].shape[:2]
    if all(is_shared(tensor, 0) for tensor in lists):
        lists = tuple(tensor[:1] for tensor in lists)
    if all(is_shared(tensor, 1) for tensor in lists):
        lists = tuple(tensor[:, :1] for tensor in lists)
    return lists, (batch, heads)


def _with(dim: int, tensor: Tensor) -> Tensor:
    missing = dim - tensor.dim()
    return tensor[(None,) * missing] if missing > 0 else tensor


def of_heads(lists: Lists, facts: MaskFacts | None, query: Tensor) -> Lists:
    """Lists for each head of query: head h has those of h modulo the mask's heads, as in PyTorch.

    What is to be refused stays as it is: a query of another rank, and heads that do not divide
    query's.

    Args:
        lists: as `normalized` returns them.
        facts: of the mask. Ranges of keys stay as they are.
        query: [B, H, M, D], unchecked.
    """
    if facts is None or facts.kind or not lists or query.dim() != 4:
        return lists
    given, heads = lists[0].size(1), query.size(1)
    if given in (0, 1, heads) or heads % given:
        return lists
    return tuple(tensor.repeat(1, heads // given, *[1] * (tensor.dim() - 2)) for tensor in lists)
