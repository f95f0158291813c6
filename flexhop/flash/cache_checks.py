"""Checks of flash_attn_with_kvcache's arguments, before anything is written."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexhop.errors.base import shape_text
from flexhop.flash.options import argument_mistake, unsupported
from flexhop.ops.call import Mistake, note_rank


class CacheCall(NamedTuple):
    """The arguments of flash_attn_with_kvcache that describe the cache, as given."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    num_splits: int

    @property
    def page(self) -> int:
        """Keys per row of the cache, or per page."""
        return self.k_cache.size(1)

    @property
    def length(self) -> int:
        """Most keys of a sequence."""
        pages = 1 if self.block_table is None else self.block_table.size(1)
        return pages * self.page


def cache_mistake(call: CacheCall) -> Mistake | None:
    """The first invalid argument of a call, or None; checks values unless compiled."""
    if not 0 <= call.num_splits <= 256:
        return argument_mistake("num_splits", f"is {call.num_splits}", "must be 0 to 256")
    for find in (_ranks, _gradient, _operands, _sizes, _new_tokens, _rotary, _pool):
        mistake = find(call)
        if mistake is not None:
            return mistake
    return None if torch.compiler.is_compiling() else _values(call)


def _ranks(call: CacheCall) -> Mistake | None:
    tensors = {"q": call.q, "k_cache": call.k_cache, "v_cache": call.v_cache}
    new = {"k": call.k, "v": call.v}
    return note_rank(4, **tensors, **{name: t for name, t in new.items() if t is not None})


def _gradient(call: CacheCall) -> Mistake | None:
    operands = (call.q, call.k_cache, call.v_cache, call.k, call.v)
    needs = any(t is not None and t.requires_grad for t in operands)
    if not (needs and torch.is_grad_enabled()):
        return None
    return unsupported(
        "A gradient of flash_attn_with_kvcache", "it writes to the cache that it reads",
        "Call it under torch.no_grad()",
    )  # fmt: skip


def _operands(call: CacheCall) -> Mistake | None:
    """Dtypes and devices of operands and indices."""
    q = call.q
    named = {"k_cache": call.k_cache, "v_cache": call.v_cache, "k": call.k, "v": call.v}
    for name, tensor in named.items():
        if tensor is not None and tensor.dtype != q.dtype:
            return argument_mistake(name, f"is {tensor.dtype}", f"q is {q.dtype}")
    rotary = {"rotary_cos": call.rotary_cos, "rotary_sin": call.rotary_sin}
    for name, tensor in (*named.items(), *rotary.items(), *_indices(call).items()):
        if tensor is not None and tensor.device != q.device:
            return argument_mistake(name, f"is on {tensor.device}", f"q is on {q.device}")
    for name, tensor in _indices(call).items():
        if tensor.dtype not in (torch.int32, torch.int64):
            return argument_mistake(name, f"is {tensor.dtype}", "must be int32 or int64")
    return None


def _indices(call: CacheCall) -> dict[str, Tensor]:
    named = {
        "cache_seqlens": call.cache_seqlens,
        "cache_batch_idx": call.cache_batch_idx,
        "cache_leftpad": call.cache_leftpad,
        "block_table": call.block_table,
    }
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _sizes(call: CacheCall) -> Mistake | None:
    batch = call.q.size(0)
    for name, tensor in _indices(call).items():
        rank = 2 if name == "block_table" else 1
        if tensor.dim() != rank or tensor.size(0) != batch:
            expected = f"must have {rank} dimensions, the first of size {batch}, q's batch"
            return argument_mistake(name, f"has shape {shape_text(tensor.shape)}", expected)
    if call.k_cache.shape[:3] != call.v_cache.shape[:3]:
        found = f"has shape {shape_text(call.v_cache.shape)}"
        return argument_mistake("v_cache", found, f"k_cache has {shape_text(call.k_cache.shape)}")
    is_shared = call.block_table is not None or call.cache_batch_idx is not None
    if not is_shared and call.k_cache.size(0) != batch:
        found = f"has {call.k_cache.size(0)} rows"
        return argument_mistake("k_cache", found, f"q has batch {batch}; pass cache_batch_idx")
    return None


