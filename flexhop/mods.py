"""What users write: score_mod and mask_mod, their composition and checks, and ready score mods.

    score_mod(score, b, h, q_idx, kv_idx) -> score    changes one score
    mask_mod(b, h, q_idx, kv_idx) -> bool             keeps (True) or drops one score

The indices are integer tensors: 0-d inside kernels and traces, and of shapes that broadcast to
[B, Hq, M, N] where a mask is evaluated densely. A mod is written for one score, with tensor
operations only, and works in both. The tensors that it captures are read by indexing.

The ready score mods below are short enough to copy and change.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from flexhop.errors import (
    ModArgumentError,
    ModArityError,
    ModNotCallableError,
    ModResultError,
)
from flexhop.key_mods import KeyMod as KeyMod
from flexhop.key_mods import dequantize as dequantize
from flexhop.tanh import tanh_approx

_CALLS = {
    "score_mod": "(score, b, h, q_idx, kv_idx)",
    "mask_mod": "(b, h, q_idx, kv_idx)",
    "k_mod": "(k, b, h, kv_idx)",
    "v_mod": "(v, b, h, kv_idx)",
}


class ScoreMod(Protocol):
    """Changes one attention score: (score, b, h, q_idx, kv_idx) -> score."""

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, /
    ) -> Tensor:
        """The new score, a floating point tensor of the shape of `score`."""
        ...


class MaskMod(Protocol):
    """Keeps or drops one attention score: (b, h, q_idx, kv_idx) -> bool."""

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, /) -> Tensor:
        """True where the key is visible to the query, a bool tensor."""
        ...


def noop_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """The score as it is."""
    return score


def noop_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Every key is visible: a 0-d True on b's device, which broadcasts."""
    return b.new_ones((), dtype=torch.bool)


def _empty_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """No key is visible."""
    return b.new_zeros((), dtype=torch.bool)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """A mask_mod that keeps what every one of `mask_mods` keeps; everything, if there are none.

    Raises:
        ModNotCallableError: an argument that is no function.

    Source: torch.nn.attention.flex_attention.and_masks.
    """
    _check_callable("and_masks", mask_mods)

    def and_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        keep = mask_mods[0](b, h, q_idx, kv_idx)
        for mask_mod in mask_mods[1:]:
            keep = keep & mask_mod(b, h, q_idx, kv_idx)
        return keep

    return and_mask if mask_mods else noop_mask


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """A mask_mod that keeps what any one of `mask_mods` keeps; nothing, if there are none.

    Raises:
        ModNotCallableError: an argument that is no function.

    Source: torch.nn.attention.flex_attention.or_masks.
    """
    _check_callable("or_masks", mask_mods)

    def or_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        keep = mask_mods[0](b, h, q_idx, kv_idx)
        for mask_mod in mask_mods[1:]:
            keep = keep | mask_mod(b, h, q_idx, kv_idx)
        return keep

    return or_mask if mask_mods else _empty_mask


def _check_callable(combinator: str, mask_mods: tuple[object, ...]) -> None:
    for position, mask_mod in enumerate(mask_mods):
        if not callable(mask_mod):
            raise ModNotCallableError(
                argument=f"argument {position} of {combinator}", found=type(mask_mod).__name__
            )


# checks


def check_arity(mod: object, kind: str) -> None:
    """Refuse a mod that cannot be called with the arguments of its kind.

    Args:
        mod: a function, lambda, functools.partial, bound method or callable object. Defaults,
            `*args` and callables without a readable signature are given the benefit of the doubt.
        kind: "score_mod", "mask_mod", "k_mod" or "v_mod".

    Raises:
        ModNotCallableError: `mod` is no function.
        ModArityError: it requires more or takes fewer arguments.
    """
    if not callable(mod):
        raise ModNotCallableError(argument=kind, found=type(mod).__name__)
    signature = _signature(mod)
    count = 5 if kind == "score_mod" else 4
    if signature is not None and not _takes(signature, count):
        raise ModArityError(mod=kind, name=_name(mod), expected=_CALLS[kind], found=str(signature))


def is_score_mod(mod: Callable[..., Any]) -> bool:
    """Whether `mod` is a score_mod (five arguments) and not a mask_mod (four).

    Parameters with defaults do not count, so `def mask(b, h, q_idx, kv_idx, window=8)` is a mask.

    Raises:
        ModArityError: neither, or not to be told, as with `*args`.
    """
    signature = _signature(mod)
    required = _required(signature) if signature is not None else 0
    if signature is None or required not in (4, 5) or not _takes(signature, required):
        raise ModArityError(
            mod="mod",
            name=_name(mod),
            expected=f"{_CALLS['score_mod']} or {_CALLS['mask_mod']}",
            found="unknown" if signature is None else str(signature),
        )
    return required == 5


