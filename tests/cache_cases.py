"""Calls that read a cache, in pages or in low precision, and how they are judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

import flexhop
from flexhop.masks import causal_with_offset
from flexhop.mods import dequantize
from tests.budgets import assert_within_budget, dense_attention
from tests.caches import place

Scale = Literal["none", "number", "head", "key", "row", "shifted"]


@dataclasses.dataclass(frozen=True)
class CacheCase:
    """One call.

    page: 0 for a cache without pages. blocks: size of the mask's blocks; None: no mask. scale: of
    which kind the scales are; "row": by row of the pages; "shifted": a mod that does more than to
    multiply. spread: values are multiplied by powers of two from 2**-spread to 2**spread.
    """

    name: str
    page: int = 0
    stored: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32
    queries: int = 1
    lengths: tuple[int, ...] = (100, 0, 37)
    blocks: tuple[int, int] | None = None
    scale: Scale = "none"
    sinks: bool = False
    heads: tuple[int, int] = (6, 2)
    dims: tuple[int, int] = (32, 16)
    capability: tuple[int, int] = (9, 0)
    spread: int = 0

    @property
    def room(self) -> int:
        """Keys that every sequence has room for."""
        page = self.page or 1
        return -(-(max(self.lengths) + 5) // page) * page


INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16 = torch.bfloat16, torch.float16
CASES = (
    *(CacheCase(f"page_{n}", page=n) for n in (1, 3, 16, 64, 256)),
    *(CacheCase(f"prompt_page_{n}", page=n, queries=40, blocks=(128, 128)) for n in (5, 16, 64)),
    CacheCase("odd_blocks", page=16, queries=3, blocks=(128, 48)),
    CacheCase("prompt_without_mask", page=16, queries=70),
    CacheCase("bf16", page=16, dtype=BF16, stored=BF16, blocks=(128, 128)),
    CacheCase("sinks", page=16, queries=2, blocks=(128, 128), sinks=True),
    CacheCase("int8", stored=INT8, dtype=BF16, scale="key"),
    CacheCase("int8_prompt", stored=INT8, dtype=BF16, scale="head", queries=40),
    CacheCase("int8_half", stored=INT8, dtype=FP16, scale="key"),
    CacheCase("e5m2_number", stored=E5M2, scale="number"),
    CacheCase("shifted", stored=INT8, dtype=BF16, scale="shifted", page=16, queries=2),
    CacheCase("e4m3_paged", stored=E4M3, dtype=BF16, scale="key", page=16, blocks=(128, 128)),
    CacheCase("e4m3_rows_sinks", stored=E4M3, dtype=BF16, scale="row", page=8, sinks=True),
    *(
        CacheCase(
            f"pairs_{stored}_{page}".replace("torch.", ""),
            page=page,
            stored=stored,
            dtype=dtype,
            scale=scale,
            dims=(32, 48),
            queries=queries,
            blocks=blocks,
            spread=spread,
        )
        for stored, dtype, page, scale, queries, blocks, spread in (
            (INT8, BF16, 0, "key", 1, None, 0),
            (INT8, FP16, 16, "key", 3, (128, 128), 0),
            (E4M3, BF16, 0, "number", 2, None, 0),
            (E4M3, BF16, 64, "row", 1, None, 12),
            (E5M2, BF16, 128, "head", 1, (128, 128), 0),
            (E5M2, FP16, 0, "key", 1, None, 3),
        )
    ),
    CacheCase("latent_page_16", page=16, dims=(576, 512), heads=(5, 1), lengths=(40, 0, 19)),
    CacheCase(
        "latent_e4m3",
        page=64,
        stored=E4M3,
        dtype=BF16,
        scale="key",
        dims=(576, 512),
        heads=(5, 1),
        lengths=(40, 0, 19),
    ),
    CacheCase(
        "wide_int8",
        stored=INT8,
        dtype=BF16,
        scale="head",
        dims=(24, 544),
        queries=19,
        blocks=(128, 128),
        lengths=(40, 25),
    ),
    CacheCase("e4m3_ampere", stored=E4M3, dtype=BF16, scale="head", capability=(8, 0)),
)


@dataclasses.dataclass
class CacheInputs:
    """Operands of a case, and its keys and values in order as fp64."""

    query: Tensor
    key: Tensor
    value: Tensor
    table: flexhop.PageTable | None
    exact: tuple[Tensor, Tensor]
    keywords: dict[str, Any]
    sinks: Tensor | None


def make_cache_inputs(case: CacheCase, device: str = "cpu", seed: int = 0) -> CacheInputs:
    """Random operands; `seed` changes only where pages lie."""
    torch.manual_seed(0)
    (q_heads, kv_heads), (width, value_width) = case.heads, case.dims
    batch = len(case.lengths)
    query = torch.randn(batch, q_heads, case.queries, width).to(case.dtype)
    numbers = [torch.randn(batch, kv_heads, case.room, d) for d in (width, value_width)]
    if case.spread:
        numbers[1] *= (
            2.0 ** torch.randint(-case.spread, case.spread + 1, numbers[1].shape[:3])[..., None]
        )
    (key, key_scale), (value, value_scale) = (_store(n, case) for n in numbers)
    exact = (_exact(key, key_scale, case), _exact(value, value_scale, case))
    caches, table = (key, value), None
    if case.page:
        paged = place(key, value, list(case.lengths), case.page, seed)
        caches, table = (paged.key_cache, paged.value_cache), paged.table
        table = flexhop.PageTable(table.pages.to(device), case.page, table.lengths.to(device))
    mods = {}
    if case.scale != "none":
        scales = {"k_mod": key_scale, "v_mod": value_scale}
        mods = {name: _mod(case, scale, table, device) for name, scale in scales.items()}
    sinks = torch.randn(q_heads, device=device) if case.sinks else None
    mask = None
    if case.blocks is not None:
        offset = torch.tensor(case.lengths, device=device) - case.queries
        mask = flexhop.create_block_mask(
            causal_with_offset(offset), batch, None, case.queries, case.room, device,
            BLOCK_SIZE=case.blocks,
        )  # fmt: skip
    return CacheInputs(
        query.to(device), caches[0].to(device), caches[1].to(device), table,
        (exact[0].to(device), exact[1].to(device)), {"block_mask": mask, **mods}, sinks,
    )  # fmt: skip


def _store(numbers: Tensor, case: CacheCase) -> tuple[Tensor, Tensor]:
    """Numbers as they are stored, and the scale of each key, head or cache."""
    if case.scale == "none":
        return numbers.to(case.stored), torch.ones(())
    axes = {"number": (0, 1, 2, 3), "head": (0, 2, 3)}.get(case.scale, (3,))
    top = 127.0 if case.stored == torch.int8 else torch.finfo(case.stored).max
    scale = numbers.abs().amax(axes, keepdim=True) / top
    stored = numbers / scale
    stored = stored.round() if case.stored == torch.int8 else stored
    return stored.to(case.stored), scale.squeeze(axes)


def _exact(stored: Tensor, scale: Tensor, case: CacheCase) -> Tensor:
    shape = {"head": (1, -1, 1, 1), "number": (1, 1, 1, 1), "none": (1, 1, 1, 1)}
    wide = scale.double().reshape(shape.get(case.scale, (*stored.shape[:3], 1)))
    numbers = stored.to(torch.float32).double()
    return (numbers - 0.5) * wide if case.scale == "shifted" else numbers * wide


def _mod(
    case: CacheCase, scale: Tensor, table: flexhop.PageTable | None, device: str
) -> Callable[..., Tensor]:
    if case.scale == "row":
        assert table is not None
        return dequantize(_in_rows(case, scale, table).to(device), table)
    scale = scale.to(device)
    if case.scale == "shifted":
        return lambda x, b, h, kv_idx: (x - 0.5) * scale[b, h, kv_idx]
    return dequantize(float(scale) if case.scale == "number" else scale)


def _in_rows(case: CacheCase, scale: Tensor, table: flexhop.PageTable) -> Tensor:
    """Scales of keys, [B, Hkv, N], where their keys lie: [P, Hkv, page_size]."""
    pages = table.pages.cpu()
    rows = torch.full(
        (int(sum(-(-n // case.page) for n in case.lengths)) + 2, scale.size(1), case.page),
        torch.nan,
    )
    for b, length in enumerate(case.lengths):
        for i in range(length):
            rows[pages[b, i // case.page], :, i % case.page] = scale[b, :, i]
    return rows


def cache_call(inputs: CacheInputs, **options: Any) -> Callable[..., Any]:
    """flex_attention of (query, key, value, table, sinks)."""

    def call(query: Tensor, key: Tensor, value: Tensor, table: Any, sinks: Any) -> Any:
        return flexhop.flex_attention(
            query, key, value, enable_gqa=True, page_table=table, sinks=sinks,
            return_aux=flexhop.AuxRequest(lse=True), kernel_options=options or None,
            **inputs.keywords,
        )  # fmt: skip

    return call


def operands(inputs: CacheInputs) -> tuple[Any, ...]:
    """What cache_call's function takes."""
    return inputs.query, inputs.key, inputs.value, inputs.table, inputs.sinks


