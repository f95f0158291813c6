"""One table of named attention problems, used by every tier.

A factory gets `c`, the captured tensors and the `shape` of its case, and returns a score_mod
(s, b, h, q, k) or a mask_mod (b, h, q, k). Fields: tests/case_inputs.py.
"""

# A table: lines up to 120.
# ruff: noqa: E501

from __future__ import annotations

import dataclasses
import functools
import math

import torch

import flexhop
from flexhop import BlockMask, KernelOptions, Tile, and_masks, or_masks
from tests.case_inputs import OBLONG_TILES, SMALL_TILES, TINY, Captures, Case, MakeMod, Shape

BF16, FP16 = torch.bfloat16, torch.float16


def plain(mod) -> MakeMod:
    """A factory for a mod that captures nothing."""
    return lambda c: mod


# mask_mods


def causal(b, h, q, k):
    return q >= k


def inverse_causal(b, h, q, k):
    return q <= k


def window(width: int):
    return lambda b, h, q, k: q - k <= width


def two_ranges(b, h, q, k):
    return (k < 16) | ((k >= 48) & (k < 80))


class CausalOrNear:
    """A mask_mod that is an object."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, b, h, q, k):
        return (q >= k) | (k - q < self.width)


def causal_from(b, h, q, k, offset):
    return q + offset >= k


def per_batch_documents(c):
    return and_masks(causal, lambda b, h, q, k: c.ids[b, q] == c.ids[b, k])


def clamped_documents(c):
    """Two-step indices: the start of the query's document, behind a clamp."""
    last = c.starts.shape[0] - 1
    return lambda b, h, q, k: (k >= c.starts[torch.clamp(c.ids[b, q], 0, last)]) & (q >= k)


def numbered_documents(c):
    ids = c.ids
    return lambda b, h, q, k: (ids[q] == ids[k]) & (ids[q] != 0)


# score_mods


def relative_causal(s, b, h, q, k):
    return torch.where(q >= k, s + (q - k), -math.inf)


def alibi_8(s, b, h, q, k):
    return s + (k - q) * torch.exp2(-((h + 1) * 8.0 / 8.0))


def silu_head(s, b, h, q, k):
    return torch.nn.functional.silu(s) * (1 + h)


def natten_true_division(s, b, h, q, k):
    """Neighbours on a grid of 8 columns; the row index is a float."""
    near = ((q % 8 - k % 8).abs() <= 3) | ((q / 8 - k / 8).abs() <= 3)
    return torch.where(near, s, -math.inf)


def composed(s, b, h, q, k):
    return torch.where(q <= k, s + (q - k) * 0.01, -math.inf)


def trigonometric(s, b, h, q, k):
    return torch.cos(s) * torch.sin(s) + torch.tan(b.to(s.dtype))


def steep(score, b, h, q_idx, kv_idx):
    return -0.3 * (score + 0.05 * (q_idx - kv_idx)) ** 3


def soft_cap(s, b, h, q, k):
    return 5.0 * torch.tanh(s / 5.0)


def logarithm(s, b, h, q, k):
    return torch.where(s > 0, torch.log(s), s)


def unrolled_distance(c):
    """A small reduction over coordinates, which becomes three reads."""

    def mod(s, b, h, q, k):
        distance = sum((c.points[q, i] - c.points[k, i]) ** 2 for i in range(3))
        return s * torch.exp(-distance / c.lengths[h])

    return mod


def prefix_or_causal(c):
    def mod(s, b, h, q, k):
        inside = (q < c.prefix[b]) & (k < c.prefix[b])
        return torch.where((q >= k) | inside, s, -math.inf)

    return mod


def nested_causal(c):
    def mod(s, b, h, q, k):
        start = c.starts[c.segment[q]]
        return torch.where((c.segment[q] == c.segment[k]) & (q - start >= k - start), s, -math.inf)

    return mod


def gated_table(c):
    """A table of distances, cut off and weighted per head, in a nested function."""

    def bias(h, distance):
        entry = torch.clamp(distance.abs(), 0, c.table.shape[1] - 1).to(torch.int64)
        return c.gates[h].sigmoid() * c.table[h, entry]

    return lambda s, b, h, q, k: s + bias(h, q - k)


# hand-made block masks


