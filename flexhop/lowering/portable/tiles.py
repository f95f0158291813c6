"""Tiles per kernel, architecture, dtype and head size: data, measured where noted."""

from __future__ import annotations

from collections.abc import Iterator

from flexhop.lowering.portable import caches
from flexhop.lowering.portable.float32 import FLOAT32
from flexhop.lowering.portable.position_tiles import READS
from flexhop.lowering.portable.rules import (
    Kernel,
    Rule,
    Tiles,
    has_few_rows,
    is_dense,
    is_mma_sync,
    is_sm90,
    is_sm100,
    is_triton_3_9,
    is_wgmma,
)
from flexhop.lowering.portable.special_tiles import FEW, FEW_KEYS, LONG_ROWS, SMALL_BLOCKS
from flexhop.lowering.problem import Problem, round_head_dim
from flexhop.options import Tile


def _with_both(tiles: Tiles) -> Tiles:
    """Kernels of one gradient use the tiles of the kernel of both unless they have their own."""
    both = tiles["grad_key_value"]
    return {"grad_key": both, "grad_value": both, **tiles}


def _second_order(narrow: tuple[Tile, ...], wide: tuple[Tile, ...]) -> Tiles:
    """Tiles of the second-order kernels; none spills.

    Those of sm_90 are the fastest of several on an H200, others come from machine code.

    narrow, wide: up to 64 and up to 128 columns of query, key and value. Calls with more than 256
    columns have no such kernels.
    """
    most, last = Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)
    query, key, value = (
        {64: near, 128: far, 256: most, 512: last} for near, far in zip(narrow, wide, strict=True)
    )
    return {"jvp_grad_query": query, "jvp_grad_key": key, "jvp_grad_value": value}


def _of_pieces(decode: Tile, query: Tile, key: Tile, value: Tile) -> Tiles:
    """Tiles of the kernels that hold heads in pieces."""
    return {
        "decode": {576: decode},
        "grad_query": {576: query},
        "grad_key": {576: key},
        "grad_value": {576: value},
    }