def assert_cache_case(case: CacheCase, inputs: CacheInputs, result: Any) -> None:
    """Judge (out, aux) against the dense formula, in fp64 and in query's dtype."""
    out, aux = result
    query = inputs.query
    batch, _, queries, width = query.shape
    position = torch.arange(case.room, device=query.device)
    visible = torch.ones(batch, 1, queries, case.room, dtype=torch.bool, device=query.device)
    lengths = torch.tensor(case.lengths, device=query.device)[:, None, None, None]
    if case.page:
        visible = visible & (position < lengths)
    if case.blocks is not None:
        last = lengths - queries + torch.arange(queries, device=query.device)[:, None]
        visible = visible & (position <= last)
    found = {}
    for name, dtype in (("gold", torch.float64), ("reference", query.dtype)):
        key, value = (t.to(dtype) for t in inputs.exact)
        dense = dense_attention(query.to(dtype), key, value, None, visible, width**-0.5)
        parts = (dense.out, dense.lse)
        if inputs.sinks is not None:
            parts = flexhop.attention.add_sinks(*parts, inputs.sinks)
        found[name] = parts
    for position_, (name, actual) in enumerate((("out", out), ("lse", aux.lse))):
        assert_within_budget(
            actual, found["gold"][position_], found["reference"][position_],
            name=f"{case.name}: {name}",
        )  # fmt: skip


