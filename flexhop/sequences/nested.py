"""Jagged nested tensors as packed tokens, and results back as nested tensors.

A nested tensor [S, H, ragged, D] holds the tokens of all sequences in one buffer, plus their
offsets. It becomes a call on packed tokens (see ranges.py); the result is nested like query.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop import errors
from flexhop.compat.storage import is_jagged, ragged_dim
from flexhop.mods.functions import ScoreMod
from flexhop.ops.call import Mistake, note_mistake
from flexhop.sequences.nested_mask import Cut, NestedBlockMask, nested_tables
from flexhop.sequences.ranges import Packing, pack_mask
from flexhop.sequences.row_tables import RowTables, Window, local_score_mod

Operands = tuple[Tensor, Tensor, Tensor]


class Packed(NamedTuple):
    """A call on packed tokens: operands [1, H, T, D]; the original operands if there is a
    mistake."""

    operands: Operands
    score_mod: ScoreMod | None
    block_mask: Any
    mistake: Mistake | None


def has_nested(*operands: Any) -> bool:
    """Whether any of the operands is nested, of any layout."""
    # A list, for Dynamo of 2.11. What is no tensor is refused later.
    return any([isinstance(operand, Tensor) and operand.is_nested for operand in operands])


def pack(
    operands: Operands, score_mod: ScoreMod | None, block_mask: Any, window: Window | None = None
) -> Packed:
    """Convert a call with nested operands to one with packed tokens.

    Args:
        operands: query [S, Hq, ragged, D], key [S, Hkv, ragged, D], value [S, Hkv, ragged, Dv];
            nested, of layout torch.jagged, contiguous or with holes.
        score_mod: takes indices within each sequence, b is its number; or None.
        block_mask: a NestedBlockMask, or None.
        window: without a block mask, which keys of its sequence a query sees; None: all.
    """
    mistake = _find_mistake(operands, block_mask)
    if mistake is not None:
        return Packed(operands, score_mod, block_mask, mistake)
    cut_q, cut_k = Cut.of(operands[0]), Cut.of(operands[1])
    query, key, value = _packed(operands[0]), _packed(operands[1]), _packed(operands[2])
    tables, block_mask = _mask((query, key), cut_q, cut_k, block_mask, window or Window())
    score_mod = None if score_mod is None else local_score_mod(score_mod, tables)
    return Packed((query, key, value), score_mod, block_mask, None)


def unpack(packed: Tensor, query: Any) -> Tensor:
    """A result [1, H, T, ...] of packed tokens, nested like query: [S, H, ragged, ...].

    It shares query's sequences, so the two can be added; holes hold 0 in out.
    """
    tokens = packed.squeeze(0).transpose(0, 1)
    nested = torch.nested.nested_tensor_from_jagged(tokens, query.offsets(), query.lengths())
    return nested.transpose(1, 2)


def _packed(nested: Tensor) -> Tensor:
    """[S, H, ragged, D] as [1, H, T, D], without a copy."""
    return nested.transpose(1, 2).values().transpose(0, 1).unsqueeze(0)


def _mask(
    sides: tuple[Tensor, Tensor], cut_q: Cut, cut_k: Cut, block_mask: Any, window: Window
) -> tuple[RowTables, Any]:
    queries, keys = (side.size(2) for side in sides)
    if block_mask is None:
        packing = Packing(cut_q.offsets, cut_k.offsets, cut_k.lengths, window, cut_q.lengths)
        return pack_mask(queries, keys, packing, None)
    return nested_tables(cut_q, cut_k, queries, keys), block_mask


def _find_mistake(operands: Operands, block_mask: Any) -> Mistake | None:
    """What is wrong with nested operands; recorded, not raised, because Dynamo traces this."""
    for argument, tensor in zip(("query", "key", "value"), operands, strict=True):
        wrong = _what_is_wrong(tensor)
        if wrong is not None:
            return _mistake(argument, *wrong)
    query, key, value = operands
    devices = tuple((n, str(t.device)) for n, t in zip(_NAMES, operands, strict=True))
    if key.device != query.device or value.device != query.device:
        return Mistake(errors.DeviceError, devices)
    for argument, tensor in (("key", key), ("value", value)):
        if tensor.size(0) != query.size(0):
            found = f"has {tensor.size(0)} sequences"
            return _mistake(argument, found, f"query has {query.size(0)}")
    for argument, tensor in (("query", query), ("key", key)):
        if tensor.values().size(1) == 0:
            facts = (
                ("argument", f"The number of tokens in {argument}"),
                ("expected", "greater than 0"), ("length", 0),
            )  # fmt: skip
            return Mistake(errors.SequenceLengthError, facts)
    return _cut_mistake(operands, block_mask)


_NAMES = ("query", "key", "value")


def _what_is_wrong(tensor: Tensor) -> tuple[str, str] | None:
    """What the layout of a tensor is, and what it must be."""
    if not tensor.is_nested:
        return "is dense", "query, key and value must all be nested if one is"
    if not is_jagged(tensor):
        wanted = "must be torch.jagged: torch.nested.nested_tensor(..., layout=torch.jagged)"
        return f"has layout {tensor.layout}", wanted
    if tensor.dim() != 4:
        found = f"has {tensor.dim()} dimensions"
        return found, "must have 4: sequences, heads, ragged length and head size"
    if ragged_dim(tensor) != 2:
        found = f"is ragged in dimension {ragged_dim(tensor)}"
        return found, "must be in 2: [S, ragged, heads, D].transpose(1, 2)"
    return None


def _cut_mistake(operands: Operands, block_mask: Any) -> Mistake | None:
    """Checks of the sequences' places; compiled code does not read their values."""
    looks_like_mask = hasattr(block_mask, "kv_num_blocks")
    is_nested_mask = isinstance(block_mask, NestedBlockMask)
    if looks_like_mask and not is_nested_mask:
        found = "was created for dense tensors, so sequences would attend to each other"
        return _mistake("block_mask", found, "query is nested: use create_nested_block_mask")
    if torch.compiler.is_compiling():
        return None
    cut_q, cut_k, cut_v = (Cut.of(tensor) for tensor in operands)
    if not cut_k.is_same(cut_v):
        found = "has different sequences than key, or has them in different places"
        return _mistake("value", found, "each key needs its value")
    if is_nested_mask and not (
        block_mask.cut_q.is_same(cut_q) and block_mask.cut_k.is_same(cut_k)
    ):
        found = "was created for different sequences than those of query and key"
        return _mistake("block_mask", found, "must be created for the same ones")
    return None


def _mistake(argument: str, found: str, expected: str) -> Mistake:
    return note_mistake(
        errors.NestedOperandError, argument=argument, found=found, expected=expected
    )