# The first rule that applies to a call and covers its kernel and width decides.
RULES: tuple[Rule, ...] = (
    *LONG_ROWS,
    *FEW_KEYS,
    # Products of fp32 numbers without tensor cores spill whatever the tile.
    Rule(
        "heads in pieces",
        lambda p: p.itemsize > 2,
        _of_pieces(Tile(16, 16, 4, 1), *[Tile(16, 16, 8, 1)] * 3),
        measured=False,
    ),
    # The values of latent attention take no memory of their own. Chosen without spills.
    Rule(
        "heads in pieces, values are read with keys",
        lambda p: is_sm90(p) and p.value_is_key and p.cache is None,
        {"decode": {576: Tile(64, 32, 8, 2)}},
        measured=False,
    ),
    # Chosen without spills.
    Rule(
        "heads in pieces",
        is_wgmma,
        _of_pieces(Tile(64, 16, 8, 2), Tile(16, 32, 8, 1), *[Tile(32, 32, 8, 1)] * 2),
        measured=False,
    ),
    Rule(
        "heads in pieces",
        is_mma_sync,
        _of_pieces(Tile(32, 16, 8, 2), Tile(16, 32, 8, 1), *[Tile(32, 16, 8, 1)] * 2),
        measured=False,
    ),
    *FLOAT32,
    # fp32 operands: twice the bytes.
    Rule(
        "",
        lambda p: p.itemsize > 2,
        _with_both(
            {
                "forward": {
                    64: Tile(64, 32, 4, 2),
                    128: Tile(32, 32, 4, 2),
                    256: Tile(16, 32, 4, 1),
                    512: Tile(16, 16, 4, 1),
                },
                "jvp_forward": {
                    64: Tile(32, 16, 8, 1),
                    128: Tile(16, 16, 8, 1),
                    256: Tile(16, 16, 8, 1),
                    512: Tile(16, 16, 8, 1),
                },
                **_second_order((Tile(16, 16, 4, 1),) * 3, (Tile(16, 16, 8, 1),) * 3),
                "decode": {
                    64: Tile(32, 32, 4, 2),
                    128: Tile(32, 32, 4, 2),
                    256: Tile(16, 32, 4, 2),
                    512: Tile(16, 16, 4, 1),
                },
                "grad_query": {
                    64: Tile(32, 32, 4, 2),
                    128: Tile(32, 16, 4, 1),
                    256: Tile(16, 16, 4, 1),
                    512: Tile(16, 16, 8, 1),
                },
                "grad_key_value": {
                    64: Tile(32, 32, 4, 2),
                    128: Tile(16, 32, 4, 1),
                    256: Tile(16, 16, 4, 1),
                    512: Tile(16, 16, 8, 1),
                },
            }
        ),
    ),
    # Gradients of captured tensors as 64-bit integers: atomics dominate. Triton 3.9 needs more
    # registers. Chosen without spills.
    Rule(
        "sums of integers, Triton 3.9",
        lambda p: is_sm90(p) and is_triton_3_9(p) and p.sums_exactly,
        {"grad_query": {128: Tile(64, 32, 8, 2)}},
        measured=False,
    ),
    # More warps have more registers. Chosen without spills.
    Rule(
        "sums of integers",
        lambda p: is_mma_sync(p) and p.sums_exactly,
        {
            "grad_query": {64: Tile(64, 32, 8, 2), 128: Tile(64, 32, 8, 2)},
        },
        measured=False,
    ),
    # Chosen to spill little.
    Rule(
        "sums of integers",
        lambda p: p.sums_exactly,
        {
            "grad_query": {
                64: Tile(64, 32, 4, 2),
                128: Tile(64, 32, 4, 2),
                256: Tile(32, 32, 8, 1),
            },
        },
        measured=False,
    ),
    # Chosen without spills.
    Rule(
        "Triton 3.9",
        lambda p: is_sm90(p) and is_triton_3_9(p),
        {"grad_query": {256: Tile(64, 64, 8, 2)}},
        measured=False,
    ),
    # Accumulators pass through registers on their way to the softmax. Chosen without spills.
    Rule(
        "sm_100",
        is_sm100,
        {
            "forward": {128: Tile(128, 64, 8, 3)},
            "jvp_forward": {64: Tile(128, 64, 8, 2), 128: Tile(128, 32, 8, 2)},
            "jvp_grad_query": {128: Tile(64, 32, 8, 1)},
            "grad_query": {128: Tile(64, 64, 8, 2)},
        },
        measured=False,
    ),
    # Chosen without spills.
    Rule(
        "second orders on sm_90, captured tensors",
        lambda p: is_sm90(p) and p.has_captured_grads,
        {"jvp_grad_query": {64: Tile(64, 32, 4, 1)}},
        measured=False,
    ),
    # Four warps share products of 64 rows; eight halve them, and fill a multiprocessor alone. Two
    # stages: 0.99, 0.89 and 0.56 ms for query, key and value, one stage 1.15, 1.29 and 0.75.
    Rule(
        "second orders on sm_90",
        is_sm90,
        {
            "jvp_grad_query": {64: Tile(64, 64, 4, 2)},
            "jvp_grad_key": {64: Tile(64, 64, 4, 2)},
            "jvp_grad_value": {64: Tile(64, 64, 4, 2)},
        },
    ),
    # One-byte elements, and pages that are looked up per key: threads' instructions dominate the
    # work per tile, and fewer warps repeat fewer of them. Two programs share a multiprocessor:
    # tiles have equal bytes.
    Rule(
        "few rows, a cache of bytes",
        lambda p: is_wgmma(p) and has_few_rows(p) and caches.stores_bytes(p.cache),
        {"decode": {128: Tile(16, 128, 4, 3)}},
    ),
    Rule(
        "few rows, small pages",
        lambda p: is_wgmma(p) and has_few_rows(p) and caches.looks_up_keys(p.cache),
        {
            "decode": {128: Tile(16, 64, 4, 4)},
        },
    ),
    # Random numbers are drawn for a whole tile at once and need registers.
    Rule(
        "dropout",
        lambda p: is_wgmma(p) and p.dropout_p > 0.0,
        {
            "forward": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3)},
            "grad_key_value": {64: Tile(64, 64, 4, 3), 128: Tile(32, 128, 8, 3)},
        },
    ),
    # Chosen without spills.
    Rule(
        "dropout, Triton 3.9",
        lambda p: is_mma_sync(p) and is_triton_3_9(p) and p.dropout_p > 0.0,
        {
            "grad_key_value": {64: Tile(64, 64, 4, 2)},
        },
        measured=False,
    ),
    # Chosen without spills.
    Rule(
        "dropout",
        lambda p: is_mma_sync(p) and p.dropout_p > 0.0,
        {
            "forward": {128: Tile(128, 32, 8, 3)},
            "grad_key_value": {64: Tile(64, 64, 8, 2)},
        },
        measured=False,
    ),
    *SMALL_BLOCKS,
    # One program of eight warps per multiprocessor, with two wide tiles prefetched, saturates
    # memory under any score_mod; smaller tiles need two programs for that.
    Rule(
        "few rows",
        lambda p: is_wgmma(p) and has_few_rows(p),
        {
            "decode": {128: Tile(16, 128, 8, 3), 256: Tile(16, 64, 8, 3)},
        },
    ),
    *READS,
    *FEW,
    # Loads of tables compete with the operands' loads, so more programs help.
    Rule(
        "tables read per score",
        lambda p: is_wgmma(p) and p.mods.reads_per_element,
        {
            "forward": {128: Tile(128, 32, 4, 3)},
        },
    ),
    # More registers are free, and two programs of four warps on one multiprocessor hide each
    # other's softmax. A cache's addresses would take these registers.
    Rule(
        "no mask and no score_mod",
        lambda p: is_wgmma(p) and is_dense(p),
        {
            "forward": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 4, 2)},
            "grad_query": {64: Tile(128, 64, 8, 3)},
            "grad_key_value": {64: Tile(32, 128, 4, 3), 128: Tile(64, 128, 8, 3)},
        },
    ),
    # Addresses and conversions need registers.
    Rule(
        "a cache",
        lambda p: is_mma_sync(p) and p.cache is not None,
        {
            "forward": {128: Tile(64, 32, 4, 3)},
        },
    ),
    # The usual tiles, measured on an H200 in bf16 (docs/benchmarks.md). At 128 columns and above,
    # one program with eight warps fills a multiprocessor.
    Rule(
        "",
        is_wgmma,
        _with_both(
            {
                "forward": {
                    64: Tile(64, 128, 4, 2),
                    128: Tile(128, 128, 8, 2),
                    256: Tile(128, 64, 8, 2),
                    512: Tile(64, 32, 8, 2),
                },
                "jvp_forward": {
                    64: Tile(128, 64, 8, 3),
                    128: Tile(128, 64, 8, 2),
                    256: Tile(32, 32, 8, 1),
                    512: Tile(16, 16, 8, 1),
                },
                **_second_order(
                    (Tile(64, 64, 4, 2), Tile(32, 64, 8, 1), Tile(64, 64, 4, 2)),
                    (Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), Tile(64, 64, 4, 1)),
                ),
                "decode": {
                    64: Tile(128, 128, 4, 3),
                    128: Tile(64, 64, 4, 3),
                    256: Tile(64, 32, 4, 2),
                    512: Tile(16, 32, 4, 2),
                },
                "grad_query": {
                    64: Tile(64, 64, 4, 3),
                    128: Tile(128, 64, 8, 3),
                    256: Tile(128, 64, 8, 1),
                    512: Tile(32, 32, 8, 1),
                },
                "grad_key_value": {
                    64: Tile(64, 64, 4, 3),
                    128: Tile(64, 128, 8, 2),
                    256: Tile(32, 64, 8, 2),
                    512: Tile(32, 32, 8, 1),
                },
                "grad_key": {256: Tile(32, 128, 8, 2), 512: Tile(32, 32, 8, 1)},
                "grad_value": {256: Tile(32, 128, 8, 2), 512: Tile(32, 64, 8, 1)},
            }
        ),
    ),
    # Ampere, Ada and sm_120: mma.sync keeps operands in registers, so tiles are smaller.
    Rule(
        "",
        lambda p: True,
        _with_both(
            {
                "forward": {
                    64: Tile(128, 64, 4, 3),
                    128: Tile(128, 32, 4, 3),
                    256: Tile(64, 32, 4, 2),
                    512: Tile(32, 16, 4, 1),
                },
                "jvp_forward": {
                    64: Tile(64, 32, 4, 2),
                    128: Tile(64, 32, 8, 1),
                    256: Tile(32, 16, 8, 1),
                    512: Tile(16, 16, 8, 1),
                },
                **_second_order(
                    (Tile(32, 32, 4, 1),) * 3,
                    (Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), Tile(32, 32, 8, 1)),
                ),
                "decode": {
                    64: Tile(64, 64, 4, 3),
                    128: Tile(64, 32, 4, 3),
                    256: Tile(32, 32, 4, 2),
                    512: Tile(16, 16, 4, 2),
                },
                "grad_query": {
                    64: Tile(64, 64, 4, 2),
                    128: Tile(64, 32, 4, 2),
                    256: Tile(32, 32, 8, 1),
                    512: Tile(16, 16, 4, 1),
                },
                "grad_key_value": {
                    64: Tile(64, 64, 4, 2),
                    128: Tile(32, 64, 4, 2),
                    256: Tile(16, 32, 4, 1),
                    512: Tile(16, 16, 4, 1),
                },
            }
        ),
        measured=False,
    ),
)


