"""Functions made of parts of graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from flexhop.analysis import copied

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default


def returning(module: fx.GraphModule, value: Any) -> fx.GraphModule:
    """A function of a module's inputs that returns a number, or the value of a node, in fp32."""
    result, copies = copied(module)
    output = result.graph.output_node()
    example = result.graph.find_nodes(op="placeholder")[0].meta["val"]
    with result.graph.inserting_before(output):
        if isinstance(value, fx.Node):
            number = result.graph.call_function(convert, (copies[value], torch.float32))
        else:
            options = {"dtype": torch.float32, "device": example.device}
            number = result.graph.call_function(aten.full.default, ([], float(value)), options)
    number.meta["val"] = example
    output.args = (number,)
    result.graph.eliminate_dead_code()
    result.recompile()
    return result
