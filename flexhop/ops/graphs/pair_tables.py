"""Parts of a score_mod that see both positions, as tables with an entry for each pair.

A bias by bins of a distance in space, by the types of two tokens, or by the rows and columns of an
image is the same in all batches, and often in all heads. If many scores share each pair, plain
operators compute the part once for all of them, and kernels read it like a captured bias of pairs.
Its gradient has an entry for each pair, too, so that scores add to neighbouring entries; a small
captured tensor would have to take one addition after the other.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

from flexhop.analysis import is_float
from flexhop.ops.graphs.beyond import numbers_in
from flexhop.ops.graphs.table_choice import LEAST_SAVED_BY_FACTOR, Choice, reached_beside
from flexhop.ops.graphs.table_entries import Table, has_plain_reads, is_subtracted

# Scores that read one entry, at least: a training step of a table makes it and sums its gradient.
_LEAST_REUSE = 8
_MOST_NUMBERS = 16  # of which an entry is computed, in tables as large as the operands
_FEWEST_QUERIES = 32  # of short queries, the time is that of reading the keys
# Instructions for each score, from times of biases of pairs on an H200 (docs/lab/unusual.md): to
# read an entry, to add to it, and to add to one that the scores of a tile share in no order.
_READ, _SUM, _SCATTERED = 20.0, 70.0, 250.0
_LEAST_SAVED = 6.0


def choose_pairs(choice: Choice) -> None:
    """Replace chosen tables, and what is left for each score, by tables of pairs that pay off."""
    wanted = choice.wanted
    if wanted.only_rows or wanted.only_needed or choice.queries < _FEWEST_QUERIES:
        return
    by_node = {table.node: table for table in choice.tables}
    ordered = {node for node, table in by_node.items() if not _is_scattered(choice, table)}
    following, seen, pairs = [choice.found.mod.result], set[fx.Node](), dict[fx.Node, Table]()
    while following:
        node = following.pop()
        if node in seen or node in ordered or node.op != "call_function":
            continue
        seen.add(node)
        table = _table_of(choice, node)
        saved = 0.0 if table is None else _saved(choice, table, is_table=node in by_node)
        if table is None or saved < _least(choice, node):
            following += [] if node in by_node else reversed(node.all_input_nodes)
            continue
        pairs[node] = table
        choice.saved_by[node] = saved
    if pairs:
        # Tables of pairs compute what they contain by themselves.
        used = {*reached_beside(choice.found.mod.result, by_node | pairs)}
        kept = [t for t in choice.tables if t.node in used - pairs.keys()]
        choice.tables = [*kept, *pairs.values()]


def _is_scattered(choice: Choice, table: Table) -> bool:
    """Whether scores add to a table's entries in no order: by several sums of both positions."""
    axes = [axis for axis in table.axes if not isinstance(axis, str)]
    return len(axes) > 1 and table.node in choice.trained


def _table_of(choice: Choice, node: fx.Node) -> Table | None:
    """The table of a number of both positions, if it may have one."""
    seen, example = choice.found.forms.seen(node), node.meta.get("val")
    if not isinstance(example, Tensor) or example.dim() or not is_float(node):
        return None
    depends = choice.found.forms.depends_on(node)
    if not depends >= {"q", "k"} or not seen.others <= {"b", "h"} or not has_plain_reads(node):
        return None
    is_trained = node in choice.trained
    if choice.may_spoil(node) or (is_trained and choice.wanted.sums_exactly):
        return None
    others = [name for name in ("b", "h") if name in depends]
    is_negative = node is not choice.found.mod.result and is_subtracted(node)
    table = Table(node, (*others, "q", "k"), is_negative=is_negative)
    entries = choice.entries(table)
    is_shared = entries * _LEAST_REUSE <= choice.scores
    # Inductor sums short rows of numbers without storing them; what it stored would not be small.
    is_small = entries * numbers_in(node) <= _MOST_NUMBERS * choice.wanted.most
    return table if is_shared and entries <= choice.wanted.most and is_small else None


def _least(choice: Choice, node: fx.Node) -> float:
    """Instructions for each score that a table of a node has to save."""
    is_read_again = choice.wanted.is_differentiated and choice.is_factor(node)
    return LEAST_SAVED_BY_FACTOR if is_read_again else _LEAST_SAVED


def _saved(choice: Choice, table: Table, *, is_table: bool) -> float:
    """Instructions for each score and kernel that the table saves.

    is_table: whether it replaces a table to whose entries scores add in no order.
    """
    node, passes = table.node, choice.wanted.kernels.passes
    written = passes * choice.cost(choice.tables, node)
    tabulated = passes * _READ
    if is_table:
        written += _SCATTERED
        tabulated += _SUM
    elif node in choice.trained:
        written += choice.training.derivative(node, _sum_of(choice))
        tabulated += _SUM
    made = written * choice.entries(table) / choice.scores
    return (written - tabulated - made) / passes


def _sum_of(choice: Choice) -> Callable[[fx.Node], float]:
    """Instructions of a sum of gradients, by the node that reads a captured tensor."""
    forms = choice.found.forms

    def cost(read: fx.Node) -> float:
        if not forms.depends_on(read) >= {"q", "k"}:
            return 0.0
        coordinates = forms.seen(read).coordinates
        if len(coordinates) == 1:  # such as a distance
            return choice.wanted.kernels.summed
        indices = read.args[1]
        assert isinstance(indices, (list, tuple))
        own = [forms.form(index) for index in indices if isinstance(index, fx.Node)]
        linear = {atom for form in own if form is not None for atom in form.terms}
        of_pair = {choice.found.mod.inputs[name] for name in "qk"}
        return _SUM if of_pair <= linear else _SCATTERED

    return cost
