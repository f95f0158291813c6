"""More of the vocabulary, for problems from FIRST on: those of smaller numbers stay as they are.

Tensors that mods make, writes in place, and short tensors that are used whole.
"""

from __future__ import annotations

import torch

from tests.fuzz.functions import Entry, span

FIRST = 10**9  # the smallest number of a problem that may have these


def _written(c):
    def mod(s, b, h, q, k):
        s += c.write_bias[h]
        s *= 0.7
        s.sub_((q - k).abs() * 0.01)
        return s

    return mod


def _masked_in_place(c):
    def mod(s, b, h, q, k):
        s.masked_fill_(q + 30 < k, -3.0)
        s[q == k] = 0.5
        return s

    return mod


def _filled_row(c):
    def mod(s, b, h, q, k):
        row = torch.stack([s, s * 0.5, s])
        row[2] = c.row_bias[k % 4]
        return row.sum() + 0.3 * row[2]

    return mod


def _without_gradient(c):
    def mod(s, b, h, q, k):
        with torch.no_grad():
            share = c.still.cumsum(0)
        return s + share[k % 4] * 0.2 + c.still[q % 4]

    return mod


def _with_default(c):
    def mod(s, b, h, q, k, *, factor=c.factor_given, table=c.table_given):
        return s * factor + table[(q - k) % 5]

    return mod


SCORES: dict[str, Entry] = {
    "made_slopes": Entry(
        lambda c: lambda s, b, h, q, k: (
            s
            - torch.exp2(-torch.arange(1.0, c.shape.heads + 1, device=q.device) / 2)[h]
            * (q - k).abs() * 0.1
        )
    ),
    "made_choice": Entry(
        lambda c: lambda s, b, h, q, k: (
            s + torch.tensor([0.5, -0.25, 1.0], device=q.device)[(q + k) % 3]
        )
    ),
    "made_of_score": Entry(lambda c: lambda s, b, h, q, k: s * s.new_tensor([0.9, 1.1])[k % 2]),
    "made_limit": Entry(
        lambda c: lambda s, b, h, q, k: torch.minimum(s, torch.tensor(1.5, device=q.device))
    ),
    "product": Entry(
        lambda c: lambda s, b, h, q, k: torch.stack([s, 1 + c.scales[h], c.scales[k % 4]]).prod(),
        lambda s, r: {"scales": r.normal(max(4, s.heads))},
        ("scales",),
    ),
    "shares": Entry(
        lambda c: lambda s, b, h, q, k: s + c.mixed.softmax(-1)[h, k % 5],
        lambda s, r: {"mixed": r.normal(s.heads, 5)},
        ("mixed",),
    ),
    "running": Entry(
        lambda c: lambda s, b, h, q, k: s - (c.steps**2).cumsum(0)[(q - k).abs()] * 0.02,
        lambda s, r: {"steps": r.normal(span(s))},
        ("steps",),
    ),
    "stacked": Entry(
        lambda c: lambda s, b, h, q, k: s + torch.stack([c.of_even, c.of_odd])[h % 2, k],
        lambda s, r: {"of_even": r.normal(s.kv_len), "of_odd": r.normal(s.kv_len)},
        ("of_even", "of_odd"),
    ),
    "whole": Entry(
        lambda c: lambda s, b, h, q, k: (
            s + (torch.stack([s, q * 0.01, k * 0.01]) * c.few).sum() + c.one.squeeze()
        ),
        lambda s, r: {"few": r.normal(3) * 0.3, "one": r.normal(1)},
        ("few", "one"),
    ),
    "bumps": Entry(
        lambda c: lambda s, b, h, q, k: (
            s + (c.heights * torch.exp(-(((q - k) * 0.1 - c.centers) ** 2))).sum()
        ),
        lambda s, r: {"heights": r.normal(4), "centers": r.normal(4)},
        ("heights", "centers"),
    ),
    "one_hot": Entry(
        lambda c: lambda s, b, h, q, k: (
            s + (torch.nn.functional.one_hot(k.long() % 3, 3) * c.of_class).sum()
        ),
        lambda s, r: {"of_class": r.normal(3)},
        ("of_class",),
    ),
    "gathered_once": Entry(
        lambda c: lambda s, b, h, q, k: (
            s + c.gathered_bias.gather(0, k.long().unsqueeze(0)).squeeze(0)
        ),
        lambda s, r: {"gathered_bias": r.normal(s.kv_len)},
        ("gathered_bias",),
    ),
    "spread": Entry(
        lambda c: lambda s, b, h, q, k: s - c.rows[q].var(unbiased=False) + c.rows[k].mean(),
        lambda s, r: {"rows": r.normal(span(s), 4)},
        ("rows",),
    ),
    "binned": Entry(
        lambda c: lambda s, b, h, q, k: (
            s + c.of_bin[torch.bucketize(c.level_of[q] - c.level_of[k], c.edges)]
        ),
        lambda s, r: {
            "of_bin": r.normal(8), "level_of": r.normal(span(s)),
            "edges": r.normal(7).sort().values,
        },
        ("of_bin",),
    ),
    "written": Entry(
        _written, lambda s, r: {"write_bias": r.normal(s.heads)}, ("write_bias",)
    ),
    "masked_in_place": Entry(_masked_in_place),
    "filled_row": Entry(_filled_row, lambda s, r: {"row_bias": r.normal(4)}, ("row_bias",)),
    "without_gradient": Entry(_without_gradient, lambda s, r: {"still": r.normal(4)}, ("still",)),
    "with_default": Entry(
        _with_default,
        lambda s, r: {"factor_given": 0.8, "table_given": r.normal(5)},
        ("table_given",),
    ),
}  # fmt: skip


