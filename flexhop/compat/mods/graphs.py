"""What a mod must not do, looked for in the graph that Dynamo made of it. torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode

from flexhop.compat.mods.location import line_of
from flexhop.compat.mods.stand_in import is_random
from flexhop.errors import CaptureMutationError, FlexhopError, ModLoweringError

__all__ = ["reads_on_host", "refuse_by_running", "refuse_reads_on_host"]


def reads_on_host(kind: str) -> FlexhopError:
    """Our error for a number of a tensor that chooses code: a list's index, float(), range()."""
    return ModLoweringError(
        mod=kind,
        operation="reading the value of an index or score as a Python number",
        location="its body",
        reason="they are tensors; put the choices into a tensor and index it",
    )


def refuse_reads_on_host(graph: Graph, kind: str) -> None:
    """Raise for `.item()` and for sizes that data determine.

    They trace, because their values are symbols, but a kernel cannot wait for the host.
    """
    for node in graph.find_nodes(op="call_method", target="item"):
        raise ModLoweringError(
            mod=kind,
            operation="Tensor.item",
            location=line_of(node),
            reason="it turns a tensor into a Python number",
        )
    for node in graph.nodes:
        value = node.meta.get("example_value")
        is_tensor = isinstance(value, torch.Tensor) and node.op != "placeholder"
        if is_tensor and free_unbacked_symbols(value):
            raise ModLoweringError(
                mod=kind,
                operation=getattr(node.target, "__name__", str(node.target)),
                location=line_of(node),
                reason="the size of its result depends on data",
            )


def refuse_by_running(tx: Any, graph: Graph, kind: str) -> None:
    """Raise for random numbers, and for writes to captures.

    Functionalization in 2.11 to 2.14 would silently drop the writes.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with tx.fake_mode, torch.no_grad():
        values = [_fresh(node.meta["example_value"]) for node in inputs]
        watch = _Watch(GraphModule(tx.output.nn_modules, graph), values)
        with watch.draws:
            watch.run(*values)
    if watch.drawer is not None:
        raise ModLoweringError(
            mod=kind,
            operation="drawing random numbers",
            location=line_of(watch.drawer),
            reason="every pass over the scores would draw others; draw before the call and "
            "capture the tensor, or pass dropout_p",
        )
    if watch.writer is not None:
        raise CaptureMutationError(mod=kind, location=line_of(watch.writer))


def _fresh(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    fresh = torch.empty_strided(
        value.size(), value.stride(), dtype=value.dtype, device=value.device
    )
    return fresh.zero_() if value.dim() == 0 else fresh  # torch.export.draft_export reads at it


class _Draws(TorchDispatchMode):
    """Notices operators that draw random numbers."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or is_random(func)
        return func(*args, **(kwargs or {}))


class _Watch(Interpreter):
    """Runs a graph and records the first node that wrote to one of its inputs, or drew."""

    def __init__(self, module: GraphModule, inputs: Sequence[Any]) -> None:
        super().__init__(module)
        self.tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        self.versions = [tensor._version for tensor in self.tensors]
        self.writer: Node | None = None
        self.draws = _Draws()
        self.drawer: Node | None = None

    def run_node(self, n: Node) -> Any:
        """Run one node; `_version` counts the writes to a tensor and its views."""
        result = super().run_node(n)
        if self.writer is None and [t._version for t in self.tensors] != self.versions:
            self.writer = n
        if self.drawer is None and self.draws.found:
            self.drawer = n
        return result