def _lists(rows: list[list[int]], width: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    counts = torch.tensor([[[len(row) for row in rows]]], dtype=torch.int32, device=device)
    padded = [row + [0] * (width - len(row)) for row in rows]
    return counts, torch.tensor([[padded]], dtype=torch.int32, device=device)


def listed_blocks(mask_mod, with_full: bool):
    """A diagonal and the first column of blocks; index tensors no wider than needed."""

    def make(c: Captures, device) -> BlockMask:
        rows = -(-c.shape.q_len // 32)
        columns = -(-c.shape.kv_len // 32)
        last = columns - 1
        diagonal = [[min(r, last)] for r in range(rows)]
        first = [[0] if 0 < min(r, last) else [] for r in range(rows)]
        if not with_full:
            lists = [a + b for a, b in zip(diagonal, first, strict=True)]
            lists[-1] = []  # the last queries see nothing
            partial, full = _lists(lists, 2, device), (None, None)
        else:
            partial, full = _lists(diagonal, 1, device), _lists(first, 1, device)
        return BlockMask.from_kv_blocks(
            *partial, *full, BLOCK_SIZE=32, mask_mod=mask_mod,
            seq_lengths=(c.shape.q_len, c.shape.kv_len),
        )  # fmt: skip

    return make


def at_step(mask_mod):
    """The mask of one step of generation: the row of blocks of a longer mask that holds the step."""

    def make(c: Captures, device) -> BlockMask:
        length = c.shape.kv_len
        whole = flexhop.create_block_mask(
            mask_mod(c), None, None, length, length, str(device), BLOCK_SIZE=32
        )
        step = whole[:, :, c.offset // 32]
        step.seq_lengths = (c.shape.q_len, length)
        step.mask_mod = lambda b, h, q, k: mask_mod(c)(b, h, q + c.offset, k)
        return step

    return make


# shapes

ODD = Shape(q_len=37, kv_len=65)
LONG = Shape(heads=1, kv_heads=1, q_len=257, kv_len=257)
BATCHES = Shape(batch=3, heads=2, kv_heads=2, q_len=37, kv_len=37)
LEARN = Shape(batch=2, heads=4, kv_heads=4, q_len=37, kv_len=37)


def width(head_dim: int, value_head_dim: int | None = None, length: int = 37) -> Shape:
    """One head of the given widths; on the GPU a realistic length of the same widths."""
    return Shape(1, 1, 1, length, length, head_dim, value_head_dim or head_dim)


def short(q_len: int, group: int, kv_len: int = 77, **sizes: int) -> dict[str, Shape]:
    """A few queries of two key heads; on the GPU with more keys, wider heads and as many queries."""
    sizes = {"batch": 2, "head_dim": 16, "value_head_dim": 16} | sizes
    shape = Shape(heads=2 * group, kv_heads=2, q_len=q_len, kv_len=kv_len, **sizes)
    wide = {name: max(64, sizes[name]) for name in ("head_dim", "value_head_dim")}
    return {"shape": shape, "grown": dataclasses.replace(shape, kv_len=40 * kv_len, **wide)}


def decoded(splits: int | None = None, tile: Tile | None = TINY) -> KernelOptions:
    return KernelOptions(short_queries="decode", splits=splits, decode=tile)


def groups(size: int, kv_heads: int = 1, **sizes: int) -> Shape:
    return Shape(heads=size * kv_heads, kv_heads=kv_heads, **{"q_len": 37, "kv_len": 37} | sizes)


SCORES = [
    Case("identity", score=plain(lambda s, b, h, q, k: s)),
    Case("none"),
    Case("none_lengths_1", shape=Shape(q_len=1, kv_len=1)),
    Case("single_element", shape=Shape(1, 1, 1, 1, 1, 1, 1), mask=plain(causal)),
    Case("none_one_query", shape=Shape(q_len=1, kv_len=127), options=SMALL_TILES),
    Case("none_one_key", shape=Shape(q_len=37, kv_len=1)),
    Case("none_longer_query", shape=Shape(q_len=127, kv_len=37), options=OBLONG_TILES),
    Case("none_333", shape=Shape(heads=1, kv_heads=1, q_len=333, kv_len=333)),
    Case("times_two", score=plain(lambda s, b, h, q, k: s * 2), shape=ODD, dtype=BF16),
    Case("squared", score=plain(lambda s, b, h, q, k: s * s), shape=ODD, max_scores=True),
    # One ulp of the product is a thousand of the score; forward and backward must have the same one.
    Case("steep", score=plain(steep), shape=Shape(2, 4, 2, 65, 65, 48, 16), scale=1.0,
         mask=plain(and_masks(causal, window(2)))),
    # Every third row sees nothing but a number.
    *(
        Case(f"hidden_by_{name}_{str(dtype)[6:]}", score=plain(
            lambda s, b, h, q, k, low=low: torch.where((q >= k) & (q % 3 > 0), s, low)
        ), shape=ODD, dtype=dtype, stock=False)
        for dtype in (torch.float32, BF16, torch.float16)
        for name, low in (("1e9", -1e9), ("lowest", torch.finfo(torch.float32).min))
    ),
    Case("hidden_rows", score=lambda c: lambda s, b, h, q, k: s + c.low[q],
         captures=lambda s, r: {"low": -3.4e38 * r.flags(s.q_len).float()}, shape=ODD, dtype=BF16,
         stock=False),
    Case("hidden_pairs", score=lambda c: lambda s, b, h, q, k: s + c.low[q, k],
         captures=lambda s, r: {"low": -1e9 * (r.flags(s.q_len, s.kv_len) | r.flags(s.q_len, 1))},
         shape=ODD, dtype=BF16, stock=False),
    Case("hidden_line",
         score=lambda c: lambda s, b, h, q, k: (
             s + c.slopes[h] * (k - q) + torch.where((k <= q) & (q >= 20), 0.0, -1e30)
         ),
         captures=lambda s, r: {"slopes": r.uniform(s.heads)}, shape=ODD, dtype=BF16, stock=False),
    Case("grown", score=plain(lambda s, b, h, q, k: torch.sinh(6 * s)), shape=ODD, dtype=BF16,
         stock=False),
    Case("score_causal", score=plain(lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf)),
         options=SMALL_TILES),
    Case("score_inverse_causal", dtype=FP16,
         score=plain(lambda s, b, h, q, k: torch.where(q <= k, s, -math.inf))),
    Case("relative_distance", score=plain(lambda s, b, h, q, k: s + (q - k)), dtype=BF16),
    Case("relative_causal", score=plain(relative_causal), shape=LONG),
    Case("alibi_8", score=plain(alibi_8), shape=ODD, options=OBLONG_TILES),
    Case("score_window", score=plain(lambda s, b, h, q, k: torch.where(q + 5 >= k, s, -math.inf)),
         shape=Shape(q_len=127, kv_len=127), lse=True),
    Case("even_keys", score=plain(lambda s, b, h, q, k: torch.where(k % 2 == 0, s, -math.inf)),
         options=SMALL_TILES, dtype=BF16),
    Case("composed", score=plain(composed)),
    Case("silu", score=plain(silu_head), shape=ODD),
    Case("natten_true_division", score=plain(natten_true_division), shape=Shape(q_len=64, kv_len=64)),
    Case("trigonometric", score=plain(trigonometric), shape=BATCHES),
    Case("soft_cap", score=plain(soft_cap), options=SMALL_TILES, lse=True),
    Case("soft_cap_approximate", score=plain(flexhop.mods.softcap(20.0, approximate=True)), dtype=BF16,
         stock=False),
    Case("floor_division", score=plain(lambda s, b, h, q, k: s - q // (1 + k))),
    Case("damped", score=plain(lambda s, b, h, q, k: s / (1 + 1e-2 * (q - k) ** 2)), shape=ODD),
    Case("negative_scale", scale=-0.3, shape=ODD, lse=True, max_scores=True, options=SMALL_TILES),
    Case("zero_scale", scale=0.0, shape=ODD, lse=True),
    Case("scale_with_score_mod", scale=0.7, score=plain(soft_cap), mask=plain(causal), dtype=BF16),
    Case("poison_reciprocal", score=plain(lambda s, b, h, q, k: 1 / (s + 6.0)), mask=plain(causal),
         shape=LONG, options=KernelOptions(forward=Tile(64, 64), grad_query=Tile(64, 64))),
    Case("poison_logarithm", score=plain(logarithm), mask=plain(causal), options=SMALL_TILES),
    Case("lse_gradient", mask=plain(causal), lse=True, max_scores=True, shape=ODD),
]  # fmt: skip

MASKS = [
    Case("causal", mask=plain(causal), shape=LONG, dtype=BF16),
    Case("causal_small_blocks", mask=plain(causal), block_size=32, options=SMALL_TILES),
    Case("causal_256_over_64", mask=plain(causal), block_size=256, shape=Shape(q_len=64, kv_len=64)),
    Case("causal_block_16", mask=plain(causal), block_size=16, stock=False),
    Case("causal_block_20", mask=plain(causal), block_size=20, lse=True, stock=False,
         shape=Shape(q_len=127, kv_len=127, heads=1, kv_heads=1)),
    Case("causal_block_64", mask=plain(causal), block_size=64, shape=Shape(q_len=127, kv_len=127)),
    Case("causal_block_96", mask=plain(causal), block_size=96, stock=False, dtype=BF16,
         shape=Shape(q_len=257, kv_len=257, heads=1, kv_heads=1)),
    Case("causal_block_128_64", mask=plain(causal), block_size=(128, 64), shape=LONG),
    Case("causal_block_32_64", mask=plain(causal), block_size=(32, 64), options=OBLONG_TILES,
         shape=Shape(q_len=127, kv_len=65), stock=False),
    Case("inverse_causal", mask=plain(inverse_causal), block_size=32, stock=False),
    Case("window_and", mask=plain(and_masks(causal, window(7))), block_size=16, stock=False),
    Case("empty_and", mask=plain(and_masks(causal, lambda b, h, q, k: q < k)), shape=ODD, lse=True),
    Case("everything_or", mask=plain(or_masks(causal, lambda b, h, q, k: q < k)), shape=ODD),
    Case("three_masks", mask=plain(or_masks(and_masks(causal, window(9)), lambda b, h, q, k: k < 4)),
         block_size=64, options=SMALL_TILES),
    Case("empty_rows_half", mask=plain(lambda b, h, q, k: q < 33), lse=True, max_scores=True,
         block_size=32, options=SMALL_TILES, stock=False),
    Case("empty_rows_first", mask=plain(lambda b, h, q, k: q > k), score=plain(soft_cap), lse=True),
    Case("empty_rows_alternate", mask=plain(lambda b, h, q, k: (q % 2 == 0) & (q >= k)), dtype=BF16,
         shape=groups(2)),
    Case("unseen_keys", mask=plain(lambda b, h, q, k: k % 3 == 0), shape=ODD),
    Case("tail_keys", mask=plain(lambda b, h, q, k: k >= 128), shape=Shape(1, 1, 1, 192, 192)),
    Case("two_ranges", mask=plain(two_ranges), block_size=32, shape=Shape(q_len=37, kv_len=127),
         stock=False),
    Case("head_dependent", mask=lambda c: lambda b, h, q, k: c.flags[h] | (q >= k), per_head=True,
         captures=lambda s, r: {"flags": r.flags(s.heads)}, shape=groups(2, 2)),
    Case("batch_dependent", mask=plain(lambda b, h, q, k: (q >= k) & (b % 2 == 0)), per_batch=True,
         shape=BATCHES, lse=True),
    Case("random_queries", mask=lambda c: lambda b, h, q, k: c.kept[b, q] & (q >= k), per_batch=True,
         captures=lambda s, r: {"kept": r.flags(s.batch, s.q_len)}, shape=BATCHES),
    Case("padding", mask=lambda c: flexhop.masks.padding(c.lengths), per_batch=True, lse=True,
         captures=lambda s, r: {"lengths": r.integers(s.kv_len, s.batch)}, shape=BATCHES),
    Case("documents", mask=lambda c: flexhop.masks.document(c.ids), block_size=16, stock=False,
         captures=lambda s, r: {"ids": r.documents(4, s.q_len)}, options=SMALL_TILES),
    Case("documents_causal_per_batch", mask=per_batch_documents, per_batch=True, shape=BATCHES,
         captures=lambda s, r: {"ids": r.documents(4, s.batch, s.q_len)}, dtype=BF16),
    Case("documents_two_step", mask=clamped_documents, per_batch=True, shape=BATCHES,
         captures=lambda s, r: {"ids": r.documents(4, s.batch, s.q_len),
                                "starts": r.integers(s.q_len, 3)}),
    Case("documents_numbered", mask=numbered_documents,
         captures=lambda s, r: {"ids": r.documents(3, s.q_len)}, lse=True),
    Case("documents_halved", per_batch=True, shape=BATCHES,
         mask=lambda c: lambda b, h, q, k: c.ids[b, q // 2] == c.ids[b, k],
         captures=lambda s, r: {"ids": r.documents(3, s.batch, s.q_len)}),
    Case("offset_tensor", mask=lambda c: flexhop.masks.causal_with_offset(c.offset), shape=ODD,
         captures=lambda s, r: {"offset": torch.tensor(28, dtype=torch.int32)}),
    Case("offset_int", mask=lambda c: flexhop.masks.causal_with_offset(c.offset), shape=ODD,
         captures=lambda s, r: {"offset": s.kv_len - s.q_len}),
    Case("offset_negative", mask=plain(lambda b, h, q, k: k >= q + 11), shape=ODD, lse=True),
    Case("mask_partial", mask=plain(functools.partial(causal_from, offset=5))),
    Case("mask_object", mask=plain(CausalOrNear(7)), shape=ODD),
    Case("captured_float", mask=lambda c: lambda b, h, q, k: (q - k).abs() < c.reach,
         captures=lambda s, r: {"reach": torch.tensor(7.5)}),
    Case("captured_matrix", mask=lambda c: lambda b, h, q, k: c.kept[q, b, k], per_batch=True,
         captures=lambda s, r: {"kept": r.flags(s.q_len, s.batch, s.kv_len)}, shape=BATCHES),
    Case("captured_view", mask=lambda c: lambda b, h, q, k: c.kept[k, q], options=SMALL_TILES,
         captures=lambda s, r: {"kept": r.flags(s.q_len * 2, s.kv_len)[::2].t()}),
    Case("prefix_lm", mask=lambda c: flexhop.masks.prefix_lm(c.prefix), per_batch=True, shape=BATCHES,
         captures=lambda s, r: {"prefix": r.integers(s.q_len, s.batch)}),
    Case("dilated", mask=plain(flexhop.masks.dilated_sliding_window(4, 3)), dtype=FP16),
    Case("global_tokens", mask=plain(or_masks(flexhop.masks.sliding_window(8), flexhop.masks.global_tokens(3))),
         shape=LONG),
    Case("natten_2d", mask=plain(flexhop.masks.natten_2d(8, 8, 3, 3)), shape=Shape(q_len=64, kv_len=64),
         grown=Shape(2, 4, 4, 64, 64, 64, 64)),
    Case("listed", blocks=listed_blocks(None, False), lse=True, options=SMALL_TILES, stock=False),
    Case("listed_full", blocks=listed_blocks(None, True), shape=Shape(q_len=127, kv_len=65), stock=False),
    Case("listed_causal", blocks=listed_blocks(causal, True), lse=True, stock=False, dtype=BF16),
    Case("listed_oblong", blocks=listed_blocks(causal, False), options=OBLONG_TILES, stock=False),
]  # fmt: skip

CAPTURES = [
    Case("sum_of_three", score=lambda c: lambda s, b, h, q, k: s + c.token[q] + c.batch[b] + c.head[h],
         captures=lambda s, r: {"token": r.normal(s.q_len), "batch": r.normal(s.batch),
                                "head": r.normal(s.heads)}, shape=BATCHES, dtype=BF16),
    Case("two_step", score=lambda c: lambda s, b, h, q, k: s + c.bias[b][q],
         captures=lambda s, r: {"bias": r.normal(s.batch, s.q_len)}, shape=BATCHES),
    Case("three_step", score=lambda c: lambda s, b, h, q, k: s + c.bias[0][b, h][q],
         captures=lambda s, r: {"bias": r.normal(1, s.batch, s.heads, s.q_len)}, shape=BATCHES),
    Case("which", score=lambda c: lambda s, b, h, q, k: s + c.bias[b][h][c.which, q],
         captures=lambda s, r: {"bias": r.normal(s.batch, s.heads, 4, s.q_len),
                                "which": torch.tensor(2)}, shape=BATCHES),
    Case("segments", score=lambda c: lambda s, b, h, q, k: torch.where(c.flag[q] == c.flag[k], s, -math.inf),
         captures=lambda s, r: {"flag": r.flags(s.q_len)}),
    Case("bias_2d", score=lambda c: lambda s, b, h, q, k: s + c.bias[q, k], shape=ODD,
         captures=lambda s, r: {"bias": r.normal(s.q_len, s.kv_len, dtype=BF16)}, dtype=BF16),
    Case("bias_3d", score=lambda c: lambda s, b, h, q, k: s + c.bias[b, q, k], shape=BATCHES,
         captures=lambda s, r: {"bias": r.normal(s.batch, s.q_len, s.kv_len)}),
    Case("bias_4d", score=lambda c: lambda s, b, h, q, k: s + c.bias[b, h, q, k], shape=BATCHES,
         captures=lambda s, r: {"bias": r.normal(s.batch, s.heads, s.q_len, s.kv_len)},
         options=SMALL_TILES),
    Case("exact_table", score=lambda c: lambda s, b, h, q, k: s + c.table[q - k + c.shape.kv_len - 1],
         mask=plain(causal), shape=Shape(1, 1, 1, 257, 257),
         captures=lambda s, r: {"table": r.normal(s.q_len + s.kv_len - 1)}),
    Case("poisoned_table", score=lambda c: lambda s, b, h, q, k: s + c.bias[b, h, q, k],
         captures=lambda s, r: {"bias": torch.nn.functional.pad(
             r.normal(s.batch, s.heads, s.q_len, s.kv_len), (0, 7, 0, 7), value=math.nan)},
         mask=plain(causal), options=SMALL_TILES),
    Case("prefix_or_causal", score=prefix_or_causal, shape=BATCHES,
         captures=lambda s, r: {"prefix": r.integers(s.q_len, s.batch)}),
    Case("nested_causal", score=nested_causal, captures=lambda s, r: {
        "segment": r.documents(3, s.q_len), "starts": r.integers(s.q_len, 3)}),
    Case("scalar_added", score=lambda c: lambda s, b, h, q, k: s + c.number,
         captures=lambda s, r: {"number": torch.tensor(1, dtype=torch.int32)}, shape=ODD),
    Case("number_captured", score=lambda c: lambda s, b, h, q, k: s * c.factor + c.shift,
         captures=lambda s, r: {"factor": 0.5, "shift": s.heads}, shape=ODD),
    Case("one_element", score=lambda c: lambda s, b, h, q, k: s * c.factor[0],
         captures=lambda s, r: {"factor": torch.tensor([0.7])}, shape=ODD),
    Case("unrolled_distance", score=unrolled_distance, shape=ODD, captures=lambda s, r: {
        "points": r.normal(s.kv_len, 3), "lengths": 1 + r.uniform(s.heads)}),
    Case("gather_of_gather", score=lambda c: lambda s, b, h, q, k: s + c.bias[c.ids[k]], shape=ODD,
         captures=lambda s, r: {"bias": r.normal(5), "ids": r.integers(5, s.kv_len)}),
    Case("int64_index", score=lambda c: lambda s, b, h, q, k: s + c.bias[k.to(torch.int64)], shape=ODD,
         captures=lambda s, r: {"bias": r.normal(s.kv_len)}, dtype=FP16),
    Case("sliced_reads", shape=ODD, stock=False,
         score=lambda c: lambda s, b, h, q, k: s + c.bias[:, 1, q][h] * c.bias[h, 1:, k][1],
         captures=lambda s, r: {"bias": r.normal(s.heads, 3, s.q_len + s.kv_len)}),
    Case("views_of_one_base", score=lambda c: lambda s, b, h, q, k: s + c.even[q] - c.odd[k],
         captures=lambda s, r: (lambda base: {"even": base[::2], "odd": base[1::2]})(r.normal(s.q_len * 2))),
    Case("half_logarithm", score=lambda c: lambda s, b, h, q, k: s + torch.log(c.weight[h]),
         captures=lambda s, r: {"weight": (1 + r.uniform(s.heads)).half()}, shape=ODD, dtype=FP16),
]  # fmt: skip

LEARNED = [
    Case("learned_distance", score=lambda c: lambda s, b, h, q, k: s + c.bias[(q - k).abs()],
         captures=lambda s, r: {"bias": r.normal(2 * s.q_len)}, learned=("bias",), shape=LEARN),
    Case("learned_table", score=lambda c: lambda s, b, h, q, k: s + c.table[q - k + c.shape.kv_len],
         captures=lambda s, r: {"table": r.normal(2 * s.q_len)}, learned=("table",), shape=LEARN,
         options=SMALL_TILES, mask=plain(causal)),
    Case("learned_table_per_head", score=lambda c: flexhop.mods.relative_bias(c.table), dtype=BF16,
         captures=lambda s, r: {"table": r.normal(s.heads, 2 * s.q_len - 1)}, learned=("table",),
         shape=LEARN),
    Case("learned_2d", score=lambda c: lambda s, b, h, q, k: s + c.bias[q, k], shape=LEARN, dtype=BF16,
         captures=lambda s, r: {"bias": r.normal(s.q_len, s.kv_len, dtype=BF16)}, learned=("bias",)),
    Case("learned_3d", score=lambda c: lambda s, b, h, q, k: s + c.bias[h, q, k], shape=LEARN,
         captures=lambda s, r: {"bias": r.normal(s.heads, s.q_len, s.kv_len)}, learned=("bias",)),
    Case("learned_4d", score=lambda c: lambda s, b, h, q, k: s + c.bias[b, h, q, k], shape=LEARN,
         captures=lambda s, r: {"bias": r.normal(s.batch, s.heads, s.q_len, s.kv_len)},
         learned=("bias",), mask=plain(causal)),
    Case("learned_factor", score=lambda c: lambda s, b, h, q, k: s * c.bias[q], shape=LEARN,
         captures=lambda s, r: {"bias": r.normal(s.q_len)}, learned=("bias",), options=SMALL_TILES),
    Case("learned_clamped", shape=LEARN, learned=("bias",),
         score=lambda c: lambda s, b, h, q, k: s + c.bias[torch.clamp(q - k + 8, 0, 16)],
         captures=lambda s, r: {"bias": r.normal(17)}),
    Case("learned_key", score=lambda c: lambda s, b, h, q, k: s + c.bias[k], shape=LEARN, lse=True,
         captures=lambda s, r: {"bias": r.normal(s.kv_len)}, learned=("bias",)),
    Case("learned_query", score=lambda c: lambda s, b, h, q, k: s * (1 + c.bias[q] ** 2), shape=LEARN,
         captures=lambda s, r: {"bias": r.normal(s.q_len)}, learned=("bias",), mask=plain(causal)),
    Case("learned_which", score=lambda c: lambda s, b, h, q, k: s * c.bias[b, h, c.which, q],
         captures=lambda s, r: {"bias": r.normal(s.batch, s.heads, 3, s.q_len), "which": torch.tensor(1)},
         learned=("bias",), shape=LEARN),
    Case("learned_indirect", score=lambda c: lambda s, b, h, q, k: s * c.bias[c.offset[q]], shape=LEARN,
         captures=lambda s, r: {"bias": r.normal(s.q_len), "offset": r.integers(s.q_len // 2, s.q_len)},
         learned=("bias",)),
    Case("learned_symmetric", score=lambda c: lambda s, b, h, q, k: s + c.bias[q] * c.bias[k],
         captures=lambda s, r: {"bias": r.normal(s.q_len)}, learned=("bias",), shape=LEARN, stock=False),
    Case("learned_flipped", score=lambda c: lambda s, b, h, q, k: s + c.bias[k, q], shape=LEARN,
         captures=lambda s, r: {"bias": r.normal(s.kv_len, s.q_len)}, learned=("bias",)),
    Case("learned_gate", score=lambda c: lambda s, b, h, q, k: s * torch.sigmoid(c.gate[h]), shape=LEARN,
         captures=lambda s, r: {"gate": r.normal(s.heads)}, learned=("gate",), dtype=BF16),
    Case("learned_head", score=lambda c: lambda s, b, h, q, k: s * c.slope[h] * (q - k),
         captures=lambda s, r: {"slope": r.uniform(s.heads)}, learned=("slope",), mask=plain(causal),
         shape=Shape(2, 6, 2, 65, 65)),
    Case("learned_two", score=lambda c: lambda s, b, h, q, k: s * c.first[q] + c.second[k], dtype=FP16,
         captures=lambda s, r: {"first": r.normal(s.q_len, dtype=FP16), "second": r.normal(s.kv_len)},
         learned=("first", "second"), shape=LEARN),
    Case("learned_scalar", score=lambda c: lambda s, b, h, q, k: s * c.t + c.t.detach(),
         captures=lambda s, r: {"t": torch.tensor(0.8)}, learned=("t",), shape=LEARN),
    Case("learned_slopes_hoisted", score=lambda c: lambda s, b, h, q, k: s - c.logarithm.exp()[h] * (q - k),
         captures=lambda s, r: {"logarithm": r.normal(s.heads)}, learned=("logarithm",), shape=LEARN,
         mask=plain(causal), stock=False),
    Case("learned_view", score=lambda c: lambda s, b, h, q, k: s * c.bias[h, q], shape=LEARN,
         captures=lambda s, r: {"bias": r.normal(s.q_len, s.heads).t()}, learned=("bias",)),
    Case("learned_nested", score=gated_table, shape=LEARN, learned=("table", "gates"),
         captures=lambda s, r: {"table": r.normal(s.heads, 9), "gates": r.normal(s.heads)}),
    Case("learned_two_step", score=lambda c: lambda s, b, h, q, k: s * c.bias[b][q], shape=LEARN,
         captures=lambda s, r: {"bias": r.normal(s.batch, s.q_len)}, learned=("bias",)),
    Case("learned_empty_rows", score=lambda c: lambda s, b, h, q, k: s * c.bias[q], shape=LEARN,
         captures=lambda s, r: {"bias": r.normal(s.q_len)}, learned=("bias",), lse=True,
         mask=plain(lambda b, h, q, k: (q > k) & (q < 30))),
    Case("learned_grouped", score=lambda c: lambda s, b, h, q, k: s * c.bias[b, h] + c.bias[b, h],
         captures=lambda s, r: {"bias": r.normal(s.batch, s.heads)}, learned=("bias",), dtype=BF16,
         shape=Shape(2, 6, 2, 37, 65, kv_batch=1), stock=False),
    Case("learned_row", score=lambda c: lambda s, b, h, q, k: s + c.bias[..., k][1], learned=("bias",), shape=LEARN,
         captures=lambda s, r: {"bias": r.normal(3, s.kv_len)}, stock=False),
]  # fmt: skip

# Scores that do without q·k, and have fewer dimensions than it.
IGNORANT = [
    dataclasses.replace(case, ignores_score=True, stock=False)
    for case in (
        Case("zeros", score=plain(lambda s, b, h, q, k: torch.zeros_like(s)), mask=plain(causal), shape=ODD, lse=True),
        Case("score_of_key", score=plain(lambda s, b, h, q, k: (k % 7) * 0.3), shape=ODD, options=SMALL_TILES),
        Case("score_of_query", score=plain(lambda s, b, h, q, k: q * 0.1), dtype=BF16, shape=ODD, lse=True),
        Case("score_of_head", score=lambda c: lambda s, b, h, q, k: c.bias[h], learned=("bias",), dtype=FP16,
             captures=lambda s, r: {"bias": r.normal(s.heads, dtype=FP16)}, shape=LEARN),
        Case("learned_distance_alone", score=lambda c: lambda s, b, h, q, k: c.bias[h, (q - k).abs()],
             captures=lambda s, r: {"bias": r.normal(s.heads, s.q_len)}, learned=("bias",), shape=LEARN,
             mask=plain(causal)),
        Case("zeros_capped", score=lambda c: lambda s, b, h, q, k: torch.tanh(torch.zeros_like(s) + c.bias[k]),
             captures=lambda s, r: {"bias": r.normal(s.kv_len)}, learned=("bias",), shape=LEARN),
        Case("decode_zeros", score=plain(lambda s, b, h, q, k: torch.zeros_like(s)), options=decoded(3), lse=True,
             **short(3, 3)),
        Case("decode_score_of_key", score=plain(lambda s, b, h, q, k: k * 0.02), options=decoded(2),
             dtype=BF16, **short(1, 3)),
        Case("decode_learned_alone", options=decoded(2), learned=("bias",), dtype=FP16,
             score=lambda c: lambda s, b, h, q, k: (c.bias[h, k]).masked_fill(~(q // 3 <= k // 3), -math.inf),
             captures=lambda s, r: {"bias": r.normal(s.heads, s.kv_len)}, **short(2, 3)),
    )
]  # fmt: skip

WIDTHS = [
    *(Case(f"head_dim_{d}", score=plain(alibi_8), shape=width(d), stock=16 <= d <= 128, lse=d < 16,
           grown=Shape(2, 4, 2, 513, 513, d, d)) for d in (1, 3, 8, 17, 24, 40, 72, 94, 96, 121, 130)),
    *(Case(f"head_dim_{d}", mask=plain(causal), shape=width(d, length=19), dtype=BF16, stock=False,
           grown=Shape(1, 2, 1, 257, 257, d, d)) for d in (80, 257, 300, 320)),
    Case("head_dim_64", mask=plain(causal), shape=width(64, length=127), dtype=BF16),
    Case("head_dim_128", mask=plain(causal), shape=width(128, length=127), dtype=FP16),
    Case("head_dim_192", mask=plain(causal), shape=width(192), dtype=BF16,
         grown=Shape(2, 4, 2, 513, 513, 192, 192)),
    Case("head_dim_256", mask=plain(causal), shape=width(256), dtype=BF16,
         grown=Shape(2, 4, 2, 1023, 1023, 256, 256)),
    Case("head_dim_512", mask=plain(causal), shape=width(512), stock=False,
         grown=Shape(1, 2, 1, 513, 513, 512, 512)),
    Case("head_dim_512_bf16", score=plain(soft_cap), shape=width(512), dtype=BF16, stock=False,
         grown=Shape(1, 2, 1, 513, 513, 512, 512)),
    *(Case(f"head_dims_{d}_{v}", score=score, mask=mask, dtype=dtype, stock=False, lse=True, max_scores=v == 512,
           shape=Shape(1, 4, 2, 19, 37, d, v), grown=Shape(2, 4, 2, 257, 385, d, v), options=options)
      for d, v, dtype, score, mask, options in (
          (576, 512, BF16, None, plain(causal), SMALL_TILES),
          (576, 576, torch.float32, plain(alibi_8), None, None),
          (80, 520, FP16, plain(soft_cap), plain(causal), KernelOptions(short_queries="forward")),
      )),
    Case("head_dims_64_32", score=plain(alibi_8), shape=width(64, 32)),
    Case("head_dims_32_64", mask=plain(causal), shape=width(32, 64), dtype=BF16),
    Case("head_dims_24_94", score=plain(soft_cap), shape=width(24, 94), lse=True),
    Case("head_dims_192_128", mask=plain(causal), shape=width(192, 128), dtype=BF16,
         grown=Shape(2, 4, 4, 513, 513, 192, 128)),
]  # fmt: skip

GROUPS = [
    *(Case(f"group_{g}", mask=plain(causal), score=plain(alibi_8), shape=groups(g), stock=g in (1, 2, 8),
           dtype=BF16 if g == 3 else torch.float32) for g in (1, 2, 3, 6, 8)),
    Case("group_3_of_2", shape=groups(3, 2, q_len=65, kv_len=127), options=SMALL_TILES, stock=False),
    Case("group_mask_per_head", mask=plain(lambda b, h, q, k: (q >= k) | (h % 3 == 1)), per_head=True,
         shape=groups(3, 2), lse=True, stock=False),
    Case("kv_batch_shared", mask=plain(causal), shape=Shape(3, 2, 2, 37, 37, kv_batch=1)),
    Case("kv_batch_shared_grouped", score=plain(alibi_8), shape=Shape(4, 4, 2, 37, 65, kv_batch=1)),
    Case("kv_batch_shared_mask_per_batch", mask=per_batch_documents, per_batch=True,
         captures=lambda s, r: {"ids": r.documents(3, s.batch, s.q_len)},
         shape=Shape(3, 2, 1, 37, 37, kv_batch=1)),
]  # fmt: skip

LAYOUTS = [
    *(Case(f"layout_{layout}", score=plain(soft_cap), mask=plain(causal), layout=layout,
           shape=Shape(2, 2, 2, 37, 37, 17, 24), stock=layout != "expanded", options=options)
      for layout, options in (("bshd", None), ("column", SMALL_TILES), ("padded", SMALL_TILES),
                              ("offset", None), ("expanded", SMALL_TILES))),
    Case("layout_bshd_bf16", mask=plain(causal), layout="bshd", dtype=BF16, shape=groups(2, 2)),
    Case("layout_column_unmasked", layout="column", shape=Shape(2, 2, 2, 37, 65)),
]  # fmt: skip

DECODE = [
    *(Case(f"decode_{q}_of_{g}", score=plain(alibi_8) if g > 3 else None, options=decoded(splits), lse=q == 3,
           max_scores=g == 3, dtype=BF16 if g == 7 else torch.float32, stock=False, **short(q, g))
      for q, g, splits in ((1, 1, None), (1, 3, 5), (1, 7, 1), (3, 1, 2), (3, 6, 3), (3, 7, None), (8, 8, 2),
                           (8, 3, 1))),
    Case("decode_default", options=decoded(tile=None), lse=True, dtype=BF16, stock=False,
         **short(1, 6, kv_len=333)),
    Case("decode_many_splits", options=decoded(64), lse=True, max_scores=True, **short(1, 4)),
    Case("decode_two_row_tiles", options=decoded(3), score=plain(alibi_8), lse=True, stock=False, **short(5, 7)),
    *(Case(f"decode_head_dims_{d}_{v}", options=decoded(3), score=plain(soft_cap), lse=True, stock=False, dtype=BF16,
           **short(3, 3, head_dim=d, value_head_dim=v)) for d, v in ((64, 64), (128, 128), (80, 80), (24, 94))),
    Case("decode_causal_step", blocks=at_step(plain(causal)), options=decoded(2), stock=False, lse=True,
         captures=lambda s, r: {"offset": torch.tensor(s.kv_len * 2 // 3)}, **short(1, 6)),
    Case("decode_causal_step_of_8", blocks=at_step(plain(causal)), options=decoded(3), stock=False, dtype=BF16,
         captures=lambda s, r: {"offset": torch.tensor(s.kv_len // 64 * 32)}, **short(8, 3)),
    Case("decode_window_step", blocks=at_step(plain(and_masks(causal, window(40)))), options=decoded(3), lse=True,
         captures=lambda s, r: {"offset": torch.tensor(s.kv_len * 5 // 6)}, stock=False, **short(1, 7, 127)),
    Case("decode_documents_step", options=decoded(2), stock=False, score=plain(soft_cap),
         blocks=at_step(lambda c: and_masks(causal, lambda b, h, q, k: c.ids[q] == c.ids[k])),
         captures=lambda s, r: {"offset": torch.tensor(s.kv_len // 64 * 32), "ids": r.documents(3, s.kv_len)},
         **short(3, 3, 127)),
    Case("decode_alibi_step", blocks=at_step(plain(causal)), options=decoded(2), stock=False, max_scores=True,
         score=lambda c: lambda s, b, h, q, k: s + c.slopes[h] * (k - q - c.offset),
         captures=lambda s, r: {"offset": torch.tensor(s.kv_len * 2 // 3), "slopes": r.uniform(s.heads)},
         **short(1, 6)),
    Case("decode_empty_rows", mask=plain(lambda b, h, q, k: (q == 1) & (k >= 50)), lse=True, max_scores=True,
         options=decoded(3), block_size=32, stock=False, **short(3, 6)),
    Case("decode_nothing_seen", mask=plain(lambda b, h, q, k: k < 0), lse=True, max_scores=True,
         options=decoded(2), block_size=32, stock=False, **short(1, 3)),
    Case("decode_mask_per_head", mask=plain(lambda b, h, q, k: (k % 3 != h % 3) & (k >= 32 * (h % 2))),
         per_head=True, options=decoded(2), block_size=32, lse=True, stock=False, **short(3, 3)),
    Case("decode_small_query_blocks", mask=plain(lambda b, h, q, k: k <= q + 60), block_size=(4, 48),
         options=decoded(2), lse=True, stock=False, **short(7, 3, 127)),
    Case("decode_padding", mask=lambda c: flexhop.masks.padding(c.lengths), per_batch=True, options=decoded(3),
         captures=lambda s, r: {"lengths": r.integers(s.kv_len, s.batch)}, block_size=16, stock=False, **short(1, 3)),
    Case("decode_bias", score=lambda c: lambda s, b, h, q, k: s + c.bias[b, h, q, k], options=decoded(2),
         captures=lambda s, r: {"bias": r.normal(s.batch, s.heads, s.q_len, s.kv_len)}, stock=False, **short(3, 3)),
    Case("decode_learned", score=lambda c: lambda s, b, h, q, k: s * torch.sigmoid(c.gate[h]) + c.bias[k],
         captures=lambda s, r: {"gate": r.normal(s.heads), "bias": r.normal(s.kv_len)}, learned=("bias",),
         options=decoded(2), stock=False, dtype=BF16, **short(3, 3)),
    Case("decode_prescaled", options=KernelOptions(short_queries="decode", decode=TINY, prescale_qk=True), stock=False,
         **short(1, 3)),
    Case("decode_negative_scale", scale=-0.3, options=decoded(2), max_scores=True, lse=True, **short(1, 2)),
    Case("decode_kv_batch_shared", options=decoded(2), stock=False, **short(1, 3, kv_batch=1)),
    *(Case(f"decode_layout_{layout}", score=plain(soft_cap), layout=layout, options=decoded(2), stock=False,
           **short(3, 3, head_dim=17, value_head_dim=24)) for layout in ("bshd", "column", "padded")),
]  # fmt: skip

OPTIONS = [
    Case("prescaled", mask=plain(causal), options=KernelOptions(forward=TINY, prescale_qk=True), lse=True),
    Case("prescaled_fp16", shape=Shape(head_dim=40, value_head_dim=40), dtype=FP16, lse=True,
         options=KernelOptions(forward=TINY, prescale_qk=True)),
    # Scores of up to 20, whose query every kernel must round alike.
    Case("prescaled_steep", shape=Shape(1, 2, 2, 257, 7, 256, 64), dtype=FP16, scale=0.3,
         options=KernelOptions(prescale_qk=True)),
    Case("prescaled_pieces", shape=Shape(1, 2, 1, 17, 33, 576, 512), dtype=FP16, scale=0.1, stock=False,
         options=KernelOptions(prescale_qk=True)),
    Case("rows_safe", mask=plain(causal), options=KernelOptions(rows_guaranteed_safe=True)),
    Case("tf32", mask=plain(causal), options=KernelOptions(float32_precision="tf32")),
]  # fmt: skip

CASES = [
    *SCORES, *MASKS, *CAPTURES, *LEARNED, *IGNORANT, *WIDTHS, *GROUPS, *LAYOUTS, *DECODE, *OPTIONS,
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "two cases share a name"
