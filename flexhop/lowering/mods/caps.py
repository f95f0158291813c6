"""Soft caps in forward kernels.

`cap * tanh(score / cap)` is one function of the score: its factors are folded into the constants
of tanh. The result is exact enough for a score, to which an absolute error below 2**-12 is
nothing, but not for the root of `x - tanh(x)`. So a product is folded if it is only added to the
result. Backward kernels need tanh itself for its derivative, and keep it. So do calls that return
the largest scores, where such an error shows.

If the cap is all that score_mod does, its constants also hold the scale of the product of query
and key, and the change to base 2.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import fx

from flexhop.analysis import copied, dependents, value_of
from flexhop.lowering.mods.analysed import SCORE, kernel_graph, per_graph
from flexhop.ops.args import AttentionArgs, CachedArgs

aten = torch.ops.aten
_SCALED_TANH: Any = torch.ops.flexhop.scaled_tanh.default
_LARGEST = 2.0**9  # factor of tanh, whose text is off by up to 2**-21 of it
_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_SMALLEST = 1e-6  # scales outside of this and its inverse are left alone: constants are fp32
_LOG2_E = math.log2(math.e)


class Folded(NamedTuple):
    """A score_mod for a forward kernel.

    takes_products: whether it takes products of query and key that are not scaled, and returns
    exponents of 2.
    """

    graph: fx.GraphModule
    takes_products: bool = False


def foldable_scale(args: AttentionArgs | CachedArgs, *, has_texts: bool) -> float | None:
    """The scale that a cap may hold, 0 if it may hold none; None: the call's caps stay.

    Args:
        args: operands.
        has_texts: whether kernels compute functions by the texts of compat/kernels/functions.py.
    """
    if not has_texts or args.options.get("return_max"):
        return None
    is_scaled_before = args.options.get("prescale_qk") or args.scale <= 0
    return 0.0 if is_scaled_before else float(args.scale)


def has_caps(score: Any) -> bool:
    """Whether `fold_caps` may change a score_mod, as an operand."""
    graph = kernel_graph(score, SCORE).graph
    return bool(graph.find_nodes(op="call_function", target=aten.tanh.default))


@per_graph
def fold_caps(graph: fx.GraphModule, scale: float | None) -> Folded:
    """The same function, in which products of tanh and numbers are one operator.

    Args:
        graph: a score_mod; not changed.
        scale: see `foldable_scale`.
    """
    tanh = graph.graph.find_nodes(op="call_function", target=aten.tanh.default)
    if scale is None or not tanh:
        return Folded(graph)
    module, _ = copied(graph)
    for node in module.graph.find_nodes(op="call_function", target=aten.tanh.default):
        _fold(module.graph, node)
    takes_products = _fold_scale(module.graph, scale)
    module.graph.eliminate_dead_code()
    module.recompile()
    return Folded(module, takes_products)


def _fold(graph: fx.Graph, tanh: fx.Node) -> None:
    users = list(tanh.users)
    product, outer = (users[0], _factor(users[0], tanh)) if len(users) == 1 else (tanh, None)
    if outer is None:
        product, outer = tanh, 1.0
    value, inner = _split(tanh.args[0])
    if _dtype(product) != torch.float32 or _dtype(value) != torch.float32:
        return
    if not _SMALLEST < abs(inner) < 1 / _SMALLEST or not 0 < abs(outer) < _LARGEST:
        return
    # What multiplies or compares the result could show its error.
    if not _is_added(product):
        return
    with graph.inserting_before(product):
        new = graph.call_function(_SCALED_TANH, (value, inner, outer))
    new.meta = dict(product.meta)
    product.replace_all_uses_with(new)


def _fold_scale(graph: fx.Graph, scale: float) -> bool:
    """Let a cap of the score that is the whole function take products; whether there is one."""
    cap = value_of(graph.output_node().args[0])
    if not isinstance(cap, fx.Node) or cap.target is not _SCALED_TANH:
        return False
    value, inner, outer = cast("tuple[Any, float, float]", cap.args)
    score = graph.find_nodes(op="placeholder")[0]
    if value_of(value) is not score or not _SMALLEST < abs(inner * scale) < 1 / _SMALLEST:
        return False
    # The product of query and key enters unscaled, and an exponent of 2 leaves.
    cap.args = (value, inner * scale, outer * _LOG2_E)
    return True


def _is_added(node: fx.Node) -> bool:
    """Whether a value is only added to the result, or subtracted."""
    sums = dependents([node], lambda user: user.target in _SUMS and not user.kwargs)
    return all(user.op == "output" or user in sums for one in (node, *sums) for user in one.users)


def _split(value: Any) -> tuple[Any, float]:
    """A product with a number as its two factors."""
    operands = value.args if isinstance(value, fx.Node) else ()
    for operand in operands:
        if isinstance(operand, fx.Node) and (factor := _factor(value, operand)) is not None:
            return operand, factor
    return value, 1.0


def _factor(node: fx.Node, operand: fx.Node) -> float | None:
    """The number that a node multiplies `operand` by; None: it does something else."""
    if node.kwargs or len(node.args) != 2 or _dtype(operand) != torch.float32:
        return None
    first, second = node.args
    if node.target is aten.mul.Tensor and operand in (first, second):
        number = second if first is operand else first
        return float(number) if _is_number(number) else None
    if node.target is aten.div.Tensor and first is operand and _is_number(second) and second:
        return 1.0 / float(second)
    return None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _dtype(node: object) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None
