"""Reads of a captured tensor at several places at once: `table[h][torch.stack([q, k])]`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from flexhop.compat.operators import hop
from flexhop.ops.graphs.reads import MAX_ROW, number_before

aten = torch.ops.aten


def one_place_at_a_time(node: fx.Node, per_element: set[fx.Node]) -> set[fx.Node]:
    """Replace reads of a tensor at a few places by a row of reads, each of which has a gradient.

    Args:
        node: a differentiable tensor that depends on no score.
        per_element: the nodes that depend on the score or its indices.

    Returns:
        New nodes; they depend on the score.
    """
    made = set[fx.Node]()
    for user in [user for user in node.users if user in per_element]:
        maker = _Maker(user, made)
        indices = _places(user, maker)
        if indices is None:
            continue
        shape = torch.broadcast_shapes(*(i.meta["val"].shape for i in indices))
        wide = [maker(aten.expand.default, index, list(shape)) for index in indices]
        found = []
        for place in itertools.product(*map(range, shape)):
            own = [maker.element(index, place) for index in wide]
            found.append(maker(aten.index.Tensor, node, own))
        row = maker(aten.stack.default, found)
        row = maker(aten.reshape.default, row, list(user.meta["val"].shape))
        user.replace_all_uses_with(row)
        user.graph.erase_node(user)
        per_element.discard(user)
    return made


def _places(user: fx.Node, maker: _Maker) -> Sequence[fx.Node] | None:
    """The indices of a read at few places; None for anything else."""
    value = user.meta.get("val")
    if not isinstance(value, Tensor) or any(type(size) is not int for size in value.shape):
        return None
    if not 0 < value.numel() <= MAX_ROW:
        return None
    if user.target is aten.index.Tensor:
        indices = list(cast("Sequence[fx.Node | None]", user.args[1]))
        whole = next(n for n, index in enumerate(indices) if index is not None)
        tensors = [index for index in indices[whole:] if index is not None]
        is_plain = len(tensors) == len(indices) - whole
        if not is_plain or any(t.meta["val"].dtype == torch.bool for t in tensors):
            return None
        if not any(t.meta["val"].dim() for t in tensors):
            return None
        return [*maker.counts(value.shape, range(whole)), *tensors]
    if user.target is not aten.gather.default:
        return None
    dim, places = cast("tuple[int, fx.Node]", user.args[1:3])
    numbers: list[Any] = maker.counts(value.shape, range(value.dim()))
    numbers[dim % value.dim()] = places
    return numbers


class _Maker:
    """Makes nodes before another one."""

    def __init__(self, before: fx.Node, made: set[fx.Node]) -> None:
        self.before, self.made = before, made

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        with self.before.graph.inserting_before(self.before):
            new = self.before.graph.call_function(target, args)
        with hop.without_modes():
            new.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        self.made.add(new)
        return new

    def counts(self, shape: Sequence[int], axes: Iterable[int]) -> list[fx.Node]:
        """For each of some axes, the positions along it, in a shape of which the others are 1."""
        found = []
        for axis in axes:
            parts = [self._number(n) for n in range(shape[axis])]
            sizes = [size if axis == other else 1 for other, size in enumerate(shape)]
            found.append(self(aten.reshape.default, self(aten.stack.default, parts), sizes))
        return found

    def _number(self, number: int) -> fx.Node:
        new = number_before(self.before, number)
        self.made.add(new)
        return new

    def element(self, tensor: fx.Node, place: Sequence[int]) -> fx.Node:
        """One element of a tensor."""
        for position in place:
            tensor = self(aten.select.int, tensor, 0, position)
        return tensor
