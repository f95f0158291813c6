"""The facts of one call, collected once. They never change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from flexhop.compat.kernels.gluon_versions import triton_version
from flexhop.lowering.mods.bands import Band

Axis = Literal["query", "key"]
# What neighbouring scores read: neighbours in a row of keys, which can be copied or are short and
# not aligned; neighbours in a row of queries; neighbours in a table by distance.
PairRows = Literal["keys", "short keys", "queries", "distances"]
# Why scores may be large: by what is added to them or put in their place, or as functions of them.
Large = Literal["no", "offset", "growth"]
COPIED = 4  # bytes of the smallest element that Triton copies to shared memory alone
# Which scores read the same entry of a captured tensor: all of a head, those of a key, of a query,
# of pairs at the same distance, or any.
ReadBy = Literal["head", "key", "query", "distance", "score"]


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """A GPU's resources for a kernel.

    shared_memory: bytes available to one program. multiprocessors: number of multiprocessors.
    triton: version of the compiler.
    """

    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int
    l2_bytes: int
    name: str = "GPU"
    triton: tuple[int, int] = dataclasses.field(default_factory=triton_version)


@dataclasses.dataclass(frozen=True, slots=True)
class MaskBlocks:
    """Blocks of the mask: their sizes, whether some are listed as full, and whether per head.

    has_ranges: whether rows are ranges of keys instead of lists of blocks. per_batch: like
    per_head. kv_columns, q_columns: capacity of the lists of a row, on both sides; None if it is
    dynamic.
    """

    q_size: int
    kv_size: int
    has_full: bool
    per_head: bool = False
    has_ranges: bool = False
    per_batch: bool = False
    kv_columns: int | None = None
    q_columns: int | None = None

    @property
    def has_spans(self) -> bool:
        """Whether ranges of keys are the whole mask, so mask_mod is not needed."""
        return self.has_ranges and self.has_full


@dataclasses.dataclass(frozen=True, slots=True)
class Cache:
    """How key and value are stored in a cache and decoded.

    page_size: 0 without pages. has_key_mod, has_value_mod: whether every element is transformed.
    has_key_factor, has_value_factor: whether each key or value is multiplied by a number, which is
    applied to its scores or weights. has_pairs: whether values can be read two columns at a time.
    """

    page_size: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    has_key_mod: bool = False
    has_value_mod: bool = False
    has_key_factor: bool = False
    has_value_factor: bool = False
    has_pairs: bool = False

    @property
    def changes(self) -> bool:
        """Whether mods change keys, values, scores or weights."""
        of_key = self.has_key_mod or self.has_key_factor
        return of_key or self.has_value_mod or self.has_value_factor


class ModFacts(NamedTuple):
    """Facts about score_mod and mask_mod for the choice of kernels.

    has_score_mod, has_mask_mod: whether they do anything. reads_per_element: whether score_mod
    reads captured tensors at indices that depend on both query and key. reads_by_position: whether
    it reads any at an index that depends on one of them. reads_score: whether its result depends
    on the score. takes_products: whether the kernel's score_mod takes products that are not scaled
    and returns exponents of 2 (lowering/mods/caps.py). score_cost, mask_cost: instructions per
    score. asked_cost, asked_grad_cost: those that bits spare, in kernels whose threads hold rows
    of queries, and of keys. has_key_slope, has_key_bend: whether score_mod adds a line over keys,
    and whether the line has bends or steps (lowering/mods/lines.py). mask_reads: whether mask_mod
    reads captured tensors.
    mask_reads_by_position: whether it does so at indices that depend on query or key;
    mask_reads_per_element: on both.
    pair_bytes, mask_pair_bytes: of what they read on both, per score, the elements at indices that
    no other of them gives.
    mask_rows: how neighbours read them, if all are read alike (lowering/mods/rows.py).
    row_bytes: what score_mod reads per score in rows of keys, if it reads nothing else per pair
    (lowering/mods/rows.py).
    key_bytes: sizes of the elements that score_mod reads at indices that depend on the key alone.
    mask_key_bytes: sizes of the elements that mask_mod reads at indices that depend on the key.
    mask_uses_batch, mask_uses_head, mask_uses_query: whether it depends on b, h and q_idx.
    mask_band: the band of keys that it keeps, if it is one (lowering/mods/bands.py).
    mask_keeps_own: whether each query sees the key at its own position, as far as is known.
    mask_is_scattered: whether it hides some scores of every block by one position alone, as
    `q_idx % 3 != 1` does.
    has_distances: whether score_mod computes q_idx - kv_idx and adds no line. score_uses_keys:
    whether it depends on kv_idx. reads_captured: whether on captured tensors, and adds no line.
    longest_row: most numbers that score_mod computes, or adds up, at once.
    large_scores: whether it may return scores far above 2**15, and why (lowering/mods/large.py).
    copied_bytes: what a kernel could copy of a bias of pairs (lowering/mods/rows.py).
    head_row_bytes: what mods read per score in rows of pairs of which each head has its own and
    batches have not (lowering/mods/rows.py).
    """

    has_score_mod: bool
    has_mask_mod: bool
    reads_per_element: bool
    reads_by_position: bool
    reads_score: bool
    takes_products: bool
    score_cost: float
    has_key_slope: bool
    has_key_bend: bool
    mask_reads: bool
    mask_reads_per_element: bool
    mask_uses_batch: bool
    mask_uses_head: bool
    mask_cost: float
    asked_cost: float
    asked_grad_cost: float
    mask_band: Band | None
    pair_bytes: int = 0
    mask_pair_bytes: int = 0
    mask_rows: PairRows | None = None
    mask_reads_by_position: bool = False
    key_bytes: frozenset[int] = frozenset()
    mask_key_bytes: frozenset[int] = frozenset()
    mask_uses_query: bool = False
    mask_keeps_own: bool = False
    mask_is_scattered: bool = False
    has_distances: bool = False
    row_bytes: int = 0
    score_uses_keys: bool = True
    longest_row: int = 1
    reads_captured: bool = False
    large_scores: Large = "no"
    head_row_bytes: int = 0
    copied_bytes: int = 0

    @property
    def mask_reads_keys(self) -> bool:
        """Whether mask_mod reads captured tensors at indices that depend on the key."""
        return bool(self.mask_key_bytes)

    @property
    def ignores_score(self) -> bool:
        """Whether the score_mod depends on positions alone."""
        return self.has_score_mod and not self.reads_score

    @property
    def takes_scores(self) -> bool:
        """Whether the kernel's score_mod takes scaled scores."""
        return self.has_score_mod and not self.takes_products


