"""Trace a mod by calling it once, on stand-ins for its arguments.

Nothing is compiled and no value is read: a call takes only as long as recording its operators. A
mod that cannot be traced this way raises `Untraceable`, and is evaluated score by score.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from flexhop.analysis.graph import Builder, Mod
from flexhop.analysis.interval import INDICES
from flexhop.analysis.operators import packet_of
from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.mods.stand_in import (
    StandIn,
    Watch,
    is_plain,
    is_random,
    is_traced,
    reads_or_writes,
)
from flexhop.compat.operators.hop import without_modes
from flexhop.compat.operators.vmapped import is_mapped
from flexhop.compat.sizes import LONGEST_SUM, bound_of

aten = torch.ops.aten
_CONSTANTS = (aten.full, aten.zeros, aten.ones)
_REMEMBERED = 4096  # operator results whose shape and dtype are cached
_known: dict[Any, tuple[torch.dtype, tuple[int, ...]]] = {}


class Untraceable(Exception):
    """The mod does something that has no graph, or captures something other than plain tensors."""


class Mapped(Untraceable):
    """The mod captures a tensor that a torch.vmap around the call maps."""


class _Value(StandIn):
    """A value of a mod while it is traced."""

    node: Any


def trace(mask_mod: Callable[..., Any], device: torch.device, *, in_graph: bool = False) -> Mod:
    """The graph of mask_mod(b, h, q_idx, kv_idx).

    Args:
        mask_mod: the mask.
        device: device of the indices.
        in_graph: whether a graph is being traced: captured tensors then have no values, and their
            sizes may be symbolic.

    Raises:
        Untraceable: it branches on an index, writes in place, captures fake tensors, or returns
            anything but a 0-d bool tensor.
    """
    tracer = _Tracer(device, in_graph)
    values = [tracer.stand(node) for node in tracer.builder.inputs.values()]
    with torch.no_grad(), IndexMode(), Watch(tracer.record).watching():
        result = mask_mod(*values)
    if not isinstance(result, Tensor) or result.dtype != torch.bool or result.dim():
        raise Untraceable
    found = tracer.builder.mod([tracer.node_of(result)])
    for node in reversed(found.operators):  # rows, of which only the elements are used
        if not node.users and node is not found.result:
            found.graph.erase_node(node)
    return found


class _Tracer:
    def __init__(self, device: torch.device, in_graph: bool) -> None:
        self.device, self.in_graph = device, in_graph
        examples = [self._example((), torch.int32) for _ in INDICES]
        self.builder = Builder(INDICES, examples, LONGEST_SUM)
        self.symbols: dict[str, Any] = {}  # captured symbolic numbers, by their expression

    def _aside(self) -> contextlib.AbstractContextManager[Any]:
        """A region in which the surrounding trace records nothing."""
        return without_modes() if self.in_graph else contextlib.nullcontext()

    def _example(self, shape: Any, dtype: torch.dtype) -> Tensor:
        plain = tuple(1 if isinstance(size, torch.SymInt) else size for size in shape)
        with self._aside():
            return _meta_tensor(plain, dtype)

    def stand(self, node: fx.Node) -> _Value:
        """The stand-in that a mod sees for a node."""
        example = node.meta["val"]
        with self._aside():
            made = _Value(tuple(example.shape), example.dtype, self.device)
        made.node = node
        return made

    def node_of(self, value: Any) -> Any:
        """The node of an argument in the graph."""
        if isinstance(value, _Value):
            return value.node
        if isinstance(value, Tensor):
            if not is_plain(value) and not (self.in_graph and is_traced(value)):
                raise Mapped if is_mapped(value) else Untraceable
            return self.builder.capture(
                self._example(value.shape, value.dtype), value, self.device
            )
        if isinstance(value, (tuple, list)):
            return [self.node_of(v) for v in value]
        return self._symbol(value) if isinstance(value, torch.SymInt) else value

    def _symbol(self, value: torch.SymInt) -> fx.Node:
        """A captured number that is not a constant of the graph, as a captured tensor."""
        last = bound_of(value)
        if not self.in_graph or last is None:
            raise Untraceable
        name = str(value.node.expr)
        if name not in self.symbols:
            number: Any = value  # torch.full takes symbols, its annotation does not
            tensor = torch.full((), number, dtype=torch.int32, device=self.device)
            node = self.builder.capture(self._example((), torch.int32), tensor, self.device)
            node.meta["bounds"] = (-last, last)
            self.symbols[name] = node
        return self.symbols[name]

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an operator: returns a value of the mod, or a tensor that depends on no index."""
        given = list(_flat((args, tuple(kwargs.values()))))
        is_value = any(isinstance(a, _Value) for a in given)
        if not is_value and not _is_constant(func, args):
            if is_random(func):
                raise Untraceable
            return func(*args, **kwargs)
        if reads_or_writes(func) or is_random(func):
            raise Untraceable
        with self._aside():
            dtype, shape = _result_form(func, args, kwargs)
        example = self._example(shape, dtype)
        nodes = tuple(self.node_of(a) for a in args)
        options = {name: self.node_of(v) for name, v in kwargs.items()}
        # An overload for numbers would refuse the captured tensor that `_symbol` makes of one.
        target = packet_of(func) if any(isinstance(a, torch.SymInt) for a in given) else func
        return self.stand(self.builder.call(target, nodes, options, example))


