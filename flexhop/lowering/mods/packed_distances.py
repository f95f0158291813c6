"""Distances in packed sequences, computed without reading tables.

Local positions of packed queries and keys come from tables. If both sides have the same offsets,
the key's position is the query's plus kv_idx - q_idx, clamped to the sequence by `bounded`, which
promises that scores outside it are not used. So the difference of the two is kv_idx - q_idx, and
comparing them compares kv_idx with q_idx.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from flexhop.analysis import Analysis, Form, Writer, analyse, copied
from flexhop.compat.kernels import inductor
from flexhop.mods.bounded import BOUNDED
from flexhop.ops.graphs.own_positions import packed_distance

aten = torch.ops.aten


def lower_bounded(position: Any, last: Any, equals: Any) -> Any:
    """Lower a call of `bounded` outside our kernels."""
    raised = inductor.call_lowering(aten.clamp_min.default, position, 0)
    return inductor.call_lowering(aten.minimum.default, raised, last)


def without_bounded(owner: fx.GraphModule, inputs: tuple[str, ...]) -> fx.GraphModule:
    """The same function without calls of `bounded`: distances need no table.

    inputs: names of its first inputs, as in `analyse`.
    """
    bounded = set(owner.graph.find_nodes(op="call_function", target=BOUNDED))
    if not bounded:
        return owner
    found = analyse(owner, inputs, held=(BOUNDED,))
    module, copies = copied(owner)
    writer = Writer(found, copies)
    for node in owner.graph.nodes:
        if (distance := packed_distance(found, node)) is not None:
            _measure(writer, found, copies[node], distance)
        if node in bounded:
            position, last = copies[node].args[:2]
            raised = writer.call(copies[node], aten.clamp_min.default, position, 0)
            held = writer.call(copies[node], aten.minimum.default, raised, last)
            writer.replace(copies[node], held)
    module.graph.eliminate_dead_code()
    return module


def _measure(writer: Writer, found: Analysis, copy: fx.Node, distance: tuple[int, int]) -> None:
    """Compute a difference or comparison of positions from kv_idx and q_idx."""
    first, second = (found.mod.inputs[name] for name in ("qk" if distance[0] > 0 else "kq"))
    sides = writer.write(copy, Form({first: 1}, distance[1])), writer.copies[second]
    writer.replace(copy, writer.call(copy, copy.target, *sides))
