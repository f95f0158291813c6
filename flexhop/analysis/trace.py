"""The graph of a mod, from one call on placeholders for its arguments.

Nothing is compiled and no number is looked at: a call takes as long as its operators take to be
named. What cannot be traced this way raises `Untraceable`, and is evaluated score by score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from flexhop.analysis.graph import Builder, Mod
from flexhop.analysis.interval import INDICES
from flexhop.analysis.operators import packet_of
from flexhop.compat.indexing import IndexMode
from flexhop.compat.stand_in import (
    StandIn,
    Watch,
    is_plain,
    is_random,
    reads_or_writes,
)

aten = torch.ops.aten
_CONSTANTS = (aten.full, aten.zeros, aten.ones)
_REMEMBERED = 4096  # results of operators whose shape and dtype are known
_known: dict[Any, tuple[torch.dtype, tuple[int, ...]]] = {}


class Untraceable(Exception):
    """The mod does something that has no graph, or captures what is no plain tensor."""


class _Value(StandIn):
    """A value of a mod while it is traced."""

    node: Any


def trace(mask_mod: Callable[..., Any], device: torch.device) -> Mod:
    """The graph of mask_mod(b, h, q_idx, kv_idx).

    Raises:
        Untraceable: it branches on an index, writes in place, captures fake tensors, or returns
            anything but a bool tensor without dimensions.
    """
    examples = [torch.empty((), dtype=torch.int32, device="meta") for _ in INDICES]
    builder = Builder(INDICES, examples)
    values = [_stand(node, device) for node in builder.inputs.values()]

    def record(func: Any, args: Any, kwargs: Any) -> Any:
        return _record(builder, device, (func, args, kwargs))

    with torch.no_grad(), IndexMode(), Watch(record):
        result = mask_mod(*values)
    if not isinstance(result, Tensor) or result.dtype != torch.bool or result.dim():
        raise Untraceable
    return builder.mod([_node_of(builder, device, result)])


def _stand(node: fx.Node, device: torch.device) -> _Value:
    example = node.meta["val"]
    made = _Value(tuple(example.shape), example.dtype, device)
    made.node = node
    return made


def _node_of(builder: Builder, device: torch.device, value: Any) -> Any:
    """The placeholder of an argument in the graph."""
    if isinstance(value, _Value):
        return value.node
    if isinstance(value, Tensor):
        if not is_plain(value):
            raise Untraceable
        example = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return builder.capture(example, value, device)
    if isinstance(value, (tuple, list)):
        return [_node_of(builder, device, v) for v in value]
    return value


def _record(builder: Builder, device: torch.device, call: tuple[Any, Any, Any]) -> Any:
    """What an operator gives: a value of the mod, or a tensor that no index decides."""
    func, args, kwargs = call
    is_value = any(isinstance(a, _Value) for a in _flat((args, tuple(kwargs.values()))))
    if not is_value and not _is_constant(func, args):
        if is_random(func):
            raise Untraceable
        return func(*args, **kwargs)
    if reads_or_writes(func) or is_random(func):
        raise Untraceable
    dtype, shape = _result_form(func, args, kwargs)
    example = torch.empty(shape, dtype=dtype, device="meta")
    nodes = tuple(_node_of(builder, device, a) for a in args)
    options = {name: _node_of(builder, device, v) for name, v in kwargs.items()}
    return _stand(builder.call(func, nodes, options, example), device)


def _is_constant(func: Any, args: Any) -> bool:
    """Whether an operator makes one number of the program."""
    packet = packet_of(func)
    return packet is aten.scalar_tensor or (packet in _CONSTANTS and not args[0])


def _result_form(
    func: Any, args: Any, kwargs: Mapping[str, Any]
) -> tuple[torch.dtype, tuple[int, ...]]:
    """Shape and dtype of what an operator gives, remembered."""
    if packet_of(func) is aten.index and all(i is not None and i.dim() == 0 for i in args[1]):
        table, indices = args
        return table.dtype, tuple(table.shape[len(indices) :])
    key = (func, _form(args), _form(tuple(sorted(kwargs.items()))), torch.get_default_dtype())
    if key not in _known:
        if len(_known) >= _REMEMBERED:
            _known.clear()
        options = {name: _meta(v) for name, v in kwargs.items() if name != "device"}
        result = func(*map(_meta, args), **options)
        if not isinstance(result, Tensor):
            raise Untraceable
        _known[key] = (result.dtype, tuple(result.shape))
    return _known[key]


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(map(_form, value))
    return type(value).__name__, value


def _meta(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_meta(v) for v in value]
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value


def _flat(values: Any) -> Any:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value