@functools.lru_cache(maxsize=_REMEMBERED)
def _meta_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of a shape and dtype; never changed."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _is_constant(func: Any, args: Any) -> bool:
    """Whether an operator creates one number from the program."""
    packet = packet_of(func)
    return packet is aten.scalar_tensor or (packet in _CONSTANTS and not args[0])


def _result_form(
    func: Any, args: Any, kwargs: Mapping[str, Any]
) -> tuple[torch.dtype, tuple[int, ...]]:
    """Shape and dtype of an operator's result, cached."""
    if packet_of(func) is aten.index and all(i is not None and i.dim() == 0 for i in args[1]):
        table, indices = args
        return table.dtype, _plain(table.shape[len(indices) :])
    key = (func, _form(args), _form(tuple(sorted(kwargs.items()))), torch.get_default_dtype())
    if key not in _known:
        if len(_known) >= _REMEMBERED:
            _known.clear()
        options = {name: v for name, v in kwargs.items() if name != "device"}
        result = _run_on_numbers(func, args, options)
        if result is None:
            result = func(*map(_meta, args), **{name: _meta(v) for name, v in options.items()})
        if not isinstance(result, Tensor):
            raise Untraceable
        _known[key] = (result.dtype, tuple(result.shape))
    return _known[key]


def _run_on_numbers(func: Any, args: Any, options: Mapping[str, Any]) -> Any:
    """The result of an operator for ones on the CPU, or None if its operands are no plain numbers.

    On meta tensors, PyTorch computes it in Python, and imports Dynamo for that.
    """
    tensors = [v for v in (*args, *options.values()) if isinstance(v, Tensor)]
    if not tensors or any(v.dim() > 0 or v.dtype not in _NUMBERS for v in tensors):
        return None
    ones = [_one(v.dtype) if isinstance(v, Tensor) else _meta(v) for v in args]
    more = {n: _one(v.dtype) if isinstance(v, Tensor) else _meta(v) for n, v in options.items()}
    try:
        return func(*ones, **more)
    except (RuntimeError, ZeroDivisionError):
        return None  # not for these values


_NUMBERS = (torch.bool, torch.int32, torch.int64, torch.float32)


@functools.cache
def _one(dtype: torch.dtype) -> Tensor:
    """The number 1; never changed."""
    return torch.ones((), dtype=dtype, device="cpu")


def _plain(shape: Any) -> tuple[int, ...]:
    """The shape of a value of a mod.

    Raises:
        Untraceable: one of its sizes is symbolic.
    """
    if any(isinstance(size, torch.SymInt) for size in shape):
        raise Untraceable
    return tuple(shape)


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, _plain(value.shape)
    if isinstance(value, torch.SymInt):  # any number of its kind
        return "int", 1
    if isinstance(value, (tuple, list)):
        return tuple(map(_form, value))
    return type(value).__name__, value


def _meta(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_meta(v) for v in value]
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return 1 if isinstance(value, torch.SymInt) else value


def _flat(values: Any) -> Any:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value
