"""The vocabulary of random masks: what users write, with the tensors that it captures.

`s` is a shape: batch, heads, q_len and kv_len; `span` is the larger length. `r` draws numbers.
"""

from __future__ import annotations

import torch

from tests.fuzz import compared, later, made, rarer, users
from tests.fuzz.functions import Entry, span

POSITIONS: dict[str, Entry] = {
    "causal": Entry(lambda c: lambda b, h, q, k: q >= k),
    "causal_not": Entry(lambda c: lambda b, h, q, k: ~(k > q)),
    "anticausal": Entry(lambda c: lambda b, h, q, k: k > q),
    "window": Entry(lambda c: lambda b, h, q, k: (q - k).abs() <= 19),
    "window_left": Entry(lambda c: lambda b, h, q, k: torch.logical_and(q >= k, q - k < 23)),
    "band": Entry(lambda c: lambda b, h, q, k: (k - q > 3) & (k - q < 60)),
    "dilated": Entry(lambda c: lambda b, h, q, k: (q - k) % 5 == 0),
    "remainder": Entry(lambda c: lambda b, h, q, k: torch.remainder(k - q, 7) < 3),
    "strided": Entry(lambda c: lambda b, h, q, k: (k % 4 == 1) | (q - k < 9)),
    "blocked": Entry(lambda c: lambda b, h, q, k: q // 11 >= k // 11),
    "floored": Entry(
        lambda c: lambda b, h, q, k: (
            torch.div(q, 13, rounding_mode="floor") == torch.div(k, 13, rounding_mode="floor")
        )
    ),
    "checkered": Entry(lambda c: lambda b, h, q, k: (q // 9 + k // 5) % 2 == 0),
    "tiles": Entry(
        lambda c: lambda b, h, q, k: (
            ((q % 8 - k % 8).abs() <= 2) & ((q // 8 - k // 8).abs() <= 1)
        )
    ),
    "bitwise": Entry(lambda c: lambda b, h, q, k: ((q ^ k) & 4) == 0),
    "shifted": Entry(lambda c: lambda b, h, q, k: ((q >> 3) & 1) == ((k >> 3) & 1)),
    "hashed": Entry(lambda c: lambda b, h, q, k: (q * 7919 + k * 104729) % 11 < 5),
    "quotient": Entry(lambda c: lambda b, h, q, k: (q - k).abs() / 7 < 3.1),
    "true_quotients": Entry(
        lambda c: lambda b, h, q, k: (
            ((q % 27 - k % 27).abs() <= 2) & ((q / 27 - k / 27).abs() <= 3.01)
        )
    ),
    "root": Entry(lambda c: lambda b, h, q, k: torch.sqrt((q - k).abs() + 0.5) < 5.3),
    "line": Entry(lambda c: lambda b, h, q, k: q * 1.5 >= k),
    "heads": Entry(lambda c: lambda b, h, q, k: (h % 2 == 0) | (k % 3 == 0)),
    "by_head": Entry(lambda c: lambda b, h, q, k: q - k < (h + 1) * 17),
    "head_choice": Entry(lambda c: lambda b, h, q, k: torch.where(h % 2 == 0, q >= k, k >= q)),
    "by_batch": Entry(lambda c: lambda b, h, q, k: (q >= k) | (b == 0)),
    "rows": Entry(lambda c: lambda b, h, q, k: q % 3 != 1),
    "first": Entry(lambda c: lambda b, h, q, k: (q < 5) | (k < 5)),
    "reversed": Entry(lambda c: lambda b, h, q, k: q + k < 50),
    "clamped": Entry(
        lambda c: lambda b, h, q, k: k // 8 - torch.clamp(q // 8 - 1, 0, 9) < 3
    ),
    "le": Entry(lambda c: lambda b, h, q, k: k.le(q)),
    "difference": Entry(lambda c: lambda b, h, q, k: q.sub(k) >= 0),
    "signs": Entry(lambda c: lambda b, h, q, k: torch.sign(q - k) >= 0),
    "squares": Entry(lambda c: lambda b, h, q, k: (q - k) ** 2 < 300),
    "bool_product": Entry(lambda c: lambda b, h, q, k: (q >= k) * (q - k < 21)),
    "exclusive": Entry(lambda c: lambda b, h, q, k: torch.logical_xor(q % 4 == 0, k % 3 == 0)),
    "fmod": Entry(lambda c: lambda b, h, q, k: torch.fmod(q - k, 3) != 1),
    "extremes": Entry(
        lambda c: lambda b, h, q, k: torch.minimum(q, k) // 12 == torch.maximum(q, k) // 12
    ),
    "real_floors": Entry(
        lambda c: lambda b, h, q, k: torch.floor(q.float() * 0.3) >= torch.floor(k.float() * 0.3)
    ),
    "streaming": Entry(lambda c: lambda b, h, q, k: (k < 4) | ((q >= k) & (q - k < 16))),
    "chunked": Entry(lambda c: lambda b, h, q, k: (q // 16 == k // 16) & (k <= q)),
    "neighbours": Entry(
        lambda c: lambda b, h, q, k: (
            (((q // 8).clamp(2, 5) - k // 8).abs() <= 2)
            & (((q % 8).clamp(2, 5) - k % 8).abs() <= 2)
        )
    ),
    "shifted_windows": Entry(
        lambda c: lambda b, h, q, k: (
            ((q // 8 + 2) // 4 == (k // 8 + 2) // 4) & ((q % 8 + 2) // 4 == (k % 8 + 2) // 4)
        )
    ),
    "bits_of_heads": Entry(lambda c: lambda b, h, q, k: ((q & k & (h + 1)) == 0) | (q == k)),
    "nothing": Entry(lambda c: lambda b, h, q, k: q < 0),
    "everything": Entry(lambda c: lambda b, h, q, k: torch.ones_like(q, dtype=torch.bool)),
    "constant": Entry(lambda c: lambda b, h, q, k: b.new_ones((), dtype=torch.bool)),
    "same": Entry(lambda c: lambda b, h, q, k: b == b),
}  # fmt: skip

CAPTURES: dict[str, Entry] = {
    "documents": Entry(
        lambda c: lambda b, h, q, k: c.rows_of[b, q] == c.keys_of[b, k],
        lambda s, r: {
            "rows_of": r.documents(4, s.batch, s.q_len),
            "keys_of": r.documents(4, s.batch, s.kv_len),
        },
    ),
    "documents_twice": Entry(
        lambda c: lambda b, h, q, k: (c.document[q] == c.document[k]) & (q >= k),
        lambda s, r: {"document": r.documents(3, span(s)).long()},
    ),
    "documents_by_row": Entry(
        lambda c: lambda b, h, q, k: c.chained_docs[b][q] == c.chained_docs[b][k],
        lambda s, r: {"chained_docs": r.documents(3, s.batch, span(s)).to(torch.int16)},
    ),
    "prefix": Entry(
        lambda c: lambda b, h, q, k: k < c.prefix[b],
        lambda s, r: {"prefix": r.integers(s.kv_len + 1, s.batch)},
    ),
    "prefix_causal": Entry(
        lambda c: lambda b, h, q, k: (k < c.prompt[b]) | (q >= k),
        lambda s, r: {"prompt": r.integers(s.kv_len + 1, s.batch).long()},
    ),
    "zero_dim": Entry(
        lambda c: lambda b, h, q, k: q + c.begin >= k,
        lambda s, r: {"begin": r.integers(20, 1)[0]},
    ),
    "table": Entry(
        lambda c: lambda b, h, q, k: c.kept[k, q],
        lambda s, r: {"kept": r.flags(s.kv_len, s.q_len)},
    ),
    "table_of_heads": Entry(
        lambda c: lambda b, h, q, k: c.kept_by_head[h, q, k],
        lambda s, r: {"kept_by_head": r.flags(s.heads, s.q_len, s.kv_len)},
    ),
    "expanded": Entry(
        lambda c: lambda b, h, q, k: c.kept_once[b, h, q, k],
        lambda s, r: {
            "kept_once": r.flags(1, 1, s.q_len, s.kv_len).expand(s.batch, s.heads, -1, -1)
        },
    ),
    "integers": Entry(
        lambda c: lambda b, h, q, k: c.numbers[q, k] != 0,
        lambda s, r: {"numbers": r.integers(3, s.q_len, s.kv_len, dtype=torch.int64)},
    ),
    "keys": Entry(
        lambda c: lambda b, h, q, k: c.key_flags[b, k],
        lambda s, r: {"key_flags": r.flags(s.batch, s.kv_len)},
    ),
    "queries": Entry(
        lambda c: lambda b, h, q, k: c.query_flags[q],
        lambda s, r: {"query_flags": r.flags(s.q_len)},
    ),
    "floats": Entry(
        lambda c: lambda b, h, q, k: c.strength[k] > -0.5,
        lambda s, r: {"strength": r.normal(2 * s.kv_len)[::2]},
    ),
    "distance_flags": Entry(
        lambda c: lambda b, h, q, k: c.distance_flags[(q - k).abs()],
        lambda s, r: {"distance_flags": r.flags(span(s))},
    ),
    "wrapped": Entry(
        lambda c: lambda b, h, q, k: c.wrapped_flags[h, q - k],
        lambda s, r: {"wrapped_flags": r.flags(s.heads, span(s))},
    ),
    "gathered": Entry(
        lambda c: lambda b, h, q, k: k >= c.starts[c.group_of[q]],
        lambda s, r: {"starts": r.integers(s.kv_len, 13), "group_of": r.integers(13, s.q_len)},
    ),
    "permuted": Entry(
        lambda c: lambda b, h, q, k: c.place_of[q] >= c.place_of[k],
        lambda s, r: {"place_of": r.uniform(span(s)).argsort()},
    ),
    "lengths": Entry(
        lambda c: lambda b, h, q, k: (q < c.rows_used[b]) & (k < c.keys_used[b]),
        lambda s, r: {
            "rows_used": r.integers(s.q_len + 1, s.batch),
            "keys_used": r.integers(s.kv_len + 1, s.batch).to(torch.int16),
        },
    ),
    "prefix_of_document": Entry(
        lambda c: lambda b, h, q, k: (
            (c.section[q] == c.section[k])
            & ((q >= k) | (k - c.section_start[c.section[k]] < c.section_prefix[c.section[k]]))
        ),
        lambda s, r: {
            "section": r.documents(5, span(s)),
            "section_start": r.integers(span(s), 5).sort().values,
            "section_prefix": r.integers(9, 5).long(),
        },
    ),
    "begins": Entry(
        lambda c: lambda b, h, q, k: (k >= c.begin_of[q]) & (k <= q),
        lambda s, r: {"begin_of": r.integers(span(s), s.q_len).sort().values},
    ),
    "tree": Entry(
        lambda c: lambda b, h, q, k: (k < 9) | c.ancestors[q % 8, k % 8],
        lambda s, r: {"ancestors": r.flags(8, 8)},
    ),
    "sparse_blocks": Entry(
        lambda c: lambda b, h, q, k: (q // 16 == k // 16) | c.block_flags[h, q // 16, k // 16],
        lambda s, r: {"block_flags": r.flags(s.heads, s.q_len // 16 + 1, s.kv_len // 16 + 1)},
    ),
    "times": Entry(
        lambda c: lambda b, h, q, k: c.times[q] - c.times[k] > -0.2,
        lambda s, r: {"times": r.uniform(span(s)).sort().values},
    ),
    "bytes": Entry(
        lambda c: lambda b, h, q, k: c.bytes[k] > c.levels[q],
        lambda s, r: {
            "bytes": r.integers(9, s.kv_len).to(torch.uint8),
            "levels": r.integers(7, s.q_len).to(torch.int8),
        },
    ),
    "double_bound": Entry(
        lambda c: lambda b, h, q, k: q * 0.5 + c.bound >= k,
        lambda s, r: {"bound": r.uniform(1)[0].double() * 30},
    ),
    "padding_and_causal": Entry(
        lambda c: lambda b, h, q, k: c.attended[b, k].bool() & (k <= q + c.past),
        lambda s, r: {"attended": r.integers(2, s.batch, s.kv_len, dtype=torch.int64), "past": 3},
    ),
    "offset": Entry(lambda c: lambda b, h, q, k: q + c.shift >= k, lambda s, r: {"shift": 7}),
    "slope": Entry(
        lambda c: lambda b, h, q, k: (q - k) * c.slope < 10.0, lambda s, r: {"slope": 0.37}
    ),
    "flag": Entry(
        lambda c: lambda b, h, q, k: (q >= k) if c.is_causal else (k >= q),
        lambda s, r: {"is_causal": True},
    ),
}  # fmt: skip

OLDER = POSITIONS | CAPTURES
MASKS = OLDER | made.MASKS | users.MASKS | later.MASKS | rarer.MASKS | compared.MASKS
BY_BATCH = (
    frozenset(
        {
            "lengths",
            "padding_and_causal",
            "by_batch",
            "documents",
            "documents_by_row",
            "prefix",
            "prefix_causal",
            "expanded",
            "keys",
            "ends_of_batch",
        }
    )
    | rarer.BY_BATCH
    | compared.BY_BATCH
)
BY_HEAD = (
    frozenset({"heads", "by_head", "head_choice", "table_of_heads", "expanded", "wrapped"})
    | {"bits_of_heads", "sparse_blocks"}
    | users.BY_HEAD
    | rarer.BY_HEAD
    | compared.BY_HEAD
)
