"""A problem is a number: from it a case of tests/case_inputs.py is drawn, and nothing else."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch

from flexhop import KernelOptions
from tests.case_inputs import Case, Shape
from tests.fuzz.functions import MASKS, SCORES, Entry, chain_scores, combine_masks

LENGTHS = (1, 2, 7, 16, 17, 31, 33, 37, 48, 63, 64, 65, 70)
LONG = (100, 127, 128, 129, 200, 257, 513, 1024, 1030, 1281)
WIDTHS = (8, 16, 17, 24, 32, 40)
WIDE = (48, 64, 64, 72, 80, 96, 128, 128, 192, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Problem(NamedTuple):
    """What a number stands for. words: for people. dynamic: as for torch.compile."""

    case: Case
    words: str
    dynamic: bool


def draw(seed: int, *, large: bool = False) -> Problem:
    """The problem of a number.

    Args:
        seed: any number; the same problem in every run and on every machine.
        large: sizes as on a GPU, for kernels that are generated and perhaps run there.
    """
    r = random.Random(f"flexhop {seed}")
    shape = _shape(r, large)
    masks = r.sample(sorted(MASKS), r.choice([0, 1, 1, 2, 3]))
    scores = _scores(r)
    how = r.choice(["and", "or"])
    entries = [*(MASKS[n] for n in masks), *(SCORES[n] for n in scores)]
    ignores = any(SCORES[n].ignores_score for n in scores)
    case = Case(
        f"random_{seed}",
        score=chain_scores([SCORES[n] for n in scores]) if scores else None,
        mask=combine_masks([MASKS[n] for n in masks], how) if masks else None,
        captures=lambda s, random_: _captured(entries, s, random_),
        learned=tuple(n for e in entries for n in e.learned if r.random() < 0.6),
        shape=shape, dtype=r.choice(DTYPES),
        block_size=r.choice([128, 128, 64, 32, 20, (48, 16), (16, 64)]),
        per_batch=True, per_head=True, scale=r.choice([None, None, None, 0.3, -0.2]),
        layout=r.choice(["contiguous", "bshd", "column", "padded", "offset"]),
        options=_options(r, shape), lse=r.random() < 0.4, ignores_score=ignores, stock=False,
    )  # fmt: skip
    dynamic = r.random() < 0.2
    words = f"{shape} {case.dtype} masks {how} {masks} scores {scores} learned {case.learned}"
    words += f" blocks {case.block_size} {case.layout} {case.options} dynamic {dynamic}"
    return Problem(case, words, dynamic)


def _shape(r: random.Random, large: bool) -> Shape:
    heads, group = r.choice([1, 2, 3]), r.choice([1, 1, 2, 3, 7])
    lengths = LENGTHS + LONG if large else LENGTHS
    q_len, kv_len = r.choice(lengths), r.choice(lengths)
    if r.random() < 0.5:
        kv_len = q_len
    if r.random() < 0.15:
        q_len = r.choice([1, 1, 2, 5])
    width = r.choice(WIDTHS + WIDE * 2 if large else WIDTHS)
    value = r.choice(WIDTHS) if r.random() < 0.2 else width
    shared = 1 if r.random() < 0.1 else None
    return Shape(r.choice([1, 2]), heads * group, heads, q_len, kv_len, width, value, shared)


def _scores(r: random.Random) -> list[str]:
    """Names of score_mods; one that ignores its score comes first, or it would hide others."""
    names = r.sample(sorted(SCORES), r.choice([0, 1, 1, 2, 3]))
    ignoring = [n for n in names if SCORES[n].ignores_score][:1]
    return ignoring + [n for n in names if not SCORES[n].ignores_score]


def _captured(entries: list[Entry], shape: Any, values: Any) -> dict[str, Any]:
    return {name: value for e in entries for name, value in e.captures(shape, values).items()}


def _options(r: random.Random, shape: Shape) -> KernelOptions | None:
    chosen: dict[str, Any] = {}
    if r.random() < 0.2:
        chosen["deterministic"] = True
    if r.random() < 0.15:
        chosen["short_queries"] = "forward"
    if r.random() < 0.1:
        chosen["splits"] = r.choice([1, 2, 5])
    return KernelOptions(**chosen) if chosen else None