def assert_every_byte(stored: torch.dtype, run: Callable[..., Any], device: str = "cpu") -> None:
    """Every number of one byte is read as what it is, as a key and as a value of either column.

    Args:
        stored: dtype of the numbers.
        run: (function, *operands) -> its result, as a kernel computes it.
        device: of the operands.
    """
    bits = torch.arange(256, dtype=torch.uint8, device=device).view(16, 16)
    query = torch.zeros(16, 16, 1, 32, dtype=BF16, device=device)
    query[..., 0] = 1
    key = torch.zeros(16, 16, 1, 32, dtype=torch.uint8, device=device)
    key[:, :, 0, 0] = bits
    value = torch.stack([bits, 255 - bits], -1)[:, :, None].repeat(1, 1, 1, 24)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return flexhop.flex_attention(
            query, key, value, scale=1.0, k_mod=dequantize(1.0), v_mod=dequantize(1.0),
            return_aux=flexhop.AuxRequest(lse=True),
        )  # fmt: skip

    _, aux = run(call, query, key.view(stored), torch.zeros_like(value).view(stored))
    numbers = bits.view(stored).float()
    sized = ~numbers.isinf()  # an infinite score has no weight
    torch.testing.assert_close(
        aux.lse[..., 0][sized], numbers[sized], rtol=1e-6, atol=1e-6, equal_nan=True
    )
    out, _ = run(call, query, torch.zeros_like(key).view(stored), value.view(stored))
    torch.testing.assert_close(
        out.float(), value.view(stored).float(), rtol=0, atol=0, equal_nan=True
    )
