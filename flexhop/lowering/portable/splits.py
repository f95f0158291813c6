"""Short queries: when to use the decode kernel, and into how many splits to divide the keys.

Pure functions of Problem. The kernel's rows are the queries of all query heads that share a key
head, so keys are read once per group. The splits fill the multiprocessors.
"""

from __future__ import annotations

from flexhop.lowering.problem import Problem
from flexhop.options import KernelOptions, Tile

# Rows that one program can hold at common head sizes; above this, products cost more than reads.
MAX_ROWS = 128
# A query this short is one tensor core tile high even without a group.
_ALWAYS_SHORT = 16
# Keys per query from which reads dominate.
_KEYS_PER_QUERY = 4
# Warps whose loads saturate a multiprocessor's share of the memory bandwidth.
_WARPS_EACH = 8
# Rounds of programs to divide the work into, so that it balances.
_ROUNDS = 4
# Tiles per split in a call with many keys.
_MANY_TILES = 64
# Heads whose lists are merged: each has two bits of 32.
_MOST_MERGED = 16
# Bytes of keys and values from which the kernel that merges lists, some microseconds, pays off.
_LEAST_MERGED = 32 << 20
# Take the fewest splits that cost at most this much more time than the best number.
_TOLERANCE = 1.05


def merges_lists(problem: Problem) -> bool:
    """Whether heads with lists of blocks of their own iterate over all blocks of their group.

    Otherwise each reads the keys for itself. If the number of keys is dynamic, later calls may
    have many.
    """
    blocks = problem.blocks
    if blocks is None or not blocks.per_head or problem.is_wide:
        return False
    size = problem.itemsize if problem.cache is None else problem.cache.key_dtype.itemsize
    width = (problem.head_dim + problem.value_head_dim) * size
    read = problem.batch * problem.kv_heads * problem.key_len * width
    is_many = problem.key_len_varies or read >= _LEAST_MERGED
    return is_many and 1 < problem.group <= _MOST_MERGED


def packed_heads(problem: Problem) -> int:
    """Query heads per program: the group, unless each iterates over a list of its own."""
    own_lists = problem.blocks is not None and problem.blocks.per_head
    return 1 if own_lists and not merges_lists(problem) else problem.group


def rows(problem: Problem) -> int:
    """Rows that iterate over one list of blocks together."""
    queries = problem.query_len
    if problem.blocks is not None:
        queries = min(queries, problem.blocks.q_size)
    return queries * packed_heads(problem)


def is_short(query_len: int, group: int) -> bool:
    """Whether a group has few enough queries for the decode kernel."""
    return query_len * group <= MAX_ROWS


def suits(problem: Problem) -> bool:
    """Whether the decode kernel is the better choice: few rows, and many keys per row."""
    if not is_short(problem.query_len, problem.group):
        return False
    few = problem.query_len <= _ALWAYS_SHORT
    return few or problem.key_len >= _KEYS_PER_QUERY * problem.query_len


def row_tiles(problem: Problem, block_m: int) -> int:
    """Tiles of rows per batch and packed head."""
    queries = MAX_ROWS if problem.blocks is None else problem.blocks.q_size
    blocks = -(-problem.query_len // queries)
    return -(-min(rows(problem), queries * packed_heads(problem)) // block_m) * blocks


def choose_splits(problem: Problem, options: KernelOptions, tile: Tile) -> int:
    """Number of splits of the keys; a constant of the kernel, whatever tiles a search tries.

    A mask's lists are on the device, so the kernel splits the keys that turn out to be live. If
    the number of keys is dynamic, there are as many splits as many keys would need.
    """
    if options.splits is not None:
        return options.splits
    heads = problem.batch * problem.query_heads // packed_heads(problem)
    programs = max(1, heads * row_tiles(problem, tile.block_m))
    side_by_side = max(1, _WARPS_EACH // tile.num_warps) * problem.device.multiprocessors
    tiles = -(-problem.key_len // tile.block_n)
    most = max(1, _ROUNDS * side_by_side // programs)
    if not problem.key_len_varies:
        most = min(most, tiles)
    else:
        # Later calls may have more keys, and the number of splits is part of the kernel.
        tiles = max(tiles, _MANY_TILES * most)
    # Time in tiles: rounds of programs, and the tiles of the longest split.
    times = [-(-programs * n // side_by_side) * -(-tiles // n) for n in range(1, most + 1)]
    return 1 + next(i for i, time in enumerate(times) if time <= _TOLERANCE * min(times))
