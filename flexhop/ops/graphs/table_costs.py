"""What kernels save if they read a table of a trained part of a score_mod.

A trained part costs its value in every kernel that computes scores, then its derivative, and a sum
for each tensor that it reads. A table costs a read in every kernel, and one sum. The numbers are
fitted to instructions of compiled steps (docs/lab/unusual.md, "Trained functions of a distance").
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import fx

from flexhop.analysis import Analysis, Coordinate, elements_of, instructions_of, reached
from flexhop.compat.modes import capability_of
from flexhop.ops.args import AttentionArgs, CachedArgs
from flexhop.ops.graphs.table_entries import Table

LEAST_SAVED_TRAINED = 1.5  # instructions per score and kernel
_LEAF = 2.0  # instructions of a sum for one number, whatever the positions
_FUNCTION = 3.0  # operators of more instructions have a derivative of two


class Kernels(NamedTuple):
    """The kernels of a call, by instructions per score.

    Args:
        passes: kernels that compute scores, the forward kernel included.
        read: more than `cost.py` says of a read, at an index of both positions.
        summed: a sum of gradients by such an index, more than that of a tensor by head.
        factor: more of a table by such an index that the score is multiplied with.
        reads_in_masks: whether a mask that heads do not share is asked fastest as a table.
    """

    passes: int
    read: float
    summed: float
    factor: float
    reads_in_masks: bool


# On sm_90, one kernel computes all gradients. Between 65 and 128 columns, it lacks registers for
# factors.
_JOINED, _JOINED_AT_128 = Kernels(2, 0.0, 0.0, 1.0, True), Kernels(2, 0.0, 0.0, 10.0, True)
_APART = Kernels(3, 4.0, 28.0, 8.0, False)  # these add up to 55 for a table by distance


def kernels_of(args: AttentionArgs | CachedArgs) -> Kernels:
    """The kernels that probably serve a call."""
    capability = capability_of(args.query.device)
    width = max(args.query.size(-1), args.value.size(-1))
    is_plain = args.query.dtype.itemsize == 2 and width <= 256
    is_open = args.options.get("backend", "auto") != "triton"
    if capability is not None and not (capability[0] == 9 and is_plain and is_open):
        return _APART
    return _JOINED_AT_128 if 64 < width <= 128 else _JOINED


class Training:
    """The costs of trained parts.

    Args:
        found: of the mod.
        trained: its nodes that gradients of captured tensors pass through.
        kernels: of the call.
    """

    def __init__(self, found: Analysis, trained: Collection[fx.Node], kernels: Kernels) -> None:
        self._found, self._trained, self._kernels = found, trained, kernels

    def saved(self, table: Table, value: float, read: float, *, is_factor: bool) -> float:
        """Instructions per score and kernel that a table of a trained node saves.

        Args:
            table: of the node, by a distance or another coordinate of both positions.
            value: instructions of the node.
            read: instructions of reading it.
            is_factor: whether the derivative with respect to the score depends on it.
        """
        passes, extra, summed, factor, _ = self._kernels
        written = passes * value + self.derivative(table.node, self._sum_of)
        tabulated = passes * (read + extra) + summed + factor * is_factor
        return (written - tabulated) / passes

    def derivative(self, root: fx.Node, sum_of: Callable[[fx.Node], float]) -> float:
        """Instructions per score of a node's derivative, and of sums for what it reads.

        sum_of: instructions of a sum for a node that reads a captured tensor.
        """
        total, leaves = 0.0, dict[fx.Node, float]()
        for node in reached(root):
            if not self._varies(node) or node not in self._trained:
                continue
            if node.target is torch.ops.aten.index.Tensor:
                total += sum_of(node)
                continue
            sources = [source for source in node.all_input_nodes if source in self._trained]
            elements = elements_of(node)
            is_function = instructions_of(node) > _FUNCTION * elements
            total += len(sources) * elements * (2.0 if is_function else 1.0)
            leaves |= {s: _LEAF * _numbers(s) for s in sources if not self._varies(s)}
        return total + sum(leaves.values())

    def _sum_of(self, read: fx.Node) -> float:
        return self._kernels.summed if self._is_of_both(read) else 0.0

    def _is_of_both(self, node: fx.Node) -> bool:
        """Whether a node depends on a distance, or another coordinate of both positions."""
        return any(isinstance(c, Coordinate) for c in self._found.forms.seen(node).coordinates)

    def _varies(self, node: fx.Node) -> bool:
        """Whether the value of a node depends on the positions."""
        return bool(self._found.forms.seen(node).coordinates)


def _numbers(node: fx.Node) -> int:
    """How many numbers a node holds."""
    example = node.meta.get("val")
    return example.numel() if isinstance(example, torch.Tensor) else 1
