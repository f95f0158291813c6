"""Graphs that are traced on a CPU for an absent GPU (fake_gpu.py).

PyTorch's C++ autograd asks the device of fake tensors, and ends the process if there is none. The
names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from flexhop.compat.graphs import shared_graphs

__all__ = ["copied", "move_graph", "trace_on_cpu", "values_of"]

GraphModule = torch.fx.GraphModule
Trace = Callable[[Callable[..., Any], Sequence[Any]], GraphModule]
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def trace_on_cpu(trace: Trace) -> Trace:
    """A function that traces formulas of tensors on the absent GPU as `trace` does."""

    def traced(formula: Callable[..., Any], fakes: Sequence[Any]) -> GraphModule:
        if not any(isinstance(f, torch.Tensor) and f.device.type == "cuda" for f in fakes):
            return trace(formula, fakes)
        with V.fake_mode:
            examples = pytree.tree_map_only(torch.Tensor, _on_cpu, list(fakes))
        with _OnCpu():
            graph = trace(formula, examples)
        move_graph(graph, V.fake_mode, GPU)
        return graph

    return traced


def _on_cpu(fake: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=CPU)


class _OnCpu(TorchFunctionMode):
    """What graphs create on the GPU, they create on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Intercept devices."""
        args, kwargs = pytree.tree_map_only(
            torch.device, lambda given: CPU if given.type == "cuda" else given,
            (args, kwargs or {}),
        )  # fmt: skip
        if function is torch.ops.higher_order.while_loop:
            args = (*map(self._around, args[:2]), *args[2:])  # PyTorch has left this mode there
        return function(*args, **kwargs)

    def _around(self, part: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            with self:
                return part(*values)

        return run


def values_of(graph: GraphModule) -> list[Any]:
    """The inputs of a graph, as its metadata has them."""
    return [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]


def copied(graph: GraphModule) -> GraphModule:
    """A copy of a graph and of its subgraphs, for `move_graph`, which writes their Python code."""
    with mock.patch.object(GraphModule, "recompile"):
        return copy.deepcopy(graph)


def move_graph(graph: GraphModule, mode: Any, device: torch.device) -> list[Any]:
    """Put every CPU tensor and device argument of `graph` and its subgraphs on `device`.

    Returns:
        The graph's inputs there.
    """

    def move_tensor(value: Any) -> Any:
        if not isinstance(value, FakeTensor) or value.device.type != "cpu":
            return value
        with mode:
            return torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device=device
            )

    def move_device(value: Any) -> Any:
        on_host = isinstance(value, torch.device) and value.type == "cpu"
        return device if on_host else value

    def move_copy(module: GraphModule) -> GraphModule:
        moved = copied(module)
        move_graph(moved, mode, device)
        return moved

    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in list(module.graph.nodes):
                if _is_constant(node, module):
                    _put(node, move_tensor, device)
                    continue
                shared_graphs.move(node, move_copy)
                node.args = torch.fx.node.map_aggregate(node.args, move_device)
                node.kwargs = torch.fx.node.map_aggregate(node.kwargs, move_device)
                for key in node.meta.keys() & {"val", "example_value"}:
                    node.meta[key] = pytree.tree_map(move_tensor, node.meta[key])
    _recompile(graph)
    return values_of(graph)


def _recompile(graph: GraphModule) -> None:
    """Write the Python code of a graph and of each of its subgraphs, once."""
    with mock.patch.object(GraphModule, "_recompile_submodules"):
        for module in graph.modules():
            if isinstance(module, GraphModule):
                module.recompile()


def _is_constant(node: torch.fx.Node, module: GraphModule) -> bool:
    """Whether a node is a tensor of numbers in the program: it stays on the host, also on GPUs."""
    if node.target is torch.ops.aten.lift_fresh_copy.default:
        return node.args[0].op == "get_attr"  # pyright: ignore
    value = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    return isinstance(value, torch.Tensor)


def _put(node: torch.fx.Node, move: Callable[[Any], Any], device: torch.device) -> None:
    """Copy a constant to the device, as `torch.tensor(numbers, device=...)` does."""
    if node.op == "get_attr":
        return
    with node.graph.inserting_after(node):
        copied = node.graph.call_function(torch.ops.prims.device_put.default, (node, device))
    copied.meta = {**node.meta, "val": move(node.meta["val"])}
    node.replace_all_uses_with(copied, lambda user: user is not copied)
