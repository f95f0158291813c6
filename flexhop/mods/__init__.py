"""Mods: protocols, checks, and built-in ones."""

from flexhop.mods.functions import (
    MaskMod,
    ScoreMod,
    and_masks,
    check_arity,
    check_mask_result,
    check_score_result,
    is_score_mod,
    noop_mask,
    noop_score,
    or_masks,
)
from flexhop.mods.keys import Dequantize, KeyMod, dequantize, noop_key
from flexhop.mods.library import (
    alibi,
    alibi_slopes,
    head_bias,
    key_bias,
    relative_bias,
    softcap,
    t5_buckets,
)
from flexhop.mods.tanh import tanh_approx

__all__ = [
    "Dequantize",
    "KeyMod",
    "MaskMod",
    "ScoreMod",
    "alibi",
    "alibi_slopes",
    "and_masks",
    "check_arity",
    "check_mask_result",
    "check_score_result",
    "dequantize",
    "head_bias",
    "is_score_mod",
    "key_bias",
    "noop_key",
    "noop_mask",
    "noop_score",
    "or_masks",
    "relative_bias",
    "softcap",
    "t5_buckets",
    "tanh_approx",
]
