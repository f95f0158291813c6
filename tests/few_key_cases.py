"""Calls whose keys fit one tile, so that one kernel computes all gradients."""

from __future__ import annotations

from typing import Any

import torch

from flexhop.masks import causal
from tests.case_inputs import Case, Shape


def _case(name: str, shape: Shape, dtype: torch.dtype = torch.bfloat16, **facts: Any) -> Case:
    return Case(name, shape=shape, dtype=dtype, lse=True, **facts)


def _bias(s: Shape, r: Any) -> dict[str, Any]:
    return {"bias": r.normal(s.heads, s.q_len, s.kv_len)}


def _of_keys(s: Shape, r: Any) -> dict[str, Any]:
    return {"bias": r.normal(s.heads, s.kv_len), "factor": r.normal(s.heads)}


CASES = [
    _case("window", Shape(2, 4, 4, 49, 49, 32, 32)),
    _case("half", Shape(2, 4, 2, 64, 64, 64, 64), torch.float16, mask=lambda c: causal),
    # Blocks of queries that see no key, and single queries that see none.
    _case(
        "hidden", Shape(2, 1, 1, 250, 60, 16, 24),
        mask=lambda c: lambda b, h, q, k: (q > 140) & (q % 3 == k % 3) & (q != 200),
    ),
    _case("cross", Shape(2, 1, 1, 200, 77, 64, 40)),
    _case("one_key", Shape(2, 2, 2, 20, 1, 16, 16), score=lambda c: lambda s, b, h, q, k: 2 * s),
    _case(
        "learned", Shape(3, 4, 2, 40, 49, 16, 24), captures=_bias, learned=("bias",),
        score=lambda c: lambda s, b, h, q, k: s + c.bias[h, q, k],
    ),
    _case(
        "learned_100", Shape(2, 2, 2, 100, 100, 64, 64), captures=_bias, learned=("bias",),
        score=lambda c: lambda s, b, h, q, k: s + c.bias[h, q, k],
    ),
    _case(
        "keys", Shape(2, 4, 2, 33, 49, 16, 24), captures=_of_keys, learned=("bias", "factor"),
        score=lambda c: lambda s, b, h, q, k: s * c.factor[h] + c.bias[h, k],
    ),
    _case(
        "segments", Shape(2, 2, 2, 64, 64, 16, 16), learned=("table",),
        captures=lambda s, r: {"table": r.normal(5, 5), "ids": r.documents(5, 1, s.kv_len)[0]},
        score=lambda c: lambda s, b, h, q, k: s + c.table[c.ids[q], c.ids[k]],
    ),
    _case(
        "quotients", Shape(2, 2, 1, 60, 50, 16, 16), learned=("table",),
        captures=lambda s, r: {"table": r.normal(4, 2)},
        score=lambda c: lambda s, b, h, q, k: s * c.table[q // 16, k // 32],
    ),
    _case(
        "buckets", Shape(2, 2, 2, 64, 64, 16, 16), learned=("table",),
        captures=lambda s, r: {"table": r.normal(4, 5)},
        score=lambda c: lambda s, b, h, q, k: s + c.table[q // 16, (q - k).clamp(-2, 2) + 2],
    ),
    _case(
        "buckets_of_keys", Shape(2, 2, 2, 64, 64, 16, 16), learned=("table",),
        captures=lambda s, r: {"table": r.normal(5, 64)},
        score=lambda c: lambda s, b, h, q, k: s + c.table[(q - k).clamp(-2, 2) + 2, k],
    ),
    _case(
        "rows", Shape(2, 2, 2, 40, 33, 16, 16), learned=("rows",),
        captures=lambda s, r: {"rows": r.normal(s.kv_len, 12)},
        score=lambda c: lambda s, b, h, q, k: s * (1 + 0.1 * c.rows[k].tanh().sum(-1)),
    ),
    _case(
        "shifted", Shape(2, 4, 2, 49, 49, 32, 32), layout="bshd", per_head=True,
        mask=lambda c: lambda b, h, q, k: (q // 7 == k // 7) | ((h == 1) & (k < 3)),
    ),
    _case(
        "cap", Shape(2, 2, 2, 50, 50, 128, 128), mask=lambda c: causal, scale=-0.2,
        score=lambda c: lambda s, b, h, q, k: 5 * torch.tanh(s / 5),
    ),
]  # fmt: skip
