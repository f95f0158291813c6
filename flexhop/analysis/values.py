"""Evaluate a mod on broadcasting tensors: many scores at once, without tracing or vmap.

Only for mods whose values stay exactly the same: integers, bools, and floats that are rounded
once. Functions of floats differ in their last bits between vectors and scalars, so a mod with them
is called itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, fx

from flexhop.analysis.graph import Mod, dtype_of, in_order, is_number, operands, reached
from flexhop.analysis.operators import HARMLESS, Trait, packet_of, traits_of

aten = torch.ops.aten
_OPTIONS = HARMLESS | {"alpha", "min", "max", "rounding_mode"}
_INTEGER_OPERATORS = frozenset(
    {aten.remainder, aten.fmod, aten.floor_divide, aten.bitwise_xor, aten.__xor__, aten.square}
    | {aten.bitwise_right_shift, aten.__rshift__, aten.logical_xor, aten.relu, aten.pow, aten.div}
    | {aten.index}
)
_INDICES = (torch.int8, torch.int16, torch.int32, torch.int64)
_ROUNDED = frozenset(
    {aten.add, aten.sub, aten.mul, aten.neg, aten.abs, aten.floor, aten.ceil, aten.trunc}
    | {aten.minimum, aten.maximum, aten.clamp, aten._to_copy, aten.where, aten.relu}
)


class NotReproducible(Exception):
    """A node's value may depend on how it is computed."""


def is_reproducible(node: fx.Node) -> bool:
    """Whether an operator gives the same value wherever it is computed."""
    packet, dtype = packet_of(node.target), dtype_of(node)
    if dtype is None or not is_number(node):
        return False
    if packet is aten.index:
        return _reads_one_entry(node)
    if Trait.FACTORY in traits_of(packet):
        return True
    if dtype.is_floating_point:
        is_wide = dtype in (torch.float32, torch.float64)
        return packet in _ROUNDED and is_wide and set(node.kwargs) <= HARMLESS
    is_known = bool(traits_of(packet)) or packet in _INTEGER_OPERATORS
    return is_known and set(node.kwargs) <= _OPTIONS


def can_compute(mod: Mod) -> bool:
    """Whether `compute` gives the mod's own values."""
    return None not in mod.captures.values() and all(map(is_reproducible, mod.operators))


class Values:
    """Values of a mod's nodes, on broadcasting tensors.

    Args:
        mod: a mod with captured tensors.
        inputs: tensors for its inputs by name, all with the same number of dimensions.
        device: their device.
    """

    def __init__(self, mod: Mod, inputs: Mapping[str, Tensor], device: torch.device) -> None:
        self._device = device
        self._known = {mod.inputs[name]: tensor for name, tensor in inputs.items()}
        self._form = (1,) * next(iter(inputs.values())).dim()
        for node, tensor in mod.captures.items():
            if tensor is None:
                raise NotReproducible
            self._known[node] = self._with_dimensions(tensor)

    def of(self, node: fx.Node) -> Tensor:
        """A node for all values of its inputs.

        Raises:
            NotReproducible: it may differ from the mod's own value.
        """
        if node not in self._known:
            # In order, because a chain may be longer than Python's stack.
            unknown = reached(node, lambda of: set(of.all_input_nodes) - self._known.keys())
            for one in in_order(unknown):
                if not is_reproducible(one):
                    raise NotReproducible
                self._known[one] = self._compute(one)
        return self._known[node]

    def compute(self, nodes: Iterable[fx.Node], result: fx.Node) -> Tensor:
        """A result, from all operators in order; each value lives until its last use."""
        left = {node: len(node.users) for node in self._known}
        for node in nodes:
            self._known[node] = self._compute(node)
            left[node] = len(node.users)
            for source in node.all_input_nodes:
                left[source] -= 1
                if left[source] == 0 and source is not result:
                    del self._known[source]
        return self._known[result]

    def _compute(self, node: fx.Node) -> Tensor:
        args, kwargs = operands(node, self.of)
        if packet_of(node.target) is aten.index:
            table, indices = args
            return table[tuple(map(_as_index, indices))]
        if "device" in kwargs:
            kwargs["device"] = self._device
        found = node.target(*args, **kwargs)  # type: ignore[operator]
        return self._with_dimensions(found.to(dtype_of(node)))

    def _with_dimensions(self, tensor: Tensor) -> Tensor:
        """Give a number dimensions, so that dtypes promote as for 0-d tensors."""
        return tensor.view(self._form) if tensor.dim() == 0 else tensor


def _reads_one_entry(read: fx.Node) -> bool:
    """Whether a read of a captured tensor has one integer per dimension; bytes are a mask."""
    table, indices = read.args
    example = table.meta.get("val") if isinstance(table, fx.Node) else None
    if not isinstance(example, Tensor) or example.dim() != len(indices):  # type: ignore[arg-type]
        return False
    return all(is_number(i) and dtype_of(i) in _INDICES for i in indices)  # type: ignore[union-attr]


def _as_index(value: Tensor) -> Tensor:
    """An index in a dtype that indexing accepts."""
    return value if value.dtype in (torch.int32, torch.int64) else value.long()
