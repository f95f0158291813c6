"""Search a mod for the parts that pay off as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from flexhop.analysis import (
    Analysis,
    Coordinate,
    carries_gradients,
    dependents,
    instructions_in_mask,
    name_of,
    passes_gradients,
    paths_below,
    reached,
)
from flexhop.ops.args import Capture
from flexhop.ops.graphs.beyond import is_beyond_kernels, numbers_in
from flexhop.ops.graphs.own_positions import packed_distance
from flexhop.ops.graphs.subgraphs import may_derive
from flexhop.ops.graphs.table_costs import LEAST_SAVED_TRAINED, Kernels, Training
from flexhop.ops.graphs.table_entries import (
    Extents,
    Sizes,
    Table,
    has_plain_reads,
    is_needed,
    is_search,
    is_subtracted,
    takes_many_reads,
)

LARGEST = 2**26  # most entries of a table
_SCORES_PER_ENTRY = 8  # fewest; below this a table saves nothing
_READ, _SUM = 3.0, 2.0  # instructions of a read, and of the sum for its index
_READ_IN_MASK = 6.0  # in a mask_mod that a kernel evaluates
_MOST_PATHS = 1000  # Inductor computes a value again for each use; it would not end
_LEAST_SAVED = 2.0  # instructions per score
# The same for a factor of the score. Gradients read that table again, for which backward kernels
# lack registers: 1.95 ms for `score * exp(-(q - k).abs() / 64)`, 1.31 without a table.
LEAST_SAVED_BY_FACTOR = 16.0
# A derivative with respect to the score does not read what these operators add or choose.
_ADDING = frozenset({"add", "sub", "rsub", "where"})
# Entries that no score reads may have infinite derivatives, or none, if these compute them. They
# would pass that on to a captured tensor that needs a gradient, although their own gradient is 0.
_UNBOUNDED = frozenset({
    "acos", "acosh", "asin", "atanh", "cosh", "digamma", "div", "erfinv", "exp", "exp2", "expm1",
    "fmod", "lgamma", "log", "log10", "log1p", "log2", "logaddexp", "logit", "pow", "reciprocal",
    "rsqrt", "sinh", "sqrt", "tan",
})  # fmt: skip


class Wanted(NamedTuple):
    """Which tables to look for.

    inputs: of the mod. kernels: of the call. most: entries of a table. is_differentiated: whether
    scores have a gradient. sums_exactly: whether gradients must be the same in every run.
    only_rows: of parts that compute with short rows of numbers, and depend on one position; and if
    heads do not share the mod, of parts that depend on a distance. only_needed: of parts that no
    kernel computes. is_pushed: see `trace_score`.
    """

    inputs: tuple[str, ...]
    kernels: Kernels
    most: int
    is_differentiated: bool = False
    sums_exactly: bool = False
    only_rows: bool = False
    only_needed: bool = False
    is_pushed: bool = False


class Choice:
    """Search from the result down for the largest parts that pay off as tables."""

    def __init__(
        self, found: Analysis, captures: Sequence[Capture], sizes: Sizes, wanted: Wanted
    ) -> None:
        self.found, self.scores = found, math.prod(sizes.now.values())
        self._now, self.queries = sizes.now, sizes.now["q"]
        self.wanted = wanted
        self.tables: list[Table] = []
        self.saved_by = dict[fx.Node, float]()
        self._looked_at: set[fx.Node] = set()
        self._extents = tuple(Extents(found, of) for of in (sizes.now, sizes.longer()))
        needs = may_derive(captures)
        trained = {n for n, need in zip(found.mod.captures, needs, strict=True) if need}
        self.trained = trained | dependents(trained, passes_gradients)
        heads, kernels = found.forms.seen(found.mod.result).others, wanted.kernels
        self._is_asked_by_head = "h" in heads and kernels.reads_in_masks
        self.training = Training(found, self.trained, wanted.kernels)

    @property
    def saved(self) -> float:
        """Instructions per score that the tables save; rows that no kernel computes save none."""
        return sum(self.saved_by.get(table.node, 0.0) for table in self.tables)

    @property
    def firsts(self) -> dict[Coordinate, int | None]:
        """The first value of each coordinate of the tables; None if calls differ in it."""
        firsts: dict[Coordinate, int | None] = {}
        for axis in (axis for table in self.tables for axis in table.axes):
            if isinstance(axis, Coordinate):
                values = {extent[0] for extent in self._both(axis)}
                firsts[axis] = values.pop() if len(values) == 1 else None
        return firsts

    def _both(self, axis: Any) -> list[tuple[int, int]]:
        """An axis in this call, and in a longer one; nothing if it is not known."""
        found = (extents.of(axis) for extents in self._extents)
        return [extent for extent in found if extent is not None]

    def entries(self, table: Table) -> float:
        """How many entries a table has; infinite if it is not known, or grows too fast."""
        both = [self._both(axis) for axis in table.axes]
        if not all(both):
            return math.inf
        growing = [axis for axis, (now, then) in zip(table.axes, both, strict=True) if now != then]
        if sum(axis not in ("b", "h") for axis in growing) > 1:
            return math.inf  # as the scores do
        return math.prod(now[1] for now, _ in both)

    def look_at(self, node: Any) -> None:
        """Choose a node, or parts of it."""
        following = [node]
        while following:
            node = following.pop()
            if not isinstance(node, fx.Node) or node.op != "call_function":
                continue
            if node not in self._looked_at:
                is_left = self._is_left(node)
                following += reversed(node.all_input_nodes if is_left else self._places(node))
            self._looked_at.add(node)

    def _places(self, node: fx.Node) -> list[fx.Node]:
        """What says where a chosen node is read, of a query or a key: it may be a table, too."""
        chosen = self.tables[-1:] if self.tables and self.tables[-1].node is node else []
        axes = (axis for table in chosen for axis in table.axes if isinstance(axis, Coordinate))
        return [atom for axis in axes for atom, _ in axis.terms]

    def _is_left(self, node: fx.Node) -> bool:
        """Choose a node, or leave the choice to its parts."""
        rows = self._rows_of(node)
        if rows is not None:
            self.tables.append(rows)
            return False
        table = self._table_of(node)
        if table is None:
            return True
        has_many = takes_many_reads(table, self._is_of_inputs) and not self.wanted.only_needed
        needed = self._needs(table) or has_many
        if not needed and paths_below(node) > _MOST_PATHS:
            return False
        saved, least = self._saved(table)
        if not needed and (saved < least or self.wanted.only_needed):
            return True
        is_result = node is self.found.mod.result
        is_negative = not is_result and is_subtracted(node)
        self.tables.append(table._replace(is_negative=is_negative))
        self.saved_by[node] = saved
        return False

    def _needs(self, table: Table) -> bool:
        """Whether a kernel cannot compute a table, or a part that is no smaller table itself."""
        is_of_one = not any(isinstance(axis, Coordinate) for axis in table.axes)
        parts = _parts_beyond(table.node)
        return is_needed(table) or any(is_of_one or self._rows_of(part) is None for part in parts)

    def _is_the_only(self, node: fx.Node) -> bool:
        """Whether no kernel computes a part of a node, and no row of it is a table itself."""
        rows = (n for n in _parts_beyond(node) if isinstance(n.meta.get("val"), Tensor))
        return any(self._rows_of(row) is None for row in rows)

    def _saved(self, table: Table) -> tuple[float, float]:
        """Instructions per score that a table saves, and how many it has to save."""
        node = table.node
        value, read = self.cost([], node), self.cost([table], node)
        if self.wanted.only_rows and not is_search(node):
            return value - read, 0.0  # masks take more than the sum of their operators
        is_factor = self.wanted.is_differentiated and self.is_factor(node)
        if node in self.trained and any(isinstance(axis, Coordinate) for axis in table.axes):
            return self.training.saved(
                table, value, read, is_factor=is_factor
            ), LEAST_SAVED_TRAINED
        is_costly = is_factor and node not in self.trained
        return value - read, LEAST_SAVED_BY_FACTOR if is_costly else _LEAST_SAVED

    def is_factor(self, node: fx.Node) -> bool:
        """Whether the derivative with respect to the score depends on a node."""

        def is_apart(user: fx.Node) -> bool:
            is_operator = user.op == "call_function"
            return is_operator and "score" not in self.found.forms.seen(user).others

        parts = {node} | dependents([node], is_apart)
        users = {user for part in parts for user in part.users} - parts
        return any(user.op == "call_function" and name_of(user) not in _ADDING for user in users)

    def _table_of(self, node: fx.Node) -> Table | None:
        """The table of a node, if it can be one; parts of it may be short rows of numbers."""
        seen, example = self.found.forms.seen(node), node.meta.get("val")
        positions = [c for c in seen.coordinates if isinstance(c, str)]
        if not isinstance(example, Tensor) or example.dim() or example.is_complex():
            return None
        if not seen.coordinates or "score" in seen.others or not has_plain_reads(node):
            return None
        if positions and len(seen.coordinates) > 1:
            return None
        is_wanted = (positions and is_search(node)) or (not positions and self._is_asked_by_head)
        if self.wanted.only_rows and not is_wanted:
            return None
        others = [name for name in ("b", "h") if name in seen.others]
        coordinates = sorted(seen.coordinates, key=lambda c: str(getattr(c, "terms", c)))
        table = Table(node, (*others, *coordinates), self.may_spoil(node))
        if table.may_spoil and positions:
            return None
        numbers = self.entries(table) * numbers_in(node)
        most = min(self.wanted.most, self.scores // _SCORES_PER_ENTRY)
        if len(coordinates) > 1:
            # Neighbouring keys then read entries that lie far apart, unless the table is small.
            most = min(most, self._entries_of_pairs(others))
        if numbers > most and self._is_the_only(node):
            most = LARGEST
        return table if numbers <= most else None

    def _entries_of_pairs(self, others: Sequence[str]) -> int:
        """Entries of a table by query and key instead."""
        return math.prod(self._now[name] for name in (*others, "q", "k"))

    def _rows_of(self, node: fx.Node) -> Table | None:
        """The table of a row that no kernel computes: of all batches, heads, or positions."""
        seen, example = self.found.forms.seen(node), node.meta.get("val")
        is_real = isinstance(example, Tensor) and not example.is_complex()  # as kernels read it
        if not is_real or not is_beyond_kernels(node):
            return None
        positions = sorted(c for c in seen.coordinates if isinstance(c, str))
        others = [name for name in ("b", "h") if name in seen.others]
        is_of_one = len(positions) == len(seen.coordinates) <= 1 and seen.others <= {"b", "h"}
        if not is_of_one or not (positions or others) or not has_plain_reads(node):
            return None
        table = Table(node, (*others, *positions), self.may_spoil(node))
        is_small = self.entries(table) * numbers_in(node) <= LARGEST
        return table if is_small and not (table.may_spoil and positions) else None

    def may_spoil(self, node: fx.Node) -> bool:
        """Whether unread entries could spoil the gradient of a captured tensor."""
        if node not in self.trained:
            return False
        floats = reached(node, lambda current: filter(carries_gradients, current.all_input_nodes))
        return any(name_of(current) in _UNBOUNDED for current in floats)

    def cost(self, tables: Sequence[Table], root: fx.Node) -> float:
        """Instructions per score of a node and of nodes that only it needs, given the tables."""
        made = {table.node: table for table in tables}
        is_asked = self.wanted.only_rows and not is_search(root)
        read = _READ_IN_MASK if is_asked else _READ
        of = instructions_in_mask if is_asked else self.found.instructions_of

        def instructions(node: fx.Node) -> float:
            return read if node in made else of(node)

        seen = reached_beside(root, made, self._is_of_inputs)
        axes = (axis for node in seen if node in made for axis in made[node].axes)
        sums = sum(_SUM for axis in axes if isinstance(axis, Coordinate))
        return self.found.instructions(seen, instructions) + sums

    def _is_of_inputs(self, node: fx.Node) -> bool:
        """Whether kernels compute a node from q_idx and kv_idx, whatever its operands are."""
        return packed_distance(self.found, node) is not None


def reached_beside(
    root: fx.Node,
    tables: Mapping[fx.Node, Table],
    ends: Callable[[fx.Node], bool] = lambda node: False,
) -> Collection[fx.Node]:
    """The nodes that a node needs, if tables, by node, stand for theirs.

    ends: whether the operands of a node are not followed.
    """

    def sources(node: fx.Node) -> list[fx.Node]:
        if ends(node):
            return []
        if node not in tables:
            return node.all_input_nodes
        places = (axis for axis in tables[node].axes if isinstance(axis, Coordinate))
        return [atom for axis in places for atom, _ in axis.terms]

    return reached(root, sources)


def _parts_beyond(node: fx.Node) -> list[fx.Node]:
    """What a node needs and no kernel computes."""
    return [part for part in reached(node) if is_beyond_kernels(part)]
