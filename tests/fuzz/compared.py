"""Distances and losses between rows, functions that rank and norm, for problems from FIRST on.

What PyTorch has for rows of numbers and few mods call: its batching rules, writes into what it has
made, and functions without Triton code are met here. Others keep their functions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.fuzz.functions import Entry, span
from tests.fuzz.rarer import alike, rows, two_rows

# The smallest number of a problem that may have these.
FIRST = 37 * 10**8


def _of_pair(name, function, factor=1.0, width=3):
    """A score_mod that adds a function of the rows of a query and a key, all of them learned."""
    names = (f"{name}_q", f"{name}_k")

    def make(c):
        left, right = (getattr(c, each) for each in names)
        return lambda s, b, h, q, k: s + function(left[q], right[k])

    return Entry(make, two_rows(*names, width, factor), names)


def _of_key(name, function, width=6):
    """The same of the row of a key."""

    def make(c):
        row_of = getattr(c, name)
        return lambda s, b, h, q, k: s + function(row_of[k])

    return Entry(make, rows(name, "k", width), (name,))


def _around(row):
    return F.pad(row[None, None], (2, 1), mode="circular")[0, 0]


def _filled(x, y):
    filled, other = alike(x.index_fill(0, torch.tensor([0], device=x.device), 0.5), y)
    return filled @ other


def _waves(c):
    def mod(s, b, h, q, k):
        return s + (c.height_of[h] * torch.sin((q - k) * c.speed_of[h])).sum(-1)

    return mod


def _fire(c):
    def mod(s, b, h, q, k):
        far, length = (q - k).abs().float(), torch.maximum(q, k).float()
        place = torch.log1p(far) / torch.log1p(length + 1)
        hidden, weights = alike(torch.relu(place * c.fire_in + c.fire_at), c.fire_out)
        return s + hidden @ weights

    return mod


def _written_in_two_halves(c):
    """Block diffusion: noisy copies of tokens, and behind them the clean ones."""

    def mod(b, h, q, k):
        half = c.half_at.shape[0]
        blocks = [torch.where(at >= half, at - half, at) // 4 for at in (q, k)]
        own = (blocks[0] == blocks[1]) & ((q >= half) == (k >= half))
        return own | ((blocks[0] > blocks[1]) & (k >= half))

    return mod


SCORES: dict[str, Entry] = {
    "cdist": _of_pair("apart", lambda x, y: -torch.cdist(x[None], y[None] + 3).squeeze(), 0.4),
    "mse": _of_pair("square", lambda x, y: -F.mse_loss(x, y)),
    "smooth": _of_pair("smooth", lambda x, y: -F.smooth_l1_loss(x, y, beta=0.5)),
    "huber": _of_pair("huber", lambda x, y: -F.huber_loss(x, y, delta=0.7)),
    "stacked_columns": _of_pair(
        "column", lambda x, y: torch.column_stack([x, y]).logsumexp(1).sum() * 0.3
    ),
    "filled_rows": _of_pair("filled", _filled, 0.5),
    "joined": _of_pair(
        "joined", lambda x, y: torch.hstack([x, y]).amax() - torch.fmin(x, y).sum()
    ),
    "around": _of_pair("around", lambda x, y: _around(x)[1] * _around(y)[-1]),
    "two_softmaxes": _of_pair("soft", lambda x, y: (F.softmin(x, 0) * y.softmax(0)).sum() * 3),
    "best_two": _of_key("best_of", lambda row: row.topk(2).values.sum() * 0.5),
    "second": _of_key("second_row", lambda row: row.kthvalue(2).values),
    "middle": _of_key("middle_of", lambda row: row.median()),
    "spread_of_row": _of_key("spread_row", lambda row: row.std() - torch.var_mean(row)[1]),
    "normed": _of_key("normed_row", lambda row: F.normalize(row, dim=-1)[0]),
    "layer_normed": _of_key("layer_row", lambda row: F.layer_norm(row, (6,))[1]),
    "rms_normed": _of_key("rms_row", lambda row: F.rms_norm(row, (6,))[1]),
    "largest_so_far": _of_key("largest_row", lambda row: row.cummax(-1).values[3]),
    "gated_row": _of_key("gated_row", lambda row: F.glu(row, -1).sum() * 0.5),
    "waves_of_head": Entry(
        _waves,
        lambda s, r: {
            "height_of": r.normal(s.heads, 4) * 0.3, "speed_of": r.normal(s.heads, 4) * 0.1
        },
        ("height_of", "speed_of"),
    ),
    "fire": Entry(
        _fire,
        lambda s, r: {
            "fire_in": r.normal(8), "fire_at": r.normal(8), "fire_out": r.normal(8) * 0.3
        },
        ("fire_in", "fire_at", "fire_out"),
    ),
    "polygamma": Entry(
        lambda c: lambda s, b, h, q, k: s + torch.polygamma(1, (q - k).abs() + 1.0)
    ),
    "exponential_integral": Entry(
        lambda c: lambda s, b, h, q, k: s + torch.special.i0e(c.decay_rate[h] * (q - k)),
        lambda s, r: {"decay_rate": r.uniform(s.heads)}, ("decay_rate",),
    ),
    "shares_of_heads": Entry(
        lambda c: lambda s, b, h, q, k: s * F.softmax(c.share_of, 0)[h] * 3,
        lambda s, r: {"share_of": r.normal(s.heads)}, ("share_of",),
    ),
    "polynomial": Entry(
        lambda c: lambda s, b, h, q, k: (
            s + sum(a * s.tanh() ** i for i, a in enumerate(c.powers_of))
        ),
        lambda s, r: {"powers_of": r.normal(3) * 0.3}, ("powers_of",),
    ),
    "logaddexp2": Entry(
        lambda c: lambda s, b, h, q, k: torch.logaddexp2(s, c.least_log[h]),
        lambda s, r: {"least_log": r.normal(s.heads)}, ("least_log",),
    ),
}  # fmt: skip

MASKS: dict[str, Entry] = {
    "in_best": Entry(
        lambda c: lambda b, h, q, k: (c.wanted_of[q].topk(3).indices == k % 8).any(),
        lambda s, r: {"wanted_of": r.normal(s.q_len, 8)},
    ),
    "in_row": Entry(
        lambda c: lambda b, h, q, k: torch.isin(k // 4, c.listed_of[q]),
        lambda s, r: {"listed_of": r.integers(10, s.q_len, 3)},
    ),
    "same_largest": Entry(
        lambda c: lambda b, h, q, k: c.votes_of[q].argmax() == c.votes_of[k].argmax(),
        lambda s, r: {"votes_of": r.normal(span(s), 4)},
    ),
    "counted_ends": Entry(
        lambda c: lambda b, h, q, k: (
            (c.end_of[b].cumsum(-1)[q] == c.end_of[b].cumsum(-1)[k]) & (q >= k)
        ),
        lambda s, r: {"end_of": r.integers(9, s.batch, span(s)) == 0},
    ),
    "tiles_of_video": Entry(
        lambda c: lambda b, h, q, k: (
            (((q // 8) % 4 - (k // 8) % 4).abs() <= 1) & ((q // 32 - k // 32).abs() <= 1)
        )
    ),
    "block_diffusion": Entry(
        _written_in_two_halves, lambda s, r: {"half_at": torch.zeros(s.q_len // 2 + 1)}
    ),
    "later_tokens": Entry(
        lambda c: lambda b, h, q, k: (k <= q - c.ahead_of[h]) | (k < 1),
        lambda s, r: {"ahead_of": r.integers(4, s.heads)},
    ),
    "dilated_by_head": Entry(lambda c: lambda b, h, q, k: (q - k) % (2 ** (h % 4)) == 0),
    "interleaved": Entry(
        lambda c: lambda b, h, q, k: ((q & 1) | ((q >> 1) & 2)) == ((k & 1) | ((k >> 1) & 2))
    ),
    "padded_rows": Entry(
        lambda c: lambda b, h, q, k: _around(c.ring_of[q // 16])[k % 9] > -0.5,
        lambda s, r: {"ring_of": r.normal(s.q_len // 16 + 1, 6)},
    ),
    "small_matrix": Entry(
        lambda c: lambda b, h, q, k: torch.ones(8, 8, device=q.device).tril().bool()[q % 8, k % 8]
    ),
}  # fmt: skip
BY_BATCH = frozenset({"counted_ends"})
BY_HEAD = frozenset({"later_tokens", "dilated_by_head"})
