"""A call's cache arguments, checked and converted for the operator: page_table, k_mod, v_mod."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop import errors
from flexhop.cache.pages import PageTable, cache_mistake, in_pages, table_mistake, value_mistake
from flexhop.errors.base import shape_text
from flexhop.mods.keys import Dequantize, KeyMod, noop_key, same_number
from flexhop.ops.call import Mistake, note_mistake

# Dtypes whose numbers need no scale; a factor may be in score_mod, or nowhere.
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
Operands = tuple[Tensor, Tensor, Tensor]


class CacheReading(NamedTuple):
    """How key and value are decoded; fields as in CachedArgs."""

    key_mod: KeyMod
    value_mod: KeyMod
    pages: tuple[Tensor, ...]


def read_cache(
    operands: Operands,
    page_table: PageTable | None,
    k_mod: KeyMod | None,
    v_mod: KeyMod | None,
) -> tuple[Operands, CacheReading, Mistake | None]:
    """The operands, paged if there is a table; how to read them; and the first invalid argument.

    Args: query, key and value, and flex_attention's cache arguments. Eager calls also check the
    values of the table.
    """
    query, key, value = operands
    mods = (_mod_of(k_mod, key), _mod_of(v_mod, value))
    mistake, pages = None, ()
    if page_table is not None:
        mistake = _table_mistake(query, key, value, page_table)
        if mistake is None:
            key, value = (in_pages(cache, page_table.page_size) for cache in (key, value))
            pages = (page_table.pages, page_table.lengths)
            mistake = _values_mistake(page_table, key)
    for name, mod, cache in (("k_mod", mods[0], key), ("v_mod", mods[1], value)):
        if mistake is None and isinstance(mod, Dequantize):
            mistake = _scale_mistake(name, mod, (query, cache), page_table)
    return (query, key, value), CacheReading(*mods, pages), mistake


def stores_numbers(*caches: object) -> bool:
    """Whether key or value has a dtype that no call computes in."""
    return any(isinstance(cache, Tensor) and cache.dtype in _EIGHT_BITS for cache in caches)


def _mod_of(mod: KeyMod | None, cache: Tensor) -> KeyMod:
    if mod is not None:
        return mod
    return same_number if stores_numbers(cache) else noop_key


def _table_mistake(query: Tensor, key: Tensor, value: Tensor, table: Any) -> Mistake | None:
    if not isinstance(table, PageTable):
        found = f"is a {type(table).__name__}"
        return _mistake("page_table", found, "must be a flexhop.PageTable or None")
    if query.dim() != 4:
        return note_mistake(errors.RankError, argument="query", rank=query.dim(), expected=4)
    found, expected = table_mistake(table, query)
    if found:
        return _mistake("page_table", found, expected)
    size = table.page_size
    if size < 1:
        return _mistake("page_table", f"has page_size {size}", "it must be at least 1")
    for name, cache in (("key", key), ("value", value)):
        found = cache_mistake(cache, size)
        if found:
            expected = f"must be [P, Hkv, {size}, D] or [1, Hkv, P * {size}, D] in pages of {size}"
            return _mistake(name, found, expected)
    return None


def _values_mistake(table: PageTable, key: Tensor) -> Mistake | None:
    """An invalid length or page; compiled code and CUDA graphs cannot synchronise to check."""
    if torch.compiler.is_compiling() or not _has_values(table.pages):
        return None
    found, expected = value_mistake(table, key.size(0))
    return _mistake("page_table", found, expected) if found else None


def _has_values(tensor: Tensor) -> bool:
    if tensor.is_cuda:
        return not torch.cuda.is_current_stream_capturing()
    return tensor.device.type == "cpu"


def _scale_mistake(
    name: str, mod: Dequantize, operands: tuple[Tensor, Tensor], table: PageTable | None
) -> Mistake | None:
    """A scale whose shape does not match the cache; `operands` are query and the cache."""
    if not isinstance(mod.scale, Tensor):
        return None
    query, cache = operands
    length = cache.size(2) if table is None else table.capacity
    expected = mod.expected_shape(query.size(0), cache.size(1), length, cache.size(0))
    if list(mod.scale.shape) == expected:
        return None
    return _mistake(
        f"the scale of {name}", f"has shape {shape_text(mod.scale.shape)}", f"must have {expected}"
    )


def _mistake(argument: str, found: str, expected: str) -> Mistake:
    return note_mistake(errors.CacheShapeError, argument=argument, found=found, expected=expected)
