"""Plain dense mathematics of flash-attn's functions, one sequence at a time."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: options as flash-attn has them, and the shape of its slopes."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    slopes: str = ""  # "heads" or "batch"
    scale: float | None = None
    heads: int = 2
    kv_heads: int = 2

    @property
    def options(self) -> dict:
        return {
            "softmax_scale": self.scale, "causal": self.causal, "window_size": self.window,
            "softcap": self.softcap,
        }  # fmt: skip

    def make_slopes(self, batch: int, device="cpu", dtype=torch.float64) -> Tensor | None:
        size = {"heads": (self.heads,), "batch": (batch, self.heads)}.get(self.slopes)
        return None if size is None else 0.01 + torch.rand(size, device=device, dtype=dtype)


CASES = {
    "plain": Case(),
    "causal": Case(causal=True),
    "scale": Case(scale=0.7, heads=4, kv_heads=2),
    "window": Case(window=(20, 5)),
    "left": Case(window=(33, -1), heads=3, kv_heads=1),
    "right": Case(window=(-1, 7)),
    "own_key": Case(window=(0, 0)),
    "causal_window": Case(causal=True, window=(40, 9)),
    "softcap": Case(softcap=1.5, causal=True),
    "alibi": Case(slopes="heads", causal=True),
    "alibi_both_sides": Case(slopes="batch"),
    "everything": Case(True, (50, 3), 2.0, "batch", 0.3, 6, 2),
}


def attend_sequence(
    case: Case, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q [M, Hq, D], k and v [N, Hkv, D], slopes [Hq] -> out [M, Hq, Dv], lse [Hq, M]."""
    group = case.heads // case.kv_heads
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scale = q.size(-1) ** -0.5 if case.scale is None else case.scale
    score = torch.einsum("mhd,nhd->hmn", q, k) * scale
    if case.softcap:
        score = case.softcap * torch.tanh(score / case.softcap)
    rows, columns = torch.arange(q.size(0))[:, None], torch.arange(k.size(0))[None]
    ahead = columns - (rows + k.size(0) - q.size(0))
    if slopes is not None:
        score = score - slopes[:, None, None] * ahead.abs()
    left, right = case.window
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if case.causal:
        hidden |= ahead > 0
    if right >= 0:
        hidden |= ahead > right
    if left >= 0:
        hidden |= -ahead > left
    score = score.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(score, -1) if k.size(0) else score.new_full(score.shape[:2], -torch.inf)
    safe = torch.where(lse.isinf(), 0.0, lse)
    weights = torch.where(hidden, 0.0, torch.exp(score - safe[..., None]))
    return torch.einsum("hmn,nhd->mhd", weights, v), lse


def slopes_of(slopes: Tensor | None, number: int) -> Tensor | None:
    return slopes if slopes is None or slopes.dim() == 1 else slopes[number]


def attend_batch(case: Case, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None):
    """Padded batches: out [B, M, Hq, Dv], lse [B, Hq, M]."""
    parts = [
        attend_sequence(case, q[b], k[b], v[b], slopes_of(slopes, b)) for b in range(q.size(0))
    ]
    outs, statistics = zip(*parts, strict=True)
    return torch.stack(outs), torch.stack(statistics)


def attend_packed(case: Case, q: Tensor, k: Tensor, v: Tensor, slopes, queries, keys):
    """Packed sequences of these lengths: out [T, Hq, Dv], lse [Hq, T]."""
    parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    results = [
        attend_sequence(case, *part, slopes_of(slopes, number))
        for number, part in enumerate(parts)
    ]
    outs, statistics = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(statistics, 1)


def turn(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [S, H, D] times exp(i angles [S, R/2]) in complex numbers."""
    width = 2 * angles.size(1)
    head = x[..., :width]
    if not interleaved:
        head = head.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    turned = torch.view_as_complex(head.unflatten(-1, (-1, 2)).contiguous())
    turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
    head = torch.view_as_real(turned).flatten(-2)
    if not interleaved:
        head = head.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((head, x[..., width:]), -1)
