"""Mods that see global positions, although a rank's tensors hold only a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from flexhop.mods.functions import MaskMod, ScoreMod

Localize = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]


class Places(NamedTuple):
    """Positions of one call's queries and keys in the whole sequence.

    query: [M] int32, the position of each query; the last token's for missing queries. key: [N]
    int32, the position of each key; None if keys are consecutive. start: 0-d int32, the position
    of the first key; None if it is 0. live: 0-d int32, how many queries exist; None if all that a
    mask lists do. length: tokens of the whole sequence. overhangs: whether a mask lists blocks
    with keys beyond `length`. head: index of the first query head.
    """

    query: Tensor
    key: Tensor | None
    start: Tensor | None
    live: Tensor | None
    length: int
    overhangs: bool
    head: int = 0


def _localize(places: Places) -> Localize:
    """Map a call's indices to global ones, in range wherever a table may be read."""
    query, key, start, _, length, overhangs, head = places

    def localize(
        b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        place = kv_idx
        if key is not None:
            place = key[kv_idx]
        elif start is not None:
            place = kv_idx + start
        if overhangs or key is not None:
            place = place.clamp(0, length - 1)
        return b, h + head if head else h, query[q_idx], place

    return localize


def global_score_mod(score_mod: ScoreMod, places: Places) -> ScoreMod:
    """A score_mod of a call's local indices that calls score_mod with global ones."""
    localize = _localize(places)

    def global_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, *localize(b, h, q_idx, kv_idx))

    return global_score


def global_mask_mod(mask_mod: MaskMod, places: Places) -> MaskMod:
    """The same for a mask_mod, which hides padding as well."""
    localize = _localize(places)
    _, key, start, live, length, overhangs, _ = places

    def global_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        keep = mask_mod(*localize(b, h, q_idx, kv_idx))
        if overhangs:
            place = kv_idx if start is None else kv_idx + start
            keep = keep & ((place if key is None else key[kv_idx]) < length)
        return keep if live is None else keep & (q_idx < live)

    return global_mask
