"""Graphs of mods, and their captured tensors, for calls that are not compiled.

Dynamo traces the mods of a call and guards on everything that they read. A function recreated with
other tensors in its closure therefore has the same graphs and other captures, and one whose
numbers changed has new graphs. Nothing else that Dynamo compiles is needed: the backend here
returns the operator's operands instead of computing it.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from flexhop.compat.compilation import mark, remember
from flexhop.compat.mods.held import is_filled
from flexhop.compat.mods.own_backward import at_once
from flexhop.compat.mods.wrapped import Exchange, apart, is_transformed
from flexhop.compat.operators.hop import Operator
from flexhop.compat.operators.transforms import is_deriving, without_tangents
from flexhop.errors import FlexhopError

__all__ = ["Lifted", "lift", "own_code"]

_MOST = 1024  # most cached kinds of calls
_count = itertools.count()
_known: dict[Hashable, Callable[..., Any]] = {}
_graphs: dict[str, GraphModule] = {}


class Lifted(NamedTuple):
    """The mods of a call, as operands of its operator."""

    graphs: tuple[GraphModule, ...]
    captures: tuple[tuple[Any, ...], ...]  # of each mod


def lift(
    operator: Operator, call_with: Callable[..., Any], query: Any, mods: Sequence[Any]
) -> Lifted:
    """Trace mods, or look up earlier traces.

    Args:
        operator: the operator.
        call_with: (query, *mods) -> results; calls `operator` with the operands of its door.
        query: a tensor of the device and dtype for which mods are traced.
        mods: the user's functions.
    """
    is_derived = is_deriving()  # Dynamo's guards do not know of it
    key = (call_with, is_derived, *map(_kind_of, mods))
    if not is_transformed():
        with apart(), at_once(is_derived), without_tangents():
            return _traced(operator, call_with, key, (query, *mods))
    exchange = Exchange()
    with apart(), at_once(is_derived):
        lifted = _traced(operator, call_with, key, (query, *map(exchange.plain, mods)))
    return lifted._replace(captures=exchange.back(lifted.captures))


def _traced(operator: Operator, call_with: Any, key: Hashable, inputs: tuple[Any, ...]) -> Lifted:
    from torch._dynamo.exc import FailOnRecompileLimitHit

    has_history = key in _known
    if not has_history:
        remember(_known, key, _compiled(operator, call_with), _MOST)
    try:
        return _known[key](*inputs)
    except (FailOnRecompileLimitHit, FlexhopError):
        if not has_history:
            raise
        # One function with many numbers, or a float that Dynamo turned into an input because it
        # changed.
        _known[key] = _compiled(operator, call_with)
        return _known[key](*inputs)


def _kind_of(mod: Any, callers: tuple[Any, ...] = ()) -> Hashable:
    """What recreated functions have in common.

    A float is a constant of a kernel. Dynamo would turn a changing one into an input.

    Args:
        mod: a function, or what one holds.
        callers: the functions that hold it: one that calls itself is among them.
    """
    if isinstance(mod, functools.partial):
        return tuple(_kind_of(part, callers) for part in (mod.func, *mod.args))
    if isinstance(mod, types.MethodType):
        return _kind_of(mod.__func__, callers)
    if isinstance(mod, types.FunctionType):
        if mod in callers:
            return mod.__code__
        cells = (cell.cell_contents for cell in mod.__closure__ or () if is_filled(cell))
        return (mod.__code__, *(_kind_of(cell, (*callers, mod)) for cell in cells))
    if isinstance(mod, tuple):
        return tuple(_kind_of(part, callers) for part in mod)
    return mod if isinstance(mod, float) else type(mod)


def _compiled(operator: Operator, call_with: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(own_code(call_with), backend=_backend(operator), fullgraph=True)


def own_code(function: Any) -> Any:
    """The same function with its own code, for which Dynamo counts compilations and sizes
    separately."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_count)}")
    return types.FunctionType(code, function.__globals__, closure=function.__closure__)


def _backend(operator: Operator) -> Callable[..., Any]:
    def take_operands(module: GraphModule, _: Any) -> Callable[..., tuple[Lifted]]:
        (node,) = module.graph.find_nodes(op="call_function", target=operator)
        args = operator.args_type(*node.args)
        names = [args[position] for position in operator.callable_positions]
        graphs = tuple(_interned(getattr(module, name.target)) for name in names)
        fields = [name for name in args._fields if name.endswith("_captures")]
        output = module.graph.output_node()
        output.args = (tuple(tuple(getattr(args, field)) for field in fields),)
        module.graph.eliminate_dead_code()
        module.recompile()
        return lambda *inputs: (Lifted(graphs, module.forward(*inputs)),)

    return take_operands


def _interned(graph: GraphModule) -> GraphModule:
    """The first graph with this text: if Dynamo retraces, kernels are still shared."""
    if graph.graph.find_nodes(op="get_attr"):
        return mark(graph)
    return _graphs.setdefault(graph.code, mark(graph))
