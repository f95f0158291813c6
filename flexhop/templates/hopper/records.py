"""The named tuples that functions of the Hopper kernels pass to each other.

In a kernel, Triton treats a NamedTuple as a tuple with field names (the same in 3.6 to 3.9). A
field must not be called `type` or `values`, which are attributes of Triton's own tuples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = [
    "BackwardBarriers",
    "BackwardBlocks",
    "BackwardLists",
    "BackwardMemory",
    "BackwardResults",
    "BackwardSources",
    "BackwardWalk",
    "ForwardBarriers",
    "ForwardBlocks",
    "ForwardLists",
    "ForwardMemory",
    "ForwardPlace",
    "ForwardResults",
    "ForwardSources",
    "ForwardWalk",
    "LatentBarriers",
    "LatentMemory",
    "LatentResults",
    "LatentShare",
    "LatentSources",
    "Order",
]


class ForwardSources(NamedTuple):
    """Tensor descriptors that the producer reads, one or two of each, as there are memories.

    pairs: of a bias of pairs, if it is copied.
    """

    q: Any
    k: Any
    v: Any
    pairs: Any


class ForwardMemory(NamedTuple):
    """Shared memory.

    q, k, v: tuples of one memory, or of two, of which the second has the columns from 128 on.
    tile: the numbers of the tiles that are handed out. places: of a tile of gathered keys, their
    positions and tags, by turns for each slot. pairs: a memory for each consumer, and for a
    consumer its own.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    tile: Any
    places: Any
    pairs: Any


class ForwardBarriers(NamedTuple):
    """What is there to be read, and what has been read and may be overwritten.

    ready, free: the first NUM_SLOTS are for keys, the others for values.
    """

    q_ready: Any
    q_free: Any
    ready: Any
    free: Any
    tile_ready: Any
    tile_free: Any


class ForwardResults(NamedTuple):
    """Destinations of the consumers' stores. tensor: the descriptor of out."""

    tensor: Any
    out: Any
    lse: Any
    max_scores: Any


class ForwardLists(NamedTuple):
    """Pointers to the block lists of the mask, and to its stored bits."""

    counts: Any
    partial: Any
    full_counts: Any
    full: Any
    bits: Any


class ForwardBlocks(NamedTuple):
    """Blocks of keys that a tile of queries sees: entries of both lists, and their counts.

    begins: if a tile has several rows of blocks, the position of each row's first partial block,
    then of its first full one; the entries are those of the first row.
    """

    partial: Any
    full: Any
    num_partial: Any
    num_blocks: Any
    begins: Any


class ForwardPlace(NamedTuple):
    """A tile of queries, its blocks, and the first keys of its first two tiles of keys."""

    q_tile: Any
    b: Any
    h: Any
    blocks: Any
    start: Any
    following: Any


class ForwardWalk(NamedTuple):
    """Values that are constant over all steps of a tile.

    mask: from open_mask. slope: from open_slope. q_start: the consumer's first query.
    """

    blocks: Any
    mask: Any
    slope: Any
    q_start: Any


class LatentSources(NamedTuple):
    """Tensor descriptors that the producer reads: of a half of the columns of keys, of the rest
    behind both halves, and of a half of the columns of values."""

    half: Any
    rest: Any
    v: Any


class LatentMemory(NamedTuple):
    """Shared memory. left, right, rest: columns of queries and keys. p: the weights of a tile.

    factors: of rows: what the sums before a tile count after it; at the end, the sums of weights.
    """

    q_left: Any
    q_right: Any
    q_rest: Any
    k_left: Any
    k_right: Any
    k_rest: Any
    p: Any
    factors: Any


class LatentBarriers(NamedTuple):
    """What is there to be read, and what has been read and may be overwritten.

    left_ready, right_ready, left_free, right_free: of the slots of keys; the rest goes with the
    left half. values_ready: of slots whose keys are replaced by values. scored: scores of a tile,
    which leave its keys to be values. p_ready, p_free: of p and factors.
    """

    q_ready: Any
    left_ready: Any
    right_ready: Any
    left_free: Any
    right_free: Any
    values_ready: Any
    scored: Any
    p_ready: Any
    p_free: Any


class LatentResults(NamedTuple):
    """Destinations of the consumers' stores. sums, shifts: SUMS and SHIFTS."""

    out: Any
    sums: Any
    shifts: Any


class LatentShare(NamedTuple):
    """The rows of a program, and the tiles of keys that are its share.

    b, first_h, split: batch, first query head, number of the share. q_block, first_row, queries:
    block of the mask's queries, the first row of its rows, and how many of its queries there are.
    partial, full, num_partial, num_blocks: as in ForwardBlocks. start, masked_end, end: tiles of
    the share, and where those end that need the mask. limit: end of the keys; 0 if the share is
    empty. apart: whether values are not the first columns of keys.
    """

    b: Any
    first_h: Any
    split: Any
    q_block: Any
    first_row: Any
    queries: Any
    partial: Any
    full: Any
    num_partial: Any
    num_blocks: Any
    start: Any
    masked_end: Any
    end: Any
    limit: Any
    apart: Any


class BackwardSources(NamedTuple):
    """Tensor descriptors that the producer reads. rest: what fp32 leaves of lse."""

    q: Any
    do: Any
    lse: Any
    rest: Any
    delta: Any
    k: Any
    v: Any


class BackwardMemory(NamedTuple):
    """Shared memory. tile: the numbers of the tiles that are handed out."""

    q: Any
    do: Any
    lse: Any
    rest: Any
    delta: Any
    k: Any
    v: Any
    ds: Any
    dq: Any
    tile: Any


class BackwardBarriers(NamedTuple):
    """What is there to be read, and what has been read and may be overwritten.

    ready, free: for queries, then one for output gradients that have their own slots. sums_ready,
    sums_free: for dq, for the warps that add it to memory. query_ready, query_free: for the sums
    of a head's queries in memory, if a program owns heads.
    """

    kv_ready: Any
    kv_free: Any
    ready: Any
    free: Any
    tile_ready: Any
    tile_free: Any
    sums_ready: Any
    sums_free: Any
    query_ready: Any
    query_free: Any


class BackwardResults(NamedTuple):
    """Tensor descriptors of the gradients; dq: of the sums of queries.

    sums, query: if a program owns heads, pointers to these sums, and to the gradient of query.
    """

    dq: Any
    dk: Any
    dv: Any
    sums: Any
    query: Any


class BackwardLists(NamedTuple):
    """Pointers to the block lists, to the order of additions, and to the mask's stored bits."""

    counts: Any
    partial: Any
    full_counts: Any
    full: Any
    order: Any
    bits: Any


class BackwardBlocks(NamedTuple):
    """Blocks of queries that see a tile of keys: entries of both lists, and their counts.

    leading: number of partial blocks before the full ones.
    """

    partial: Any
    full: Any
    num_partial: Any
    num_blocks: Any
    leading: Any


class BackwardWalk(NamedTuple):
    """Values that are constant over all steps of a tile and a head. mask: from open_mask."""

    blocks: Any
    mask: Any


class Order(NamedTuple):
    """How many tiles of keys add to each block of queries before this one; see open_turns."""

    numbers: Any
    rank: Any
