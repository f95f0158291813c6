"""k_mod and v_mod as graphs, and the factors that can move out of the loop over columns.

A mod may multiply by a number that is the same for all columns of a key, such as a scale. It need
not multiply each column: the score, or the weight of a value, is multiplied instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from flexhop.analysis import Analysis, analyse, name_of
from flexhop.analysis.written import convert, returning
from flexhop.compat.kernels import inductor

KEY_INPUTS = ("x", "b", "h", "kv_idx")
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
    found = analyse(graph, KEY_INPUTS)
    if _value_of(found.mod.result) is found.mod.inputs["x"]:
        return KeyModGraph(graph, None, True)
    return KeyModGraph(graph, _factor(graph, found), False)


def is_lossless(stored: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether every number of one dtype is exact in the other."""
    return stored in (*_EXACT, dtype)


def _value_of(node: Any) -> Any:
    """The value that a node passes on as fp32."""
    while isinstance(node, fx.Node) and node.target is convert and node.args[1] == torch.float32:
        node = node.args[0]
    return node


def _factor(graph: fx.GraphModule, found: Analysis) -> fx.GraphModule | None:
    """The function (b, h, kv_idx, *captures) -> factor, fp32."""
    result: Any = _value_of(found.mod.result)
    if not isinstance(result, fx.Node) or name_of(result) != "mul":
        return None
    written = {value: node for node, value in found.known.items()}
    for one, other in (result.args, reversed(result.args)):
        if _value_of(one) is found.mod.inputs["x"] and "x" not in found.forms.depends_on(other):
            module = returning(graph, written.get(other, other))
            module.graph.erase_node(module.graph.find_nodes(op="placeholder")[0])
            module.recompile()
            return module
    return None
