"""Built-in score mods, short enough to copy and change."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from flexhop.errors import ModArgumentError
from flexhop.errors.base import shape_text
from flexhop.mods.functions import ScoreMod
from flexhop.mods.tanh import tanh_approx


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slopes of ALiBi.

    For n heads, n a power of two, slope i is 2^(-8 (i + 1) / n). For other numbers of heads, take
    the slopes of the next smaller power of two n, then every other slope of 2n.

    Args:
        num_heads: number of query heads, at least 1.
        device: where to create the tensor; None is PyTorch's default device.

    Returns:
        [num_heads] float32.

    Source: Press et al. 2022, Train Short, Test Long (arXiv 2108.12409), section 3.
    """
    n = 1 << (num_heads.bit_length() - 1)
    exponents = [(i + 1) / n for i in range(n)] + [(i + 0.5) / n for i in range(num_heads - n)]
    return torch.tensor([2.0 ** (-8.0 * e) for e in exponents], device=device)


def alibi(slopes: Tensor) -> ScoreMod:
    """Attention with linear biases: score - slopes[h] * (q_idx - kv_idx).

    Args:
        slopes: [Hq], see alibi_slopes; may be learned. Intended for causal attention, where the
            distance q_idx - kv_idx is never negative.

    Source: Press et al. 2022 (arXiv 2108.12409), section 3.
    """
    return functools.partial(_alibi_score, slopes)


def _alibi_score(
    slopes: Tensor, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    return score - slopes[h] * (q_idx - kv_idx)


def softcap(cap: float, approximate: bool = False) -> ScoreMod:
    """Keep scores in (-cap, cap): cap * tanh(score / cap).

    Args:
        cap: the bound, above 0. Gemma 2 uses 50.
        approximate: use the GPU's tanh instruction: several times faster, with a relative error up
            to 2^-11, half a unit in the last place of fp16.

    Raises:
        ModArgumentError: cap is not positive.

    Source: Gemma Team 2024, Gemma 2 (arXiv 2408.00118), section 2.
    """
    if not cap > 0:
        raise ModArgumentError(mod="softcap", argument="cap", value=cap, allowed="positive")
    tanh = tanh_approx if approximate else torch.tanh
    inverse = 1.0 / cap  # multiplying each score is cheaper than dividing
    return functools.partial(_softcap_score, cap, inverse, tanh)


def _softcap_score(
    cap: float,
    inverse: float,
    tanh: Callable[[Tensor], Tensor],
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
) -> Tensor:
    return tanh(score * inverse) * cap


def relative_bias(table: Tensor) -> ScoreMod:
    """A bias for each distance: score + table[h, clamp(q_idx - kv_idx, -R, R) + R].

    Args:
        table: [Hq, 2R + 1], or [2R + 1] for all heads; may be learned. Entry R is distance 0;
            entries above it are for keys before the query. For sequences of length S, R = S - 1
            gives every distance its own entry, [Hq, 2S - 1].

    Raises:
        ModArgumentError: a table of the wrong rank, or with an even number of distances.

    Source: Shaw et al. 2018 (arXiv 1803.02155), equation 4, for the clipping; Raffel et al. 2020
    (arXiv 1910.10683), section 2.1, for adding a scalar to the score.
    """
    if table.dim() not in (1, 2) or table.size(-1) % 2 == 0:
        raise ModArgumentError(
            mod="relative_bias",
            argument="the shape of table",
            value=shape_text(table.shape),
            allowed="[Hq, 2R + 1] or [2R + 1]",
        )
    reach = table.size(-1) // 2
    per_head = table.dim() == 2
    return functools.partial(_relative_bias_score, table, reach, per_head)


def _relative_bias_score(
    table: Tensor,
    reach: int,
    per_head: bool,
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
) -> Tensor:
    entry = torch.clamp(q_idx - kv_idx, -reach, reach) + reach
    return score + (table[h, entry] if per_head else table[entry])


def t5_buckets(
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
    device: torch.device | str | None = None,
) -> Tensor:
    """The bucket of each distance q_idx - kv_idx from -max_distance to max_distance in T5.

    With T5's learned `weight` [num_buckets, Hq] (and scale=1.0, because T5 does not scale):

        score_mod = relative_bias(weight[t5_buckets()].T)

    Near distances have a bucket each. Farther ones share buckets that grow logarithmically up to
    max_distance.

    Args:
        num_buckets: number of buckets, at least 4.
        max_distance: distances from here on share the last bucket, in tokens.
        bidirectional: whether the upper half of the buckets is for keys after the query.
        device: where to create the tensor; None is PyTorch's default device.

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
    return functools.partial(_head_bias_score, bias)


def _head_bias_score(
    bias: Tensor, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    return score + bias[h]


def key_bias(bias: Tensor) -> ScoreMod:
    """A bias for each key: score + bias[b, kv_idx].

    Args:
        bias: [B, N], or [N] for all batches; may be learned.

    Raises:
        ModArgumentError: a bias of the wrong rank.
    """
    if bias.dim() not in (1, 2):
        raise ModArgumentError(
            mod="key_bias", argument="the rank of bias", value=bias.dim(), allowed="1 or 2"
        )
    per_batch = bias.dim() == 2
    return functools.partial(_key_bias_score, bias, per_batch)


def _key_bias_score(
    bias: Tensor,
    per_batch: bool,
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
) -> Tensor:
    return score + (bias[b, kv_idx] if per_batch else bias[kv_idx])