def _signature(mod: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters that `mod` itself takes, not those of a function that it wraps."""
    try:
        return inspect.signature(mod, follow_wrapped=False)
    except (TypeError, ValueError):  # builtins and extension types may not tell
        return None


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _required(signature: inspect.Signature) -> int:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature.parameters.values()
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def _name(mod: Any) -> str:
    """What the user calls it: the name of a function, or the class of a callable object."""
    if isinstance(mod, functools.partial):
        return f"partial({_name(mod.func)})"
    return getattr(mod, "__name__", type(mod).__name__)


def check_mask_result(result: object, name: str = "mask_mod") -> None:
    """Refuse what a mask_mod returned if it is no bool tensor.

    Args:
        result: a real, fake or traced tensor, or whatever the user returned.
        name: what the user calls the function.

    Raises:
        ModResultError: the result is not a tensor of dtype torch.bool.
    """
    if not isinstance(result, Tensor) or result.dtype != torch.bool:
        raise ModResultError(
            mod="mask_mod", name=name, expected="a bool tensor", found=_described(result)
        )


def check_score_result(result: object, name: str = "score_mod", kind: str = "score_mod") -> None:
    """Refuse what a score_mod, k_mod or v_mod returned if it is no floating point tensor.

    Args: as in check_mask_result. kind: which of the three.

    Raises:
        ModResultError: the result is not a floating point tensor.
    """
    if not isinstance(result, Tensor) or not result.is_floating_point():
        raise ModResultError(
            mod=kind,
            name=name,
            expected="a floating point tensor",
            found=_described(result),
        )


def _described(result: object) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of dtype {result.dtype}"
    return f"an object of type {type(result).__name__}"


# ready score mods


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slopes of ALiBi, [num_heads] fp32.

    For n heads, n a power of two, slope i is 2^(-8 (i + 1) / n); otherwise those of the next
    smaller power of two n, followed by every other slope of 2n.

    Source: Press et al. 2022, Train Short, Test Long (arXiv 2108.12409), section 3.
    """
    n = 1 << (num_heads.bit_length() - 1)
    exponents = [(i + 1) / n for i in range(n)] + [(i + 0.5) / n for i in range(num_heads - n)]
    return torch.tensor([2.0 ** (-8.0 * e) for e in exponents], device=device)


def alibi(slopes: Tensor) -> ScoreMod:
    """Attention with linear biases: score - slopes[h] * (q_idx - kv_idx).

    Args:
        slopes: [Hq], see alibi_slopes; may be learned. Meant for causal attention, where the
            distance q_idx - kv_idx is never negative.

    Source: Press et al. 2022 (arXiv 2108.12409), section 3.
    """

    def alibi_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx - kv_idx)

    return alibi_score


def softcap(cap: float, approximate: bool = False) -> ScoreMod:
    """Keep scores in (-cap, cap): cap * tanh(score / cap).

    Args:
        cap: the bound, above 0. Gemma 2 uses 50.
        approximate: use the GPU's own tanh instruction, several times faster, with a relative
            error up to 2^-11, half a unit in the last place of fp16.

    Raises:
        ModArgumentError: cap is not positive.

    Source: Gemma Team 2024, Gemma 2 (arXiv 2408.00118), section 2.
    """
    if not cap > 0:
        raise ModArgumentError(mod="softcap", argument="cap", value=cap, allowed="positive")
    tanh = tanh_approx if approximate else torch.tanh
    inverse = 1.0 / cap  # a product per score is cheaper than a quotient

    def softcap_score(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        return tanh(score * inverse) * cap

    return softcap_score


def relative_bias(table: Tensor) -> ScoreMod:
    """A bias for each distance: score + table[h, clamp(q_idx - kv_idx, -R, R) + R].

    Args:
        table: [Hq, 2R + 1], or [2R + 1] for all heads; may be learned. Entry R is distance 0,
            entries above it are keys before the query. For sequences of length S, R = S - 1
            gives every distance its own entry, [Hq, 2S - 1].

    Raises:
        ModArgumentError: a table of another rank, or with an even number of distances.

    Source: Shaw et al. 2018 (arXiv 1803.02155), equation 4, for the clipping; Raffel et al. 2020
    (arXiv 1910.10683), section 2.1, for adding a scalar to the score.
    """
    if table.dim() not in (1, 2) or table.size(-1) % 2 == 0:
        raise ModArgumentError(
            mod="relative_bias",
            argument="the shape of table",
            value=list(table.shape),
            allowed="[Hq, 2R + 1] or [2R + 1]",
        )
    reach = table.size(-1) // 2
    per_head = table.dim() == 2

    def relative_bias_score(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        entry = torch.clamp(q_idx - kv_idx, -reach, reach) + reach
        return score + (table[h, entry] if per_head else table[entry])

    return relative_bias_score


def t5_buckets(
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
    device: torch.device | str | None = None,
) -> Tensor:
    """The bucket of each distance q_idx - kv_idx from -max_distance to max_distance in T5.

    With T5's learned `weight` [num_buckets, Hq] (and scale=1.0, as T5 does not scale):

        score_mod = relative_bias(weight[t5_buckets()].T)

    Near distances have a bucket each, farther ones share buckets that grow logarithmically up to
    max_distance. Bidirectional: the upper half of the buckets is for keys after the query.

    Returns:
        [2 * max_distance + 1] int64.

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1.
    """
    key_after = torch.arange(max_distance, -max_distance - 1, -1, device=device)
    half = num_buckets // 2 if bidirectional else num_buckets
    distance = key_after.abs() if bidirectional else (-key_after).clamp(min=0)
    exact = half // 2
    growth = torch.log(distance.clamp(min=1) / exact) / math.log(max_distance / exact)
    far = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
    bucket = torch.where(distance < exact, distance, far)
    return bucket + half * (key_after > 0) if bidirectional else bucket


def head_bias(bias: Tensor) -> ScoreMod:
    """A bias for each head: score + bias[h].

    Args:
        bias: [Hq]; may be learned.
    """

    def head_bias_score(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        return score + bias[h]

    return head_bias_score


def key_bias(bias: Tensor) -> ScoreMod:
    """A bias for each key: score + bias[b, kv_idx].

    Args:
        bias: [B, N], or [N] for all batches; may be learned.

    Raises:
        ModArgumentError: a bias of another rank.
    """
    if bias.dim() not in (1, 2):
        raise ModArgumentError(
            mod="key_bias", argument="the rank of bias", value=bias.dim(), allowed="1 or 2"
        )
    per_batch = bias.dim() == 2

    def key_bias_score(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        return score + (bias[b, kv_idx] if per_batch else bias[kv_idx])

    return key_bias_score
