"""k_mod and v_mod as graphs, and the factors that can move out of the loop over columns.

A mod may multiply by a number that is the same for all columns of a key, such as a scale. It need
not multiply each column: the score, or the weight of a value, is multiplied instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from flexhop.compat import inductor
from flexhop.lowering.mods.graphs import reaches, returning

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default
_TRANSPARENT = (aten.clone.default, aten.alias.default, aten.detach.default)
# Dtypes whose every number bfloat16 and float16 represent.
_EXACT = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


class KeyModGraph(NamedTuple):
    """A k_mod or v_mod.

    graph: (x, b, h, kv_idx, *captures) -> x. factor: (b, h, kv_idx, *captures) -> number, if
    multiplying by it is all that the mod does. is_trivial: whether it returns x.
    """

    graph: fx.GraphModule
    factor: fx.GraphModule | None
    is_trivial: bool


def read_key_mod(mod: Any) -> KeyModGraph:
    """Analyse a mod."""
    graph = inductor.graph_module(mod)
    x = graph.graph.find_nodes(op="placeholder")[0]
    result = _value_of(_output(graph))
    if result is x:
        return KeyModGraph(graph, None, True)
    return KeyModGraph(graph, _factor(graph, x, result), False)


def is_exact(stored: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether every number of one dtype is exact in the other."""
    return stored in (*_EXACT, dtype)


def _output(graph: fx.GraphModule) -> Any:
    result = graph.graph.output_node().args[0]
    return result[0] if isinstance(result, (tuple, list)) else result


def _value_of(node: Any) -> Any:
    while isinstance(node, fx.Node) and _hands_on(node):
        node = node.args[0]
    return node


def _hands_on(node: fx.Node) -> bool:
    is_same = node.target is convert and node.args[1] == torch.float32
    return node.target in _TRANSPARENT or is_same


def _factor(graph: fx.GraphModule, x: fx.Node, result: Any) -> fx.GraphModule | None:
    if not isinstance(result, fx.Node) or result.target is not aten.mul.Tensor:
        return None
    left, right = result.args[:2]
    for one, other in ((left, right), (right, left)):
        if _value_of(one) is x and not reaches(other, (x,)):
            return _graph_of(graph, other)
    return None


def _graph_of(graph: fx.GraphModule, factor: Any) -> fx.GraphModule:
    """The function (b, h, kv_idx, *captures) -> factor, fp32."""
    module = returning(graph, graph.graph, factor)
    module.graph.erase_node(module.graph.find_nodes(op="placeholder")[0])
    module.recompile()
    return module
