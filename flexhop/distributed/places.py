"""Mods that see global positions, although a rank's tensors hold only a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from flexhop.mods.functions import MaskMod, ScoreMod

Localize = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]


class Places(NamedTuple):
    """Positions of one call's queries and keys in the whole sequence.

    query: [M] int32, the position of each query; the last token's for missing queries; or the
    position of the first one, if they are consecutive. key: [N] int32, the position of each key;
    or the position of the first one, as a number or as 0-d int32. live: 0-d int32, how many
    queries exist; None if all that a mask lists do. length: tokens of the whole sequence.
    overhangs: whether a mask lists blocks with keys beyond `length`. head: index of the first
    query head.

    Numbers are constants of a graph: kernels then know how far a query is from a key, as on one
    GPU, and keep their fast paths for windows and ALiBi. Tensors let a graph serve other batches.
    """

    query: Tensor | int
    key: Tensor | int
    live: Tensor | None
    length: int
    overhangs: bool
    head: int = 0


def _localize(places: Places) -> Localize:
    """Map a call's indices to global ones, in range wherever a table may be read."""
    query, _, _, length, overhangs, head = places
    is_table = is_key_table(places)

    def localize(
        b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        place = _key_position(places, kv_idx)
        if overhangs or is_table:
            place = place.clamp(0, length - 1)
        seen = _moved(q_idx, query) if isinstance(query, int) else query[q_idx]
        return b, h + head if head else h, seen, place

    return localize


def is_key_table(places: Places) -> bool:
    """Whether keys are not consecutive."""
    return isinstance(places.key, Tensor) and places.key.dim() > 0


def _key_position(places: Places, kv_idx: Tensor) -> Tensor:
    """The position of a key; it may be beyond the sequence."""
    key = places.key
    if isinstance(key, Tensor):
        return key[kv_idx] if key.dim() else kv_idx + key
    return _moved(kv_idx, key)


def _moved(index: Tensor, first: int) -> Tensor:
    return index + first if first else index


def global_score_mod(score_mod: ScoreMod, places: Places) -> ScoreMod:
    """A score_mod of a call's local indices that calls score_mod with global ones."""
    localize = _localize(places)

    def global_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, *localize(b, h, q_idx, kv_idx))

    return global_score


def global_mask_mod(mask_mod: MaskMod, places: Places) -> MaskMod:
    """The same for a mask_mod, which hides padding as well."""
    localize = _localize(places)
    live, length, overhangs = places.live, places.length, places.overhangs

    def global_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        keep = mask_mod(*localize(b, h, q_idx, kv_idx))
        if overhangs:
            keep = keep & (_key_position(places, kv_idx) < length)
        return keep if live is None else keep & (q_idx < live)

    return global_mask
