"""flash-attn's options as mods, and the checks that its functions share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop import errors, mods
from flexhop.attention import attend
from flexhop.errors.base import shape_text
from flexhop.mods.functions import MaskMod, ScoreMod
from flexhop.ops.call import Mistake, note_mistake, note_rank
from flexhop.ops.dropout_seed import Dropout, dropout_seed
from flexhop.options import KernelOptions
from flexhop.sequences.ranges import RangeMask, mask_ranges

BLOCK = 128


class Options(NamedTuple):
    """The arguments that most flash-attn functions take, as given."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    return_attn_probs: bool
    deterministic: bool = False

    @property
    def kernel_options(self) -> KernelOptions:
        """The options for the kernels."""
        return KernelOptions(deterministic=self.deterministic)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How many keys before and after its own a query sees; None: all."""
        left, right = (None if side < 0 else side for side in self.window_size)
        return left, 0 if self.causal else right

    def dropout(self, query: Tensor) -> Dropout:
        """Dropout, with a seed if the mask is returned; attend checks the probability."""
        if self.return_attn_probs and 0.0 < self.dropout_p < 1.0:
            return Dropout(self.dropout_p, dropout_seed(query.device))
        return Dropout(self.dropout_p)


def refuse(query: Tensor, key: Tensor, value: Tensor, mistake: Mistake) -> Any:
    """Raise `mistake` from the operator, where Dynamo passes it on."""
    return attend(
        query, key, value, None, None, None, True, False, None, None, mistake=mistake
    )  # fmt: skip


def argument_mistake(argument: str, found: str, expected: str) -> Mistake:
    """A recorded FlashArgumentError."""
    return note_mistake(
        errors.FlashArgumentError, argument=argument, found=found, expected=expected
    )


def unsupported(feature: str, reason: str, hint: str) -> Mistake:
    """A recorded UnsupportedFeatureError."""
    return note_mistake(errors.UnsupportedFeatureError, feature=feature, reason=reason, hint=hint)


def packed_mistake(argument: str, packed: Tensor, parts: int, rank: int) -> Mistake | None:
    """What is wrong with tensors that are stacked before the head axis."""
    mistake = note_rank(rank, **{argument: packed})
    if mistake is None and packed.size(-3) != parts:
        found = f"has {packed.size(-3)} tensors in dimension {rank - 3}"
        return argument_mistake(argument, found, f"must have {parts}")
    return mistake


def option_mistake(options: Options, heads: int, sequences: int) -> Mistake | None:
    """What is wrong with the options, given the numbers of query heads and sequences."""
    if not isinstance(options.window_size, (tuple, list)):  # pyright: ignore[reportUnnecessaryIsInstance]
        found = f"is {options.window_size!r}"
        return argument_mistake("window_size", found, "must be (left, right)")
    if len(options.window_size) != 2:
        found = f"has {len(options.window_size)} entries"
        return argument_mistake("window_size", found, "must be (left, right)")
    return _slopes_mistake(options.alibi_slopes, heads, sequences)


def _slopes_mistake(slopes: Tensor | None, heads: int, sequences: int) -> Mistake | None:
    if slopes is None:
        return None
    if not slopes.is_floating_point():
        return argument_mistake("alibi_slopes", f"is {slopes.dtype}", "must be floating-point")
    fits = slopes.dim() in (1, 2) and slopes.size(-1) == heads
    if not fits or (slopes.dim() == 2 and slopes.size(0) != sequences):
        found = f"has shape {shape_text(slopes.shape)}"
        expected = f"must be [{heads}] or [{sequences}, {heads}]: heads, or sequences and heads"
        return argument_mistake("alibi_slopes", found, expected)
    return None


def score_mod_of(options: Options, shift: int | Tensor) -> ScoreMod | None:
    """softcap, then ALiBi: cap * tanh(score / cap) - slope * |q_idx + shift - kv_idx|.

    Args:
        options: softcap is off at 0 and below. Slopes get no gradient, as in flash-attn.
        shift: the key that query 0 is aligned with, for all or per batch.
    """
    capped = mods.softcap(options.softcap) if options.softcap > 0.0 else None
    if options.alibi_slopes is None:
        return capped
    biased = _alibi(options.alibi_slopes.detach(), shift)
    return biased if capped is None else _after(capped, biased)


def _after(first: ScoreMod, second: ScoreMod) -> ScoreMod:
    def both(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return second(first(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)

    return both


def _alibi(slopes: Tensor, shift: int | Tensor) -> ScoreMod:
    per_sequence = slopes.dim() == 2

    def flash_alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        slope = slopes[b, h] if per_sequence else slopes[h]
        aligned = q_idx + (shift[b] if isinstance(shift, Tensor) else shift)
        return score - slope * (aligned - kv_idx).abs()

    return flash_alibi


def window_mask(
    queries: int, keys: int, reach: tuple[int | None, int | None], device: torch.device
) -> RangeMask | None:
    """The mask of one window, shared by batches and heads, by arithmetic; None if all keys are
    visible.

    Args:
        queries: M; keys: N. The last query is aligned with the last key.
        reach: left, right, as in Options.
        device: device of the lists.
    """
    left, right = reach
    if queries == 1:  # aligned with the last key: there is nothing after it
        right = None
    if left is None and right is None:
        return None
    row, column = (torch.arange(n, device=device) for n in (queries, keys))
    shift = keys - queries
    by_query = _reached(row + shift, left, right, keys)
    by_key = _reached(column - shift, right, left, queries)
    return mask_ranges(by_query, by_key, _window(shift, left, right))


def _reached(
    aligned: Tensor, before: int | None, behind: int | None, length: int
) -> tuple[Tensor, Tensor]:
    """First and end of the positions from `before` before `aligned` to `behind` after it."""
    first, end = torch.zeros_like(aligned), torch.full_like(aligned, length)
    if before is not None:
        first = (aligned - before).clamp(0, length)
    if behind is not None:
        end = (aligned + behind + 1).clamp(0, length)
    return first, end


def _window(shift: int, left: int | None, right: int | None) -> MaskMod:
    def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        aligned = q_idx + shift
        keep = mods.noop_mask(b, h, q_idx, kv_idx)
        if left is not None:
            keep = kv_idx >= aligned - left
        if right is not None:
            keep = keep & (kv_idx <= aligned + right)
        return keep

    return window
