"""Packed sequences as one dense call: every score of every pair of tokens, by the formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.budgets import Dense, assert_within_budget, dense_attention, dense_backward


def sequence_and_place(
    lengths: tuple[int, ...], tokens: int, device: Any
) -> tuple[Tensor, Tensor]:
    """Of every token its sequence and its place in it; tokens behind the last have sequence -1."""
    sequence = torch.full((tokens,), -1)
    place = torch.zeros(tokens, dtype=torch.int64)
    first = 0
    for number, length in enumerate(lengths):
        sequence[first : first + length] = number
        place[first : first + length] = torch.arange(length)
        first += length
    return sequence.to(device), place.to(device)


def distances(
    queries: tuple[int, ...], keys: tuple[int, ...], tokens: int, device: Any,
    counted: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """How far a key lies behind the one that a query is aligned with, and whether both are of one
    sequence: [T, U] each.

    counted: keys of each sequence that count, the last of which is aligned with the last query;
    None aligns the first with the first.
    """
    (of_q, at_q), (of_k, at_k) = (
        sequence_and_place(lengths, count, device)
        for lengths, count in ((queries, tokens), (keys, sum(keys)))
    )
    if counted is not None:
        shift = torch.tensor(counted, device=device) - torch.tensor(queries, device=device)
        at_q = at_q + shift[of_q.clamp(min=0)]
    return at_k - at_q[:, None], (of_q[:, None] == of_k) & (of_q >= 0)[:, None]


def between(ahead: Tensor, same: Tensor, left: int | None, right: int | None) -> Tensor:
    """Which keys lie at most `left` before and `right` behind; None is any number."""
    kept = same
    if left is not None:
        kept = kept & (ahead >= -left)
    if right is not None:
        kept = kept & (ahead <= right)
    return kept


def attend_packed(
    leaves: list[Tensor], visible: Tensor, score_mod: Callable[..., Tensor] | None, scale: float
) -> Dense:
    """The formula on packed [T, H, D] leaves; score_mod sees packed positions."""
    batched = [leaf.transpose(0, 1)[None] for leaf in leaves[:3]]
    return dense_attention(*batched, score_mod, visible, scale)


def judge(
    found: dict[str, Tensor],
    leaves: dict[str, Tensor],
    visible: Tensor,
    make_score: Callable[[dict[str, Tensor]], Callable[..., Tensor] | None],
    grad: Tensor | None,
    scale: float,
) -> None:
    """Hold results of packed tokens against the formula in fp64 and in their dtype.

    found: out [T, H, Dv], lse [T, H], and the gradients of leaves by name, if there is a grad.
    """
    outcomes = []
    for dtype in (torch.float64, leaves["query"].dtype):
        copies = {n: t.detach().to(dtype).requires_grad_() for n, t in leaves.items()}
        dense = attend_packed(list(copies.values()), visible, make_score(copies), scale)
        results = {"out": dense.out[0].transpose(0, 1), "lse": dense.lse[0].mT}
        if grad is not None:
            dense_backward(dense, grad.to(dtype).transpose(0, 1)[None], None)
            results |= {name: copy.grad for name, copy in copies.items() if copy.grad is not None}
        outcomes.append(results)
    gold, reference = outcomes
    for name, actual in found.items():
        assert_within_budget(
            actual, gold[name], reference[name], name=name, captured=name == "slopes"
        )