def table_rule(kernel: Kernel, problem: Problem) -> Rule:
    """The rule that determines a kernel's tile."""
    width = table_width(problem)
    return next(r for r in RULES if width in r.tiles.get(kernel, {}) and r.when(problem))


def table_tile(kernel: Kernel, problem: Problem) -> Tile:
    """The table's tile, before it is fitted to the device and the mask."""
    return table_rule(kernel, problem).tiles[kernel][table_width(problem)]


def table_width(problem: Problem) -> int:
    """Width of the wider head, as the rules use it; 576 if heads are in pieces."""
    if problem.is_wide:
        return 576
    return max(64, round_head_dim(max(problem.head_dim, problem.value_head_dim)))


def smaller_tiles(tile: Tile) -> Iterator[Tile]:
    """Tiles from `tile` down to the smallest: fewer stages first, then the longer side."""
    yield tile
    while (tile.block_m, tile.block_n, tile.num_stages) != (16, 16, 1):
        if tile.num_stages > 1:
            tile = Tile(tile.block_m, tile.block_n, tile.num_warps, tile.num_stages - 1)
        elif tile.block_m >= tile.block_n:
            tile = Tile(tile.block_m // 2, tile.block_n, min(tile.num_warps, 4), 1)
        else:
            tile = Tile(tile.block_m, tile.block_n // 2, min(tile.num_warps, 4), 1)
        yield tile
