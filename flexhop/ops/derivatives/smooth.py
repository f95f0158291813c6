"""Mods for derivatives of any order: replace operators that PyTorch differentiates only once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from flexhop.compat import torch_version
from flexhop.compat.operators import transforms
from flexhop.compat.operators.overloads import operator_name
from flexhop.errors import UnsupportedFeatureError

aten = torch.ops.aten


def sign(x: Tensor) -> Tensor:
    """As `aten.sgn` of real numbers; 0 for NaN."""
    if not x.is_floating_point():
        return aten.sgn.default(x)
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


def magnitude(x: Tensor) -> Tensor:
    """As `aten.abs` of real numbers."""
    return x * sign(x) if x.is_floating_point() else aten.abs.default(x)


# What to call in place of an operator that is differentiated. The derivative of `aten.sgn`, which
# is that of `aten.abs`, is a tensor of zeros in 2.11, which ends in an internal assertion if its
# sizes are symbols. 2.13 to 2.15 trace it.
_TRACEABLE: dict[object, Callable[[Tensor], Tensor]] = (
    {aten.abs.default: magnitude, aten.sgn.default: sign} if torch_version() < (2, 13) else {}
)


def _softmax_parts(row: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """What Inductor finds in a softmax: the largest element, and the sum of exponentials."""
    largest = row.amax(dim, keepdim=True)
    return largest, (row - largest).exp().sum(dim, keepdim=True)


_PLAIN: dict[str, Callable[..., Any]] = {
    "flexhop::tanh_approx": torch.ops.aten.tanh.default,
    "prims::prepare_softmax_online": _softmax_parts,
    "prims::convert_element_type": Tensor.to,
    "prims::rev": torch.flip,
    "prims::fma": lambda a, b, c: a * b + c,
    "prims::fmin": torch.fmin,
    "prims::fmax": torch.fmax,
    "aten::reshape": transforms.reshaped,
    "aten::view": transforms.reshaped,
}
# Operators on positions, which have no derivative.
_POSITIONS = ("flexhop::bounded", "prims::iota")


def smooth(mod: Any) -> Any:
    """The same mod, made of operators that have derivatives of every order and mode.

    A custom operator has at most a gradient. In forward mode, PyTorch silently returns a tangent
    of 0 for it, and for the primitives into which Inductor takes conversions and `flip` apart.

    Raises:
        UnsupportedFeatureError: the mod calls a third-party custom operator. If the mod is not a
            graph, its result raises this when it is called.
    """
    if not isinstance(mod, fx.GraphModule):
        return functools.partial(_run_smooth, mod)  # torch.vmap turns graphs into functions
    replaced = [n for n in mod.graph.nodes if _is_replaced(n.target) or n.target in _TRACEABLE]
    if not replaced:
        return mod
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(mod.graph, known))
    for node in replaced:
        known[node].target = _TRACEABLE.get(node.target) or _plain(node.target)
    return fx.GraphModule(mod, graph)


class _SmoothMode(TorchFunctionMode):
    """Replaces custom operators as they are called."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return (_plain(func) if _is_replaced(func) else func)(*args, **(kwargs or {}))


def _run_smooth(mod: Any, *inputs: Any) -> Any:
    with _SmoothMode():
        return mod(*inputs)


def _plain(target: Any) -> Any:
    name = operator_name(target)
    if name not in _PLAIN:
        raise UnsupportedFeatureError(
            feature=f"This derivative of a score_mod that calls {name}",
            reason="a custom operator has only a first-order gradient",
            hint="Write it with PyTorch's own operators instead",
        )
    return _PLAIN[name]


def _is_replaced(target: Any) -> bool:
    return operator_name(target) in _PLAIN or _is_custom(target)


def _is_custom(target: Any) -> bool:
    name = operator_name(target)
    return bool(name) and not name.startswith(("aten::", *_POSITIONS))
