"""Keys of a benchmark in a cache: in pages whose order is random, in low precision, or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flexhop
from benchmarks.decoding_cases import Step, make_mask, make_score_mod
from flexhop.mods import dequantize

# Scale of every key: a power of two, so that what is stored is also exact in query's dtype.
SCALE = 2.0**-5


def rounded(step: Step, numbers: Tensor) -> Tensor:
    """What the cache holds of keys or values, in their dtype."""
    return numbers if not step.stored else (_stored(step, numbers).float() * SCALE).to(numbers)


def _stored(step: Step, numbers: Tensor) -> Tensor:
    dtype = getattr(torch, step.stored)
    scaled = numbers.float() / SCALE
    return (scaled.round().clamp(-127, 127) if dtype == torch.int8 else scaled).to(dtype)


def build(step: Step, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """flexhop on a cache of the keys and values that it is called with, made at the first call."""
    compiled = torch.compile(flexhop.flex_attention, fullgraph=True)
    score_mod, mask = make_score_mod(step, device), make_mask(flexhop, step, device)
    made: dict[int, tuple[Tensor, Tensor, dict[str, Any]]] = {}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if key.data_ptr() not in made:
            made[key.data_ptr()] = _make(step, key, value)
        k, v, keywords = made[key.data_ptr()]
        return compiled(query, k, v, score_mod, mask, enable_gqa=True, **keywords)

    return attend


def _make(step: Step, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    keywords: dict[str, Any] = {}
    tensors = [key, value]
    if step.stored:
        tensors = [_stored(step, t) for t in tensors]
        scale = torch.full(key.shape[:3], SCALE, device=key.device)
        keywords |= {"k_mod": dequantize(scale), "v_mod": dequantize(scale)}
    if step.page:
        batch, _, keys, _ = key.shape
        order = torch.randperm(batch * keys // step.page, device=key.device).to(torch.int32)
        pages = order.view(batch, keys // step.page)
        tensors = [_in_pages(t, pages, step.page) for t in tensors]
        lengths = torch.full((batch,), keys, dtype=torch.int32, device=key.device)
        keywords["page_table"] = flexhop.PageTable(pages, step.page, lengths)
    return tensors[0], tensors[1], keywords


def _in_pages(tensor: Tensor, pages: Tensor, page: int) -> Tensor:
    """[B, H, N, D] as [P, H, page, D], page (b, i) at pages[b, i]."""
    cut = tensor.unflatten(2, (-1, page)).transpose(1, 2)  # [B, W, H, page, D]
    cache = torch.empty(pages.numel(), *cut.shape[2:], dtype=tensor.dtype, device=tensor.device)
    cache.view(torch.uint8)[pages.long()] = cut.view(torch.uint8)
    return cache
