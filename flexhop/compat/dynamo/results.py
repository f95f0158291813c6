"""What a mod returns while Dynamo traces it. torch 2.11 to 2.15."""

from __future__ import annotations

import re
from typing import Any

from torch._dynamo.variables.base import VariableTracker
from torch.fx import Graph, Node

from flexhop.errors import ModResultError

__all__ = ["convert_result", "no_tensor", "result_of"]

_WANTED = {"mask_mod": "a bool tensor", "score_mod": "a tensor of real numbers"}
# How Dynamo's message names a Python number.
_NUMBER = re.compile(r"ConstantVariable\((\w+)")


def no_tensor(kind: str, message: str) -> ModResultError:
    """The error for a mod that returns what cannot be in a graph; message: Dynamo's."""
    named = _NUMBER.search(message)
    found = f"an object of type {named[1]}" if named else "no tensor"
    wanted = _WANTED.get(kind, "a floating-point tensor")
    return ModResultError(mod=kind, name=kind, expected=wanted, found=found)


def result_of(graph: Graph, returned: VariableTracker) -> Any:
    """The fake result of a traced mod, or an object like what it returned instead of a tensor."""
    if not returned.is_tensor():
        kind = returned.python_type()
        return kind() if kind in (tuple, list, dict, int, float, bool) else None
    output = graph.find_nodes(op="output")[0].args[0]
    if isinstance(output, (tuple, list)) and len(output) == 1:
        output = output[0]
    if isinstance(output, Node):
        return output.meta.get("example_value")
    return output


def convert_result(graph: Graph, score: Node) -> None:
    """Convert integers and bools that a score_mod returns to the dtype of the score."""
    (output,) = graph.find_nodes(op="output")
    (node,) = output.all_input_nodes
    example = node.meta["example_value"]
    if example.is_floating_point():
        return
    dtype = score.meta["example_value"].dtype
    with graph.inserting_before(output):
        converted = graph.call_method("to", (node, dtype))
    converted.meta = {**node.meta, "example_value": example.to(dtype)}
    output.replace_input_with(node, converted)
