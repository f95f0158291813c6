"""Block masks for jagged nested tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.block_mask.creation import create_block_mask
from flexhop.block_mask.mask import BlockMask
from flexhop.compat.storage import is_jagged, token_count
from flexhop.errors import NestedOperandError
from flexhop.mods.functions import MaskMod, check_arity
from flexhop.sequences.row_tables import RowTables, Window, local_mask_mod, tabulate_rows

_FIELDS = (
    "seq_lengths", "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices", "BLOCK_SIZE", "mask_mod",
)  # fmt: skip


class Cut(NamedTuple):
    """How a nested tensor's buffer is divided into sequences.

    offsets: [S + 1], where sequences begin, then the end. lengths: [S] if there are holes, or
    None.
    """

    offsets: Tensor
    lengths: Tensor | None

    @classmethod
    def of(cls, tensor: Any) -> Cut:
        """The cut of a jagged nested tensor."""
        return cls(tensor.offsets(), tensor.lengths())

    def is_same(self, other: Cut) -> bool:
        """Whether both have the same sequences in the same places; may synchronise."""
        pairs = zip(self, other, strict=True)
        return all(a is b or (_both(a, b) and torch.equal(a, b)) for a, b in pairs)  # pyright: ignore[reportArgumentType]


def nested_tables(cut_q: Cut, cut_k: Cut, queries: int, keys: int) -> RowTables:
    """The tables of sequences whose queries see every key.

    queries, keys: numbers of tokens of all sequences.
    """
    lengths = cut_q.lengths, cut_k.lengths
    tables = tabulate_rows(cut_q.offsets, cut_k.offsets, queries, Window(), lengths)
    by_key = tabulate_rows(
        cut_k.offsets, cut_q.offsets, keys, Window(), (cut_k.lengths, cut_q.lengths)
    )
    return tables.with_keys(by_key)


def _both(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None


class NestedBlockMask(BlockMask):
    """A BlockMask of nested tensors' packed tokens, in which sequences never see each other.

    cut_q, cut_k: the sequences that it was created for.
    """

    cut_q: Cut
    cut_k: Cut

    @classmethod
    def around(cls, mask: BlockMask, cut_q: Cut, cut_k: Cut) -> NestedBlockMask:
        """The same blocks; the tensors are shared."""
        nested = cls(*(getattr(mask, name) for name in _FIELDS))
        nested.cut_q, nested.cut_k = cut_q, cut_k
        return nested


def create_nested_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    q_nt: Tensor,
    kv_nt: Tensor | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
) -> NestedBlockMask:
    """Find the blocks that a mask_mod needs within the sequences of nested tensors.

    The mask covers the packed tokens. mask_mod sees each sequence separately: b is the number of
    the sequence, and q_idx and kv_idx count from its first token.

    Args:
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> bool, of 0-d int32 tensors.
        B: None, 1 or the number of sequences. All three mean the same.
        H: number of query heads; None is 1, shared by all heads.
        q_nt: [S, Hq, ragged, D], or any other jagged nested tensor with the S sequences of query.
        kv_nt: [S, Hkv, ragged, D], the same for key. None takes q_nt.
        BLOCK_SIZE: queries and keys per block; an int means a square.
        _compile: use torch.compile.

    Returns:
        A block mask for flex_attention with nested tensors of these sequences; its seq_lengths
        are the numbers of packed tokens.

    Raises:
        NestedOperandError: q_nt or kv_nt is not jagged, their numbers of sequences differ, or B
            has another value.
        FlexhopError: as for create_block_mask.

    Source: torch.nn.attention.flex_attention.create_nested_block_mask (torch 2.7).
    """
    kv_nt = q_nt if kv_nt is None else kv_nt
    _check(q_nt, kv_nt, B)
    check_arity(mask_mod, "mask_mod")
    cut_q, cut_k = Cut.of(q_nt), Cut.of(kv_nt)
    queries, keys = token_count(q_nt), token_count(kv_nt)
    tables = nested_tables(cut_q, cut_k, queries, keys)
    mask = create_block_mask(
        local_mask_mod(mask_mod, tables), 1, H, queries, keys, cut_q.offsets.device,
        BLOCK_SIZE, _compile,
    )  # fmt: skip
    return NestedBlockMask.around(mask, cut_q, cut_k)


def _check(q_nt: Tensor, kv_nt: Tensor, batch: int | None) -> None:
    for argument, tensor in (("q_nt", q_nt), ("kv_nt", kv_nt)):
        if not is_jagged(tensor):
            raise NestedOperandError(
                argument=argument, found="is not a nested tensor of layout torch.jagged",
                expected="the mask needs its sequences",
            )  # fmt: skip
    sequences = q_nt.size(0)
    if kv_nt.size(0) != sequences:
        raise NestedOperandError(
            argument="kv_nt", found=f"has {kv_nt.size(0)} sequences",
            expected=f"q_nt has {sequences}",
        )  # fmt: skip
    if batch not in (None, 1, sequences):
        raise NestedOperandError(
            argument="B", found=f"is {batch}", expected=f"must be None, 1 or {sequences}"
        )
