"""Packed sequences, and the loop over sequences that they are compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flexhop


@dataclasses.dataclass(frozen=True)
class Packed:
    """One call of varlen_attention: lengths per sequence, and options."""

    queries: tuple[int, ...]
    keys: tuple[int, ...] | None = None
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    bottom_right: bool = True
    used: tuple[int, ...] | None = None
    score: bool = False
    mask: bool = False
    padding: int = 0  # query tokens behind the last sequence

    @property
    def key_lengths(self) -> tuple[int, ...]:
        return self.queries if self.keys is None else self.keys


CASES = {
    "alike": Packed((40, 7, 130, 1, 64)),
    "causal": Packed((40, 7, 130, 1, 64), causal=True),
    "cross": Packed((5, 0, 130, 1, 64), (7, 3, 100, 0, 64), padding=3),
    "cross_causal": Packed((5, 0, 130, 1, 64), (7, 3, 150, 0, 64), causal=True, score=True),
    "top_left": Packed((30, 20), (20, 60), causal=True, bottom_right=False, mask=True),
    "window": Packed((140, 150), window=(20, 5), score=True),
    "left_window": Packed((90, 3, 200), causal=True, window=(33, None), heads=6, kv_heads=2),
    "used": Packed((10, 20, 30), (64, 64, 64), used=(5, 64, 0), causal=True),
    "mods": Packed((33, 65, 0, 12), score=True, mask=True, heads=4, kv_heads=2),
    "many_short": Packed((1, 2, 3, 1, 2) * 40, causal=True),
    "decode": Packed((1, 1, 1), (300, 5, 129), causal=True, score=True),
}


@dataclasses.dataclass
class Operands:
    """Tensors of one run; the leaves require gradients."""

    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor  # [S, Hq]
    grad: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        return {
            "query": self.query, "key": self.key, "value": self.value, "slopes": self.slopes
        }  # fmt: skip

    def copy(self, dtype: torch.dtype) -> Operands:
        """Fresh leaves of another dtype."""
        fresh = [t.detach().to(dtype).requires_grad_() for t in self.leaves.values()]
        return Operands(*fresh, self.grad)


def make_operands(case: Packed, dtype=torch.float32, device="cpu") -> Operands:
    generator = torch.Generator().manual_seed(0)
    total, keys = sum(case.queries) + case.padding, sum(case.key_lengths)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype).requires_grad_()

    return Operands(
        normal(total, case.heads, case.head_dim),
        normal(keys, case.kv_heads, case.head_dim),
        normal(keys, case.kv_heads, case.head_dim),
        normal(len(case.queries), case.heads),
        normal(total, case.heads, case.head_dim).detach(),
    )


def offsets(lengths: tuple[int, ...], device: Any = "cpu") -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def make_score(slopes: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, q, k: s + slopes[b, h] * 0.05 * (q - k)


def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx + kv_idx + b) % 3 != 0


def packed_call(
    case: Packed, used: Tensor | None = None, options: flexhop.KernelOptions | None = None
) -> Callable[..., Any]:
    """A function of query, key, value, slopes and offsets that calls varlen_attention."""

    def call(query, key, value, slopes, offsets_q, offsets_k=None):
        return flexhop.varlen_attention(
            query, key, value, offsets_q, offsets_k,
            score_mod=make_score(slopes) if case.score else None,
            mask_mod=mask_mod if case.mask else None, is_causal=case.causal,
            window_size=case.window, bottom_right=case.bottom_right, seqused_k=used,
            enable_gqa=True, return_aux=flexhop.AuxRequest(lse=True), kernel_options=options,
        )  # fmt: skip

    return call


def call_arguments(case: Packed, operands: Operands) -> tuple[Any, ...]:
    device = operands.query.device
    keys = None if case.keys is None else offsets(case.keys, device)
    return (*operands.leaves.values(), offsets(case.queries, device), keys)


def used_keys(case: Packed, device: Any = "cpu") -> Tensor | None:
    return None if case.used is None else torch.tensor(case.used, device=device)


def loop(case: Packed, operands: Operands) -> tuple[Tensor, Tensor]:
    """One call of flex_attention per sequence: (out, lse) of the packed tokens."""
    outs, statistics = [], []
    first_q = first_k = 0
    for number, (rows, columns) in enumerate(zip(case.queries, case.key_lengths, strict=True)):
        query = operands.query[first_q : first_q + rows]
        seen = columns if case.used is None else case.used[number]
        if rows and seen:
            keys = slice(first_k, first_k + seen)
            out, lse = _one(case, operands, number, query, keys)
        else:
            out, lse = torch.zeros_like(query), query.new_full(query.shape[:2], -torch.inf)
        outs.append(out)
        statistics.append(lse)
        first_q, first_k = first_q + rows, first_k + columns
    rest = operands.query[first_q:]
    outs.append(torch.zeros_like(rest))
    statistics.append(rest.new_full(rest.shape[:2], -torch.inf))
    return torch.cat(outs), torch.cat(statistics)


def _one(case: Packed, operands: Operands, number: int, query: Tensor, keys: slice):
    key, value = (t[keys] for t in (operands.key, operands.value))
    shift = key.size(0) - query.size(0) if case.bottom_right else 0
    left, right = case.window
    right = 0 if case.causal else right

    def visible(b, h, q_idx, kv_idx):
        keep = kv_idx >= 0
        if right is not None:
            keep = keep & (kv_idx <= q_idx + shift + right)
        if left is not None:
            keep = keep & (kv_idx >= q_idx + shift - left)
        return keep & mask_mod(number + b, h, q_idx, kv_idx) if case.mask else keep

    def score(s, b, h, q_idx, kv_idx):
        return make_score(operands.slopes)(s, b + number, h, q_idx, kv_idx) if case.score else s

    block_mask = flexhop.create_block_mask(
        visible, None, None, query.size(0), key.size(0), device=str(query.device)
    )
    out, aux = flexhop.flex_attention(
        *(t.transpose(0, 1)[None] for t in (query, key, value)), score, block_mask,
        enable_gqa=True, return_aux=flexhop.AuxRequest(lse=True),
    )  # fmt: skip
    return out[0].transpose(0, 1), aux.lse[0].mT


def gradients(case: Packed, operands: Operands, out: Tensor) -> dict[str, Tensor]:
    """Gradients of sum(out * grad) by leaf."""
    names = [name for name in operands.leaves if name != "slopes" or case.score]
    leaves = [operands.leaves[name] for name in names]
    found = torch.autograd.grad((out * operands.grad.to(out.dtype)).sum(), leaves)
    return dict(zip(names, found, strict=True))
