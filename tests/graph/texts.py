"""Texts of graphs and kernels without what PyTorch's versions print differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # registers the operators' trackers
from torch import fx
from torch.utils import _pytree as pytree


def aot_graphs(
    function: Callable[..., torch.Tensor], *args: Any, grad: bool
) -> list[fx.GraphModule]:
    """The forward graph, and the backward graph if asked for, as they reach a backend."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    result = compiled(*args)
    if grad:
        result.sum().backward()
    return graphs


def operator_text(graph: fx.GraphModule) -> str:
    """Our operator's node, its operands given by their types, and its subgraphs."""
    (node,) = [n for n in graph.graph.nodes if "flexhop_attention" in str(n.target)]
    schema = node.target.args_type._fields
    lines = [f"{node.target._name}("]
    for name, operand in zip(schema[: len(node.args)], node.args, strict=True):
        lines.append(f"    {name}={_operand(operand)},")
    results = [_kind(value) for value in pytree.tree_leaves(node.meta["val"])]
    lines.append(f") -> ({', '.join(results)})")
    subgraphs = [n for n in node.args if isinstance(n, fx.Node) and n.op == "get_attr"]
    names = {str(n.target): getattr(graph, str(n.target)) for n in subgraphs}
    return "\n\n".join(["\n".join(lines), *(_function(n, g) for n, g in names.items())]) + "\n"


def _operand(operand: Any) -> str:
    if isinstance(operand, fx.Node):
        return str(operand.target) if operand.op == "get_attr" else _kind(operand.meta["val"])
    if isinstance(operand, tuple | list):
        return f"({', '.join(map(_operand, operand))})"
    if isinstance(operand, dict):
        # A hash of the sources, which keys caches and changes with every edit.
        shown = {k: "..." if k == "flexhop" else v for k, v in operand.items()}
        return str(shown)
    return str(operand)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{[int(s) for s in value.shape]}"
    return str(value)


def _function(name: str, graph: fx.GraphModule) -> str:
    """A subgraph as a function of the user's argument names."""
    words = ["b", "h", "q_idx", "kv_idx"]
    if "mask" not in name:
        words = ["score", *words]
    if "joint" in name:
        words = [*words, "grad_score"]
    inputs = graph.graph.find_nodes(op="placeholder")
    words += [f"capture_{i}" for i in range(len(inputs) - len(words))]
    known = {node: word for node, word in zip(inputs, words, strict=True)}
    lines = [f"def {name}({', '.join(words)}):"]
    for node in graph.graph.nodes:
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            known[node] = known[node.args[0]]  # 2.15 traces autograd's detach as an alias
        elif node.op == "call_function":
            known[node] = node.name
            lines.append(f"    {node.name} = {node.target}({_arguments(node, known)})")
        elif node.op == "output":
            lines.append(f"    return {_argument(node.args[0], known)}")
    return "\n".join(lines)


def _arguments(node: fx.Node, known: dict[fx.Node, str]) -> str:
    positional = [_argument(a, known) for a in node.args]
    return ", ".join(
        [*positional, *(f"{k}={_argument(v, known)}" for k, v in node.kwargs.items())]
    )


def _argument(value: Any, known: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return known[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(_argument(v, known) for v in value)}]"
    return str(value)
