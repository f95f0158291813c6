"""Short queries: when the decode kernel serves them, and into how many shares it divides the keys.

Pure functions of Problem. The kernel's rows are the queries of all query heads that share a key
head, so that keys are read once for the group; the shares fill the multiprocessors.
"""

from __future__ import annotations

from flexhop.lowering.problem import Problem
from flexhop.options import KernelOptions, Tile

# Rows that one program can hold at common head sizes; beyond, products cost more than reads.
MAX_ROWS = 128
# A query this short is one tensor-core tile high even without a group.
_ALWAYS_SHORT = 16
# Keys per query from which the reads outweigh the rest.
_KEYS_PER_QUERY = 4
# Programs that each multiprocessor runs at most, one after the other or side by side.
_PROGRAMS_EACH = 4
# Shares are added until this part of the best use of the device is reached.
_GOOD_ENOUGH = 0.9


def packed_heads(problem: Problem) -> int:
    """Query heads of one program: the group, unless every head has its own list of blocks."""
    own_lists = problem.blocks is not None and problem.blocks.per_head
    return 1 if own_lists else problem.group


def rows(problem: Problem) -> int:
    """Rows that walk over one list of blocks together."""
    queries = problem.query_len
    if problem.blocks is not None:
        queries = min(queries, problem.blocks.q_size)
    return queries * packed_heads(problem)


def is_short(query_len: int, group: int) -> bool:
    """Whether a group's queries are few enough for the decode kernel."""
    return query_len * group <= MAX_ROWS


def suits(problem: Problem) -> bool:
    """Whether the decode kernel is the better choice: few rows, and many keys for each."""
    if not is_short(problem.query_len, problem.group):
        return False
    few = problem.query_len <= _ALWAYS_SHORT
    return few or problem.key_len >= _KEYS_PER_QUERY * problem.query_len


def row_tiles(problem: Problem, block_m: int) -> int:
    """Tiles of rows of one batch and packed head."""
    blocks = 1
    if problem.blocks is not None:
        blocks = -(-problem.query_len // problem.blocks.q_size)
    return -(-rows(problem) // block_m) * blocks


def choose_splits(problem: Problem, options: KernelOptions, tile: Tile) -> int:
    """Shares of the keys; a constant of the kernel, whatever the tiles of a search.

    The lists of a mask are on the device, so the shares are of what turns out to be live. Where
    the number of keys varies from call to call, there are as many as the device takes.
    """
    if options.splits is not None:
        return options.splits
    heads = problem.batch * problem.query_heads // packed_heads(problem)
    programs = max(1, heads * row_tiles(problem, tile.block_m))
    processors = problem.device.multiprocessors
    most = max(1, _PROGRAMS_EACH * processors // programs)
    if not problem.key_len_varies:
        most = min(most, -(-problem.key_len // tile.block_n))
    best = max(_use(programs * n, processors) for n in range(1, most + 1))
    good = (n for n in range(1, most + 1) if _use(programs * n, processors) >= _GOOD_ENOUGH * best)
    return next(good)


def _use(programs: int, processors: int) -> float:
    """Part of the multiprocessors that have work, averaged over rounds of programs."""
    return programs / (-(-programs // processors) * processors)