def _new_tokens(call: CacheCall) -> Mistake | None:
    if call.k is None and call.v is None:
        return None
    if call.k is None or call.v is None:
        missing, given = ("k", "v") if call.k is None else ("v", "k")
        return argument_mistake(missing, "is None", f"{given} was given")
    if call.cache_seqlens is None:
        return argument_mistake(
            "cache_seqlens", "is None", "it must say where k and v go in the cache"
        )
    batch, count = call.q.size(0), call.k.size(1)
    pairs = (("k", call.k, call.k_cache), ("v", call.v, call.v_cache))
    for name, tensor, cache in pairs:
        expected = (batch, count, cache.size(2), cache.size(3))
        if tuple(tensor.shape) != expected:
            return argument_mistake(
                name,
                f"has shape {shape_text(tensor.shape)}",
                f"must have {shape_text(expected)}",
            )
    return None


def _rotary(call: CacheCall) -> Mistake | None:
    cos, sin = call.rotary_cos, call.rotary_sin
    if cos is None and sin is None:
        return None
    if cos is None or sin is None:
        missing, given = ("cos", "sin") if cos is None else ("sin", "cos")
        return argument_mistake(f"rotary_{missing}", "is None", f"rotary_{given} was given")
    if call.k is None:
        return argument_mistake(
            "rotary_cos", "was given", "k and v are None: there is nothing to append"
        )
    if cos.dim() != 2 or cos.shape != sin.shape:
        found = f"have shapes {shape_text(cos.shape)} and {shape_text(sin.shape)}"
        return argument_mistake("rotary_cos and rotary_sin", found, "must both be [N, R / 2]")
    if 2 * cos.size(1) > call.q.size(3):
        found = f"rotates {2 * cos.size(1)} columns"
        return argument_mistake("rotary_cos", found, f"the head size is {call.q.size(3)}")
    if cos.size(0) < call.length:
        found = f"has {cos.size(0)} positions"
        return argument_mistake("rotary_cos", found, f"the cache has {call.length}")
    return None


def _pool(call: CacheCall) -> Mistake | None:
    """A cache whose rows all sequences share must be contiguous across rows."""
    if call.block_table is None and call.cache_batch_idx is None:
        return None
    if call.block_table is not None:
        for name in ("cache_batch_idx", "cache_leftpad"):
            if getattr(call, name) is not None:
                return argument_mistake(name, "was given", "block_table was given too")
        return None
    for name, cache in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        if cache.size(0) > 1 and cache.stride(0) != cache.size(1) * cache.stride(1):
            expected = (
                "must be contiguous across rows to be shared; call contiguous() when you create it"
            )
            return argument_mistake(name, "has gaps between its rows", expected)
    return None


def _values(call: CacheCall) -> Mistake | None:
    """Checks of values; synchronises."""
    new = 0 if call.k is None else call.k.size(1)
    lengths = call.cache_seqlens
    if isinstance(lengths, Tensor):
        mistake = _outside("cache_seqlens", lengths, call.length - new)
    else:
        mistake = _outside("cache_seqlens", torch.tensor([lengths or 0]), call.length - new)
    if mistake is None and call.cache_batch_idx is not None:
        mistake = _outside("cache_batch_idx", call.cache_batch_idx, call.k_cache.size(0) - 1)
    if mistake is None and call.cache_leftpad is not None:
        mistake = _outside("cache_leftpad", call.cache_leftpad, call.length)
    if mistake is None and call.block_table is not None:
        mistake = _outside_pages(call, call.block_table, new)
    return mistake


def _outside_pages(call: CacheCall, table: Tensor, new: int) -> Mistake | None:
    before = call.length if call.cache_seqlens is None else call.cache_seqlens
    used = torch.as_tensor(before, device=table.device).reshape(-1, 1) + new
    begins = torch.arange(table.size(1), device=table.device) * call.page
    live = (begins < used).expand_as(table)
    return _outside("block_table", table[live], call.k_cache.size(0) - 1)


def _outside(argument: str, values: Tensor, highest: int) -> Mistake | None:
    for value in values.tolist():
        if not 0 <= value <= highest:
            return argument_mistake(argument, f"has {value}", f"must be 0 to {highest}")
    return None
