"""Calls whose integers lie: page numbers, lengths, offsets and indices that name no place.

Compiled calls do not wait for a GPU to read them. Results are undefined then, but no kernel reads
or writes outside of its tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flexhop
from tests.varlen_cases import Packed, packed_call

WORST = (-(2**31), 2**31 - 1, -1, 10**6, -300, 2)  # some of them fit
LENGTH = 132


@dataclasses.dataclass(frozen=True)
class Hostile:
    """call(*floats, *integers); floats have gradients if `is_trained`."""

    call: Callable[..., Any]
    floats: dict[str, Tensor]
    integers: dict[str, Tensor]
    is_trained: bool = True

    @property
    def operands(self) -> list[Tensor]:
        return [*self.floats.values(), *self.integers.values()]


def bad(*shape: int) -> Tensor:
    """Integers from the worst ones."""
    places = torch.randint(len(WORST), shape, generator=torch.Generator().manual_seed(0))
    return torch.tensor(WORST, dtype=torch.int64)[places].to(torch.int32)


def floats(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def dense(width: int, **more: tuple[int, ...]) -> dict[str, Tensor]:
    shape = (1, 2, LENGTH, width)
    return floats(query=shape, key=shape, value=shape, **more)


# Each by options of the kernel and the width of a head.


def captured(options: Any, width: int) -> Hostile:
    """A learned table and a mask that are read at computed indices."""

    def call(query, key, value, table, ids):
        return flexhop.flex_attention(
            query, key, value,
            score_mod=lambda s, b, h, q, k: s + table[h, ids[q] + k] * table[h, ids[k]],
            block_mask=flexhop.create_block_mask(
                lambda b, h, q, k: (ids[q] >= k) | (q >= k), None, None, LENGTH, LENGTH,
                query.device,
            ),
            kernel_options=options,
        )  # fmt: skip

    return Hostile(call, dense(width, table=(2, 50)), {"ids": bad(LENGTH)})


def packed(options: Any, width: int) -> Hostile:
    """Offsets of sequences that decrease, and lie before and behind the tokens."""
    call = packed_call(Packed((1,) * 6, causal=True, score=True, mask=True), options=options)
    shape = (LENGTH, 2, width)
    return Hostile(
        call,
        floats(query=shape, key=shape, value=shape, slopes=(6, 2)),
        {"offsets_q": bad(7), "offsets_k": bad(8)[1:]},
    )


def used(options: Any, width: int) -> Hostile:
    """Numbers of used keys that are none."""
    case = Packed((33,) * 4, causal=True)

    def call(query, key, value, slopes, offsets, lengths):
        return packed_call(case, lengths, options)(query, key, value, slopes, offsets)

    shape = (LENGTH, 2, width)
    offsets = torch.arange(0, LENGTH + 1, 33, dtype=torch.int32)
    return Hostile(
        call,
        floats(query=shape, key=shape, value=shape, slopes=(4, 2)),
        {"offsets": offsets, "lengths": bad(4)},
    )


def paged(options: Any, width: int, queries: int = 1) -> Hostile:
    """Pages that the cache does not have, and lengths that the table has no room for."""

    def call(query, key, value, pages, lengths):
        table = flexhop.PageTable(pages, 16, lengths)
        return flexhop.flex_attention(
            query, key, value, page_table=table, enable_gqa=True, kernel_options=options
        )

    shape = (9, 2, 16, width)
    return Hostile(
        call,
        floats(query=(6, 4, queries, width), key=shape, value=shape),
        {"pages": bad(6, 8), "lengths": bad(6)},
        is_trained=False,
    )


def prompt(options: Any, width: int) -> Hostile:
    return paged(options, width, queries=70)


KINDS = {f.__name__: f for f in (captured, packed, used, paged, prompt)}