class GradFacts(NamedTuple):
    """Facts about the gradient of score_mod.

    has_score_grad: whether the derivative differs from 1. grad_cost: instructions per score.
    grad_reads_score: whether it, or the gradient of a captured tensor, depends on the score.
    grad_has_functions: whether these need more than sums and products. captured_reads: the reads
    of captured tensors that need gradients. queries_meet: whether different queries of a head may
    read one entry of such a tensor that all keys of a query read. own_entries: those tensors, by
    position, in which each score has an entry of its own, read once, and pairs have entries.
    captured_follow_score: whether the gradient that a score adds to any captured tensor is that of
    the score or of the modified score, up to its sign.
    """

    has_score_grad: bool = True
    grad_cost: float = 0.0
    grad_reads_score: bool = True
    grad_has_functions: bool = False
    captured_reads: tuple[ReadBy, ...] = ()
    queries_meet: bool = False
    own_entries: frozenset[int] = frozenset()
    captured_follow_score: bool = True

    @property
    def adds_captured(self) -> bool:
        """Whether the gradient of any captured tensor is a sum; others are stored."""
        return len(self.captured_reads) > len(self.own_entries)


# Columns of the widest tile in one piece.
_LARGEST_WIDTH = 512
# For a call whose joint graph is not needed.
UNREAD = GradFacts()


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One call as plain values.

    Lengths are hints: the sizes seen at this compile. What must hold for every size is in
    `is_query_multiple` and `is_key_multiple` (is the length known to be a multiple of n?).
    key_len_varies: whether calls with other numbers of keys will run the same kernel.
    mods, grad: what is known about the user's functions; grad counts in a backward pass.
    is_deterministic: whether results must be the same in every run.
    is_tf32: whether products of float32 operands are rounded to TF32.
    bulk_obstacle: why the tensor memory accelerator cannot copy the operands, if it cannot.
    cache: None unless key and value are read from one; with pages, key_len is what the widest
    sequence has room for.
    tangents: which operands have one, in a call in forward mode; "captures": captured tensors.
    value_is_key: whether value is a view of key's first columns.
    is_lse_wide: whether lse is fp64, in the form of ops/wide_lse.py.
    """

    device: Device
    dtype: torch.dtype
    batch: int
    query_heads: int
    kv_heads: int
    query_len: int
    key_len: int
    head_dim: int
    value_head_dim: int
    scale: float
    kv_batch_shared: bool
    blocks: MaskBlocks | None
    mods: ModFacts
    returns_max: bool
    large_output: bool
    is_query_multiple: Callable[[int], bool] = dataclasses.field(compare=False)
    is_key_multiple: Callable[[int], bool] = dataclasses.field(compare=False)
    grad: GradFacts = UNREAD
    dropout_p: float = 0.0
    dropout_groups: int = 0  # groups of queries in a placed seed (ops/dropout.py); 0: none
    is_deterministic: bool = False
    is_tf32: bool = False
    key_len_varies: bool = False
    bulk_obstacle: str = ""
    cache: Cache | None = None
    tangents: tuple[str, ...] = ()
    value_is_key: bool = False
    is_lse_wide: bool = False

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.query_heads // self.kv_heads

    @property
    def has_large_lse(self) -> bool:
        """Whether lse is wide, and may be so large that fp32 is not enough."""
        return self.is_lse_wide and self.mods.large_scores != "no"

    @property
    def is_wide(self) -> bool:
        """Whether a head is so wide that kernels hold its columns in pieces."""
        return max(self.head_dim, self.value_head_dim) > _LARGEST_WIDTH

    @property
    def is_packed(self) -> bool:
        """Whether the batch may hold packed sequences: it is then 1, with ranges."""
        return self.batch == 1 and self.blocks is not None and self.blocks.has_ranges

    @property
    def has_band(self) -> bool:
        """Whether partial blocks are masked by a band."""
        has_lists = self.blocks is not None and not self.blocks.has_ranges
        return has_lists and self.mods.mask_band is not None

    @property
    def has_spans(self) -> bool:
        """Whether two numbers per query determine its keys, so mask_mod is not needed."""
        return self.has_band or (self.blocks is not None and self.blocks.has_spans)

    @property
    def has_captured_grads(self) -> bool:
        """Whether captured tensors need gradients."""
        return bool(self.grad.captured_reads)

    @property
    def sums_exactly(self) -> bool:
        """Whether gradients of captured tensors are summed exactly, see
        lowering/emission/exact_sums.py."""
        return self.is_deterministic and self.has_captured_grads and self.grad.adds_captured

    @property
    def itemsize(self) -> int:
        """Bytes per element of query, key and value."""
        return self.dtype.itemsize


def read_device(device: torch.device) -> Device:
    """Facts of the GPU that the graph is compiled for."""
    properties: Any = torch.cuda.get_device_properties(device)
    return Device(
        capability=(properties.major, properties.minor),
        shared_memory=properties.shared_memory_per_block_optin,
        multiprocessors=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        name=properties.name,
    )


def float32_precision(chosen: str | None) -> str:
    """Precision of products of float32 operands: "ieee" or "tf32".

    Args:
        chosen: the user's option; None follows torch's setting.
    """
    if chosen is not None:
        return chosen
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def round_head_dim(size: int) -> int:
    """Width of a tile that holds `size` columns: a power of two that tensor cores support."""
    return max(16, 1 << (size - 1).bit_length())


class Pieces(NamedTuple):
    """Widths of the tiles that hold a head together: the first columns, and the rest or 0."""

    first: int
    rest: int


def head_pieces(size: int) -> Pieces:
    """The pieces of a head: 576 columns are 512 and 64, and 100 are 128, as 64 and 64 would be."""
    first = max(16, 1 << (size.bit_length() - 1))
    if size <= first:
        return Pieces(first, 0)
    rest = round_head_dim(size - first)
    return Pieces(first, rest) if rest < first else Pieces(2 * first, 0)