IN_PLACE = frozenset({"written", "masked_in_place"})  # these write to the score that they get


def _joined_in_place(c):
    def mod(b, h, q, k):
        keep = q >= k
        keep |= (k - q) % 7 == 0
        keep &= (q + k) % 5 != 3
        return keep

    return mod


MASKS: dict[str, Entry] = {
    "chosen": Entry(
        lambda c: lambda b, h, q, k: torch.isin(k, c.chosen) | (q == k),
        lambda s, r: {"chosen": r.integers(s.kv_len, 5)},
    ),
    "chosen_of_many": Entry(
        lambda c: lambda b, h, q, k: torch.isin(k, c.many_chosen) | (q >= k),
        lambda s, r: {"many_chosen": r.integers(s.kv_len, 23).long()},
    ),
    "chosen_here": Entry(
        lambda c: lambda b, h, q, k: torch.isin(k - q, torch.tensor([0, 1, 4, 9], device=q.device))
    ),
    "ends": Entry(
        lambda c: lambda b, h, q, k: (q >= c.ends).sum() == (k >= c.ends).sum(),
        lambda s, r: {"ends": r.integers(span(s), 4).sort().values},
    ),
    "ends_of_batch": Entry(
        lambda c: lambda b, h, q, k: (
            torch.searchsorted(c.ends_of[b], q, right=True)
            == torch.searchsorted(c.ends_of[b], k, right=True)
        ),
        lambda s, r: {"ends_of": r.integers(span(s), s.batch, 3).sort(-1).values},
    ),
    "many_ends": Entry(
        lambda c: lambda b, h, q, k: torch.bucketize(q, c.many_ends) >= torch.bucketize(
            k, c.many_ends
        ),
        lambda s, r: {"many_ends": r.integers(span(s), 20).sort().values},
    ),
    "made_pattern": Entry(
        lambda c: lambda b, h, q, k: (
            torch.tril(torch.ones(8, 8, dtype=torch.bool, device=q.device))[q % 8, k % 8]
        )
    ),
    "joined_in_place": Entry(_joined_in_place),
}  # fmt: skip
