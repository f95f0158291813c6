"""The vocabulary of random score_mods, as that of masks.

Biases keep their size near that of a score, and factors near 1: a budget says little about
scores in the hundreds.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.fuzz import compared, later, made, rarer, users
from tests.fuzz.functions import Entry, span


def log_bucket(distance):
    """A bucket of a distance: exact below 4, logarithmic to 48; no bound is a whole number."""
    far = distance.abs()
    log = (torch.log(far.clamp(min=1).float() / 3.9) / math.log(48 / 3.9) * 4).to(torch.int32)
    return torch.where(far < 4, far, (4 + log).clamp(max=7)) + torch.where(distance > 0, 8, 0)


BIASES: dict[str, Entry] = {
    "alibi": Entry(
        lambda c: lambda s, b, h, q, k: s + c.slopes[h] * (k - q),
        lambda s, r: {"slopes": r.uniform(s.heads) * 0.1},
        ("slopes",),
    ),
    "alibi_exponents": Entry(
        lambda c: lambda s, b, h, q, k: s - (q - k).abs() * torch.exp2(-h - 3.0)
    ),
    "line": Entry(lambda c: lambda s, b, h, q, k: s - 0.03 * q + 0.02 * k),
    "captured_numbers": Entry(
        lambda c: lambda s, b, h, q, k: s * c.factor + c.step * 0.1,
        lambda s, r: {"factor": 0.7, "step": 3},
    ),
    "zero_dim": Entry(
        lambda c: lambda s, b, h, q, k: s * c.temperature,
        lambda s, r: {"temperature": 0.5 + r.uniform(1)[0]},
        ("temperature",),
    ),
    "relative": Entry(
        lambda c: lambda s, b, h, q, k: s + c.distance[h, q - k + c.shape.kv_len - 1],
        lambda s, r: {"distance": r.normal(s.heads, s.q_len + s.kv_len - 1)},
        ("distance",),
    ),
    "negative_index": Entry(
        lambda c: lambda s, b, h, q, k: s + c.by_distance[k - q],
        lambda s, r: {"by_distance": r.normal(span(s))},
        ("by_distance",),
    ),
    "clamped": Entry(
        lambda c: lambda s, b, h, q, k: s + c.near[torch.clamp(q - k, -9, 9) + 9],
        lambda s, r: {"near": r.normal(19)},
        ("near",),
    ),
    "buckets": Entry(
        lambda c: lambda s, b, h, q, k: s + c.by_bucket[c.bucket[(q - k).abs()], h],
        lambda s, r: {"by_bucket": r.normal(6, s.heads), "bucket": r.documents(6, span(s))},
        ("by_bucket",),
    ),
    "periodic": Entry(
        lambda c: lambda s, b, h, q, k: s + c.period[(q - k) % 11],
        lambda s, r: {"period": r.normal(11)},
        ("period",),
    ),
    "pair": Entry(
        lambda c: lambda s, b, h, q, k: s + c.pair[h, q, k],
        lambda s, r: {"pair": r.normal(s.heads, s.q_len, s.kv_len)},
        ("pair",),
    ),
    "pair_transposed": Entry(
        lambda c: lambda s, b, h, q, k: s + c.turned[k, q],
        lambda s, r: {"turned": r.normal(s.q_len, s.kv_len).t()},
        ("turned",),
    ),
    "coarse": Entry(
        lambda c: lambda s, b, h, q, k: s + c.coarse[q // 8, k // 8],
        lambda s, r: {"coarse": r.normal(s.q_len // 8 + 1, s.kv_len // 8 + 1)},
        ("coarse",),
    ),
    "key": Entry(
        lambda c: lambda s, b, h, q, k: s * c.by_key[k],
        lambda s, r: {"by_key": 0.5 + r.uniform(s.kv_len)},
        ("by_key",),
    ),
    "key_chained": Entry(
        lambda c: lambda s, b, h, q, k: s + c.key_bias[b][h][k],
        lambda s, r: {"key_bias": r.normal(s.batch, s.heads, s.kv_len)},
        ("key_bias",),
    ),
    "query": Entry(
        lambda c: lambda s, b, h, q, k: s + c.query_bias[b, h, q],
        lambda s, r: {"query_bias": r.normal(s.batch, s.heads, s.q_len)},
        ("query_bias",),
    ),
    "shared": Entry(
        lambda c: lambda s, b, h, q, k: s + c.both[q] * c.both[k],
        lambda s, r: {"both": r.normal(span(s))},
        ("both",),
    ),
    "head": Entry(
        lambda c: lambda s, b, h, q, k: s + c.head_bias[h] * c.head_factor[b, h],
        lambda s, r: {"head_bias": r.normal(s.heads), "head_factor": r.normal(s.batch, s.heads)},
        ("head_bias", "head_factor"),
    ),
    "gate": Entry(
        lambda c: lambda s, b, h, q, k: s * torch.sigmoid(c.gate[b, h]),
        lambda s, r: {"gate": r.normal(s.batch, s.heads)},
        ("gate",),
    ),
    "half_table": Entry(
        lambda c: lambda s, b, h, q, k: s + c.half_bias[k].to(s.dtype),
        lambda s, r: {"half_bias": r.normal(s.kv_len, dtype=torch.bfloat16)},
    ),
    "integer_table": Entry(
        lambda c: lambda s, b, h, q, k: s + 0.1 * c.counts[k],
        lambda s, r: {"counts": r.integers(9, s.kv_len)},
    ),
    "flag_table": Entry(
        lambda c: lambda s, b, h, q, k: s + 0.5 * c.marks[q, k],
        lambda s, r: {"marks": r.flags(s.q_len, s.kv_len)},
    ),
    "strided": Entry(
        lambda c: lambda s, b, h, q, k: s + c.strided_bias[k],
        lambda s, r: {"strided_bias": r.normal(3 * s.kv_len)[::3]},
    ),
    "expanded": Entry(
        lambda c: lambda s, b, h, q, k: s + c.wide_bias[b, h, q, k],
        lambda s, r: {
            "wide_bias": r.normal(1, s.heads, 1, s.kv_len).expand(s.batch, -1, s.q_len, -1)
        },
    ),
    "gathered": Entry(
        lambda c: lambda s, b, h, q, k: s + c.types[c.type_of[q], c.type_of[k]],
        lambda s, r: {"types": r.normal(5, 5), "type_of": r.integers(5, span(s)).long()},
        ("types",),
    ),
    "points": Entry(
        lambda c: lambda s, b, h, q, k: s - 0.1 * (c.points[q, 0] - c.points[k, 0]) ** 2,
        lambda s, r: {"points": r.normal(span(s), 2)},
        ("points",),
    ),
    "log_bias": Entry(
        lambda c: lambda s, b, h, q, k: (
            s - c.strength_of[h].abs() * torch.log1p(c.rate_of[h].abs() * (q - k).abs())
        ),
        lambda s, r: {"strength_of": r.normal(s.heads), "rate_of": 0.2 + r.uniform(s.heads)},
        ("strength_of", "rate_of"),
    ),
    "log_buckets": Entry(
        lambda c: lambda s, b, h, q, k: s + c.by_log[log_bucket(k - q), h],
        lambda s, r: {"by_log": r.normal(16, s.heads)},
        ("by_log",),
    ),
    "window_bias": Entry(
        lambda c: lambda s, b, h, q, k: (
            s + c.window_bias[q // 8 % 8 - k // 8 % 8 + 7, q % 8 - k % 8 + 7, h]
        ),
        lambda s, r: {"window_bias": r.normal(15, 15, s.heads)},
        ("window_bias",),
    ),
    "scalable": Entry(
        lambda c: lambda s, b, h, q, k: s * (c.growth[h] * torch.log(q + 2.0)),
        lambda s, r: {"growth": r.uniform(s.heads) * 0.4},
        ("growth",),
    ),
    "learned_cap": Entry(
        lambda c: lambda s, b, h, q, k: c.cap * torch.tanh(s / c.cap),
        lambda s, r: {"cap": 4.0 + r.uniform(1)[0]},
        ("cap",),
    ),
    "mixture": Entry(
        lambda c: lambda s, b, h, q, k: torch.lerp(s, c.target[h, k % 5].to(s.dtype), 0.3),
        lambda s, r: {"target": r.normal(s.heads, 5)},
        ("target",),
    ),
    "three_reads": Entry(
        lambda c: lambda s, b, h, q, k: s + c.thrice[q] + c.thrice[k] - c.thrice[(q + k) // 2],
        lambda s, r: {"thrice": r.normal(span(s))},
        ("thrice",),
    ),
    "distances_in_space": Entry(
        lambda c: lambda s, b, h, q, k: s - 0.1 * ((c.space[q] - c.space[k]) ** 2).sum(-1),
        lambda s, r: {"space": r.normal(span(s), 3)},
        ("space",),
    ),
    "attended_keys": Entry(
        lambda c: lambda s, b, h, q, k: torch.where(c.attend[b, k], s, float("-inf")),
        lambda s, r: {"attend": r.flags(s.batch, s.kv_len)},
    ),
    "added_mask": Entry(
        lambda c: lambda s, b, h, q, k: s + c.added[b, 0, q, k],
        lambda s, r: {"added": -30.0 * r.flags(s.batch, 1, s.q_len, s.kv_len).float()},
    ),
    "bytes": Entry(
        lambda c: lambda s, b, h, q, k: s - 0.05 * c.byte_bias[q] + c.short_bias[k] * 0.1,
        lambda s, r: {
            "byte_bias": r.integers(9, s.q_len).to(torch.uint8),
            "short_bias": r.integers(9, s.kv_len).to(torch.int16),
        },
    ),
    "gated_heads": Entry(
        lambda c: lambda s, b, h, q, k: torch.where(c.is_local[h], s - (q - k).abs() * 0.1, s),
        lambda s, r: {"is_local": r.flags(s.heads)},
    ),
    "detached": Entry(
        lambda c: lambda s, b, h, q, k: s + c.kept_back[h].detach() * 0.5 + c.kept_back[h],
        lambda s, r: {"kept_back": r.normal(s.heads)},
        ("kept_back",),
    ),
}  # fmt: skip

FUNCTIONS: dict[str, Entry] = {
    "cap": Entry(lambda c: lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0)),
    "clamp": Entry(lambda c: lambda s, b, h, q, k: torch.clamp(s, -2.0, 2.0)),
    "silu": Entry(lambda c: lambda s, b, h, q, k: F.silu(s)),
    "gelu": Entry(lambda c: lambda s, b, h, q, k: F.gelu(s)),
    "softplus": Entry(lambda c: lambda s, b, h, q, k: F.softplus(s)),
    "leaky": Entry(lambda c: lambda s, b, h, q, k: F.leaky_relu(s, 0.2)),
    "sigmoid": Entry(lambda c: lambda s, b, h, q, k: torch.sigmoid(s) * 4.0),
    "square": Entry(lambda c: lambda s, b, h, q, k: s * s * 0.1),
    "power": Entry(lambda c: lambda s, b, h, q, k: s.pow(3).mul(0.02).neg()),
    "exp": Entry(lambda c: lambda s, b, h, q, k: torch.exp(s * 0.2)),
    "log1p": Entry(lambda c: lambda s, b, h, q, k: torch.log1p(s.abs())),
    "expm1": Entry(lambda c: lambda s, b, h, q, k: torch.expm1(s * 0.1) * 5.0),
    "rsqrt": Entry(lambda c: lambda s, b, h, q, k: torch.rsqrt(s * s + 1.0) + s),
    "sine": Entry(lambda c: lambda s, b, h, q, k: torch.sin(s) + torch.cos(s)),
    "erf": Entry(lambda c: lambda s, b, h, q, k: torch.erf(s) * 2.0),
    "logaddexp": Entry(lambda c: lambda s, b, h, q, k: torch.logaddexp(s, s * 0.5)),
    "minimum": Entry(lambda c: lambda s, b, h, q, k: torch.minimum(s, 1.0 - s)),
    "negative": Entry(lambda c: lambda s, b, h, q, k: -s / 3),
    "elu": Entry(lambda c: lambda s, b, h, q, k: F.elu(s) + 0.1 * s),
    "mish": Entry(lambda c: lambda s, b, h, q, k: F.mish(s)),
    "log_sigmoid": Entry(lambda c: lambda s, b, h, q, k: F.logsigmoid(s)),
    "softsign": Entry(lambda c: lambda s, b, h, q, k: F.softsign(s) * 3.0),
    "hardswish": Entry(lambda c: lambda s, b, h, q, k: F.hardswish(s)),
    "hardtanh": Entry(lambda c: lambda s, b, h, q, k: F.hardtanh(s, -1.5, 2.5)),
    "tanhshrink": Entry(lambda c: lambda s, b, h, q, k: F.tanhshrink(s)),
    "gelu_tanh": Entry(lambda c: lambda s, b, h, q, k: F.gelu(s, approximate="tanh")),
    "arcs": Entry(lambda c: lambda s, b, h, q, k: torch.atan(s) * 2.0 + torch.asinh(s)),
    "hyperbolic": Entry(lambda c: lambda s, b, h, q, k: torch.sinh(s * 0.3) + torch.cosh(s * 0.2)),
    "erfc": Entry(lambda c: lambda s, b, h, q, k: torch.erfc(s) * -2.0),
    "hypot": Entry(lambda c: lambda s, b, h, q, k: torch.hypot(s, torch.ones_like(s)) + s * 0.5),
    "signed_root": Entry(
        lambda c: lambda s, b, h, q, k: torch.sign(s) * torch.sqrt(s.abs() + 1.0)
    ),
    "copysign": Entry(lambda c: lambda s, b, h, q, k: torch.copysign(s, (q - k) + 0.5)),
    "powers": Entry(lambda c: lambda s, b, h, q, k: torch.pow(1.3, s) + s**2 * 0.05),
    "without_nan": Entry(lambda c: lambda s, b, h, q, k: torch.nan_to_num(s) * 0.9),
    "addcmul": Entry(
        lambda c: lambda s, b, h, q, k: torch.addcmul(s, s, torch.cos(0.1 * (q - k)), value=0.3)
    ),
    "half_detached": Entry(lambda c: lambda s, b, h, q, k: s + 0.3 * s.detach()),
    "branches": Entry(
        lambda c: lambda s, b, h, q, k: torch.where(
            q > k, s, torch.where(q == k, s * 0.5 + 1.0, torch.where(h % 2 == 0, s - 0.3, -s))
        )
    ),
    "head_scale": Entry(lambda c: lambda s, b, h, q, k: s * (h + 1) / 4 - b),
    "number_for_rows": Entry(
        lambda c: lambda s, b, h, q, k: torch.where((q % 7 != 3) & (k <= q + 40), s, -1e9)
    ),
    "lowest": Entry(
        lambda c: lambda s, b, h, q, k: s.masked_fill(
            (q % 5 == 2) | (k % 4 == 1), torch.finfo(torch.float32).min
        )
    ),
    "added_lowest": Entry(
        lambda c: lambda s, b, h, q, k: s + c.lowest[b, q] + c.low[k],
        lambda s, r: {
            "lowest": -3.3e38 * r.flags(s.batch, s.q_len).float(),
            "low": -1e9 * r.flags(s.kv_len).float(),
        },
    ),
    "hidden": Entry(lambda c: lambda s, b, h, q, k: s.masked_fill(q + 40 < k, -math.inf)),
    "branch": Entry(lambda c: lambda s, b, h, q, k: torch.where(q >= k, s + 0.7, s * 0.5)),
    "flag": Entry(lambda c: lambda s, b, h, q, k: s + (q >= k).to(s.dtype)),
    "decay": Entry(lambda c: lambda s, b, h, q, k: s * torch.exp(-(q - k).abs() / 64.0)),
    "log_distance": Entry(
        lambda c: lambda s, b, h, q, k: s - torch.log1p((q - k).abs().to(s.dtype))
    ),
    "root_distance": Entry(lambda c: lambda s, b, h, q, k: s - torch.sqrt((q - k).abs() + 1.0)),
    "rotation": Entry(lambda c: lambda s, b, h, q, k: s * torch.cos((q - k) * 0.05)),
    "floors": Entry(lambda c: lambda s, b, h, q, k: s + (q // 8 - k // 8) * 0.1 + (k % 7) * 0.1),
    "largest": Entry(lambda c: lambda s, b, h, q, k: s - torch.maximum(q - k, k - q) * 0.02),
    "by_index": Entry(lambda c: lambda s, b, h, q, k: s + h * 0.1 - b * 0.2),
    "last": Entry(
        lambda c: lambda s, b, h, q, k: torch.where(q >= k, q - k, 0) * 0.05 + s
    ),
}  # fmt: skip

# They come first, or they would hide others.
IGNORING: dict[str, Entry] = {
    "zeros": Entry(lambda c: lambda s, b, h, q, k: torch.zeros_like(s), ignores_score=True),
    "full": Entry(lambda c: lambda s, b, h, q, k: torch.full_like(s, 0.25), ignores_score=True),
    "keys": Entry(lambda c: lambda s, b, h, q, k: (k % 7) * 0.3, ignores_score=True),
    "alone": Entry(
        lambda c: lambda s, b, h, q, k: c.alone[h, (q - k).abs()],
        lambda s, r: {"alone": r.normal(s.heads, span(s))},
        ("alone",),
        True,
    ),
    "outer": Entry(
        lambda c: lambda s, b, h, q, k: c.left[q] * c.right[k],
        lambda s, r: {"left": r.normal(s.q_len), "right": r.normal(s.kv_len)},
        ("left", "right"),
        True,
    ),
}  # fmt: skip

OLDER = BIASES | FUNCTIONS | IGNORING
SCORES = OLDER | made.SCORES | users.SCORES | later.SCORES | rarer.SCORES | compared.SCORES
# They come last: others would make NaN of an infinity, or overflow.
HIDING = frozenset({
    "hidden", "attended_keys", "added_mask", "number_for_rows", "lowest", "added_lowest",
})  # fmt: skip
