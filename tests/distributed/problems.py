"""Masks and mods that a mesh has to compute as one process does, some of them drawn at random."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flexhop
from flexhop import masks

BATCH, HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 2, 4, 2, 8, 6
BLOCK = 16
DEVICE = torch.device(os.environ.get("FLEXHOP_TEST_DEVICE", "cpu"))  # "cuda" runs all on NCCL
Score = Callable[..., Tensor]


class Sizes(NamedTuple):
    """Of one problem."""

    length: int = 203  # no multiple of anything here
    block: int | tuple[int, int] = BLOCK


class Problem(NamedTuple):
    """A mask and a score_mod over whole tensors.

    mask: a function of length and generator, to mask_mod, batches and heads; None for no mask.
    captures: shapes of captured tensors that get gradients. score: from them to the score_mod.
    """

    mask: Callable[[int, torch.Generator], tuple[Any, int | None, int | None]] | None
    captures: tuple[tuple[Any, ...], ...] = ()
    score: Callable[..., Score] | None = None


def _ids(length: int) -> Tensor:
    lengths = torch.tensor([50, 7, 61, 1, 0, 40, 30, 14])
    return masks.ids_from_lengths(lengths, length).to(DEVICE)


def _plain(mask_mod: Any) -> Callable[..., Any]:
    return lambda length, generator: (mask_mod, None, None)


def _by_batch(length: int, generator: torch.Generator) -> Any:
    lengths = torch.tensor([length // 3, length - 5], device=DEVICE)
    return masks.prefix_lm(lengths), BATCH, None


def _by_head(length: int, generator: torch.Generator) -> Any:
    windows = torch.tensor([5, 40, 90, length], device=DEVICE)
    return (lambda b, h, q, k: (q >= k) & (q - k < windows[h])), None, HEADS


def _table(length: int, generator: torch.Generator) -> Any:
    table = torch.rand(length, length, generator=generator) < 0.3
    table[: length // 2, length // 2 :] = False
    table = table.to(DEVICE)
    return (lambda b, h, q, k: table[q, k]), None, None


PROBLEMS: dict[str, Problem] = {
    "causal": Problem(_plain(masks.causal)),
    "no mask, bias of keys": Problem(
        None, ((BATCH, "S"),), lambda bias: lambda s, b, h, q, k: s + bias[b, k]
    ),
    "window, learned ALiBi": Problem(
        _plain(masks.sliding_window(40)), ((HEADS,),),
        lambda slopes: lambda s, b, h, q, k: s - slopes[h].exp() * (q - k),
    ),
    "documents, relative bias": Problem(
        lambda length, _: (masks.packed_causal(_ids(length)), None, None), ((HEADS, "S"),),
        lambda table: lambda s, b, h, q, k: s + table[h, (q - k).abs()],
    ),
    "prefix by batch, soft cap": Problem(
        _by_batch, (), lambda: lambda s, b, h, q, k: 5 * torch.tanh(s / 5)
    ),
    "window by head, gate": Problem(
        _by_head, ((HEADS,),), lambda gate: lambda s, b, h, q, k: s * torch.sigmoid(gate[h])
    ),
    "anticausal": Problem(_plain(lambda b, h, q, k: k >= q)),
    "blocked": Problem(_plain(lambda b, h, q, k: q // 37 == k // 37)),
    "dilated window": Problem(_plain(masks.dilated_sliding_window(9, 7))),
    "global tokens": Problem(
        _plain(flexhop.or_masks(masks.sliding_window(20), masks.global_tokens(3)))
    ),
    "rows that see nothing": Problem(
        _plain(lambda b, h, q, k: (q % 3 != 1) & (q >= k) & (q > 40)), (("S",),),
        lambda gate: lambda s, b, h, q, k: s * gate[q],
    ),
    "forgetting": Problem(
        _plain(masks.causal), ((HEADS, "S"),),
        lambda fade: lambda s, b, h, q, k: s + fade[h, q] - fade[h, k],
    ),
    "random table, pair bias": Problem(
        _table, (("S", "S"),), lambda bias: lambda s, b, h, q, k: s + bias[q, k]
    ),
    "nothing at all": Problem(_plain(lambda b, h, q, k: q < 0)),
}  # fmt: skip

# What random problems are made of: terms of masks, and of scores with what they capture.
_MASK_TERMS = (
    "q >= k", "q - k < {w}", "k - q <= {w}", "(q - k).abs() < {w}", "k < {w}",
    "q // {w} == k // {w}", "(q + h * {w} >= k)", "k % 3 != 1",
    "(q - k) % {p} == 0", "q + b * 9 >= k", "(q ^ k) & 4 == 0",
)  # fmt: skip
_SCORE_TERMS = (
    ("s + t[h] * (k - q)", (HEADS,)), ("s + t[b, h]", (BATCH, HEADS)),
    ("s * torch.exp(t[k])", ("S",)), ("s + t[q] * t[k]", ("S",)),
    ("s + t[torch.clamp(q - k, -9, 9) + 9]", (19,)),
    ("torch.tanh(s) + t[h, q]", (HEADS, "S")), ("torch.where(q >= k, s, s * t[h])", (HEADS,)),
    ("s + t[q // 7, k // 7]", (32, 32)), ("s - torch.log1p((q - k).abs() * t[h].exp())", (HEADS,)),
)  # fmt: skip


def random_problem(number: int) -> Problem:
    """A mask of up to three terms, and a score of up to two."""
    draw = random.Random(number)
    terms = [
        f"({t.format(w=draw.randint(3, 90), p=draw.randint(2, 7))})"
        for t in draw.sample(_MASK_TERMS, draw.randint(1, 3))
    ]
    text = terms[0]
    for term in terms[1:]:
        text += draw.choice((" & ", " | ")) + term
    mask_mod = eval(f"lambda b, h, q, k: {text}", {"torch": torch})
    chosen = draw.sample(_SCORE_TERMS, draw.randint(0, 2))
    if not chosen:
        return Problem(lambda length, _: (mask_mod, BATCH, HEADS))
    steps = [eval(f"lambda s, b, h, q, k, t: {code}", {"torch": torch}) for code, _ in chosen]

    def score(*captures: Tensor) -> Score:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            for step, capture in zip(steps, captures, strict=True):
                s = step(s, b, h, q, k, capture)
            return s

        return score_mod

    shapes = tuple(shape for _, shape in chosen)
    return Problem(lambda length, _: (mask_mod, BATCH, HEADS), shapes, score)


def find(name: str | int) -> Problem:
    """A problem by its name, or a random one by its number."""
    return random_problem(name) if isinstance(name, int) else PROBLEMS[name]


class Whole(NamedTuple):
    """Whole operands of a problem, and its mask."""

    operands: tuple[Tensor, Tensor, Tensor]
    captures: tuple[Tensor, ...]
    grads: tuple[Tensor, Tensor]  # of out and of lse
    block_mask: Any
    score: Callable[..., Score] | None

    def score_mod(self, captures: tuple[Tensor, ...]) -> Score | None:
        """The score_mod that captures these tensors."""
        return None if self.score is None else self.score(*captures)


def make_whole(problem: Problem, sizes: Sizes, dtype: torch.dtype = torch.float64) -> Whole:
    """Random operands, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    length = sizes.length

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    operands = (
        normal(BATCH, HEADS, length, WIDTH), normal(BATCH, KV_HEADS, length, WIDTH),
        normal(BATCH, KV_HEADS, length, VALUE_WIDTH),
    )  # fmt: skip
    grads = normal(BATCH, HEADS, length, VALUE_WIDTH), normal(BATCH, HEADS, length)
    captures = tuple(
        0.3 * normal(*(length if size == "S" else size for size in shape))
        for shape in problem.captures
    )
    block_mask = None
    if problem.mask is not None:
        mask_mod, batches, heads = problem.mask(length, generator)
        block_mask = flexhop.create_block_mask(
            mask_mod, batches, heads, length, length, device=DEVICE, BLOCK_SIZE=sizes.block
        )
    return Whole(operands, captures, grads, block_mask, problem.score)
