"""What a mod makes without its arguments: computed before the call, and captured.

`torch.tensor([0.5, 1.0, 2.0])[k_idx % 3]`, `torch.arange(n)`, `weight.softmax(-1)[h]`: a kernel
would make these for every score, or cannot. They are the same for all scores. In Dynamo's graph of
a mod, such values move into the graph around the call, and become captured tensors. Functions of
captured tensors that kernels compute, such as `slopes.exp()[h]`, stay. torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._ops import OpOverload
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["make_before", "spell_numbers"]

aten = torch.ops.aten
_READS = {aten.index, aten.embedding, aten.gather, aten.index_select, aten.take}
_COPIES = {aten.clone, aten._to_copy, aten.detach, aten.alias, aten._unsafe_view}
_OF_DATA = {torch.tensor, torch.as_tensor, torch.scalar_tensor}
_SWITCHES = {torch._C._set_grad_enabled}
_LIKE_SCORE = {
    "new_zeros": torch.zeros, "new_ones": torch.ones, "new_full": torch.full,
    "new_tensor": torch.tensor,
}  # fmt: skip


def spell_numbers(graph: Graph) -> None:
    """Say `torch.full` for tensors of one number, which kernels need not read, and write without
    the score what takes only its dtype and device: `score.new_tensor([0.5, 1.0])`."""
    for node in list(graph.nodes):
        value = node.meta.get("example_value")
        if not isinstance(value, Tensor):
            continue
        options = {"dtype": value.dtype, "device": value.device}
        data = _data_of(node)
        if value.dim() == 0 and (isinstance(data, (bool, int, float)) or _is_number(data)):
            _replace(graph, node, torch.full, ((), data), options)
        elif node.op == "call_method" and node.target in _LIKE_SCORE and value.dim() > 0:
            sized = {name: item for name, item in node.kwargs.items() if name not in _FORM}
            made = _LIKE_SCORE[node.target]
            _replace(graph, node, made, node.args[1:], {**sized, **options})


_FORM = {"dtype", "device", "requires_grad", "layout", "pin_memory"}


def _data_of(node: Node) -> Any:
    """What `torch.tensor` and its kind make a tensor of; None for other functions."""
    is_function = node.op == "call_function" and node.target in _OF_DATA
    if is_function or (node.op == "call_method" and node.target == "new_tensor"):
        given = node.args[1:] if node.op == "call_method" else node.args
        return given[0] if given else node.kwargs.get("data")
    return None


def _is_number(value: Any) -> bool:
    found = value.meta.get("example_value") if isinstance(value, Node) else None
    return isinstance(found, (torch.SymFloat, torch.SymInt))


def _replace(graph: Graph, node: Node, function: Any, args: Any, kwargs: Any) -> None:
    with graph.inserting_before(node):
        made = graph.call_function(function, tuple(args), kwargs)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def make_before(
    tx: Any, graph: Graph, lifted: Sequence[Proxy], device: torch.device
) -> tuple[Graph, tuple[Proxy, ...]]:
    """Move what a mod makes into the graph around its call.

    Args:
        tx: Dynamo's translator, after the mod.
        graph: of the mod; changed.
        lifted: its captures, the last inputs of the graph.
        device: of the call.

    Returns:
        The graph and its captures: those that it still reads, then what was made.
    """
    return _Moving(tx, graph, lifted, device).run()


class _Moving:
    """One pass over the graph of a mod."""

    def __init__(
        self, tx: Any, graph: Graph, lifted: Sequence[Proxy], device: torch.device
    ) -> None:
        self.tx, self.graph, self.device = tx, graph, device
        inputs = graph.find_nodes(op="placeholder")
        first = len(inputs) - len(lifted)
        self.own = set(inputs[:first])
        self.lifted = dict(zip(inputs[first:], lifted, strict=True))
        self.outer: dict[Node, Any] = dict(self.lifted)
        self.without_grad: set[Node] = set()

    def run(self) -> tuple[Graph, tuple[Proxy, ...]]:
        """The new graph, and its captures."""
        apart = self._apart()
        moved = self._unfit(apart)
        last = [n for n in moved if isinstance(_example(n), Tensor) and not moved >= set(n.users)]
        if not last:
            return self.graph, tuple(self.lifted.values())
        made: dict[Node, Proxy] = {}
        with _without_autocast(self.tx, self.device.type):
            for node in self.graph.nodes:
                if node in last:
                    made[node] = self._before(node)
        for node, proxy in made.items():
            self._capture(node, proxy, moved)
        read = set(self.lifted)
        for node in reversed(list(self.graph.nodes)):
            if node in apart and not node.users:
                self.graph.erase_node(node)
                read.discard(node)
        self.graph.lint()
        kept = (self.lifted[n] for n in self.graph.find_nodes(op="placeholder") if n in read)
        return self.graph, tuple(kept)

    def _apart(self) -> set[Node]:
        """Nodes that depend on no argument of the mod, and not on a context that it enters."""
        apart, has_grad = set[Node](), True
        for node in self.graph.nodes:
            if node.op == "call_function" and node.target in _SWITCHES:
                has_grad = node.args[0]
            elif node.op in ("call_function", "call_method"):
                if _opens_context(node):
                    return set()
                if apart.issuperset(node.all_input_nodes) and "example_value" in node.meta:
                    apart.add(node)
                    if not has_grad:
                        self.without_grad.add(node)
            elif node in self.lifted:
                apart.add(node)
        return apart

    def _unfit(self, apart: set[Node]) -> set[Node]:
        """The nodes that no kernel should compute, and what is computed from them."""
        found = set[Node]()
        for node in self.graph.nodes:
            if node in apart and node.op != "placeholder":
                if not found.isdisjoint(node.all_input_nodes) or self._is_unfit(node):
                    found.add(node)
        return found

    def _is_unfit(self, node: Node) -> bool:
        args, kwargs = map_arg((node.args, node.kwargs), _example)
        watch = _Watch()
        with self.tx.fake_mode, torch.no_grad(), watch:
            _call(node, args, kwargs)
        return watch.is_unfit

    def _before(self, node: Node) -> Any:
        """A value in the graph around the call."""
        if node in self.outer:
            return self.outer[node]
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            whole = self._before(node.args[0])
            if isinstance(whole, (tuple, list)):
                self.outer[node] = whole[node.args[1]]  # pyright: ignore[reportArgumentType, reportCallIssue]
                return self.outer[node]
        args, kwargs = map_arg((node.args, node.kwargs), self._before)
        stops = self._no_grad() if node in self.without_grad else contextlib.nullcontext()
        with stops:
            self.outer[node] = self._create(node.op, node.target, args, kwargs)
        return self.outer[node]

    @contextlib.contextmanager
    def _no_grad(self) -> Iterator[None]:
        """Switch gradients off around nodes. `detach` would stop forward mode as well."""
        before = torch.is_grad_enabled()
        self._switch(False)
        with torch.no_grad():
            yield
        self._switch(before)

    def _switch(self, value: bool) -> None:
        self.tx.output.create_node("call_function", torch._C._set_grad_enabled, (value,), {})

    def _create(self, op: str, target: Any, args: Any, kwargs: Any) -> Any:
        proxy = self.tx.output.create_proxy(op, target, args=args, kwargs=kwargs)
        return wrap_fx_proxy(tx=self.tx, proxy=proxy, example_value=None).as_proxy()

    def _capture(self, node: Node, proxy: Proxy, moved: set[Node]) -> None:
        """Read a captured tensor in place of a node."""
        last = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(last):
            made = self.graph.placeholder(f"made_{len(self.lifted)}", type_expr=Tensor)
        made.meta["example_value"] = proxy.node.meta["example_value"]
        node.replace_all_uses_with(made, lambda user: user not in moved)
        self.lifted[made] = proxy


def _example(node: Node) -> Any:
    return node.meta["example_value"]


def _call(node: Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _opens_context(node: Node) -> bool:
    """Whether a node enters autocast, or a transform of torch.func."""
    place = getattr(node.target, "__module__", None) or ""
    return "functorch" in place or "autocast" in place


class _Watch(TorchDispatchMode):
    """Finds operators that no kernel computes for each score: neither pointwise, nor views or
    reads; and tensors that are made of nothing."""

    is_unfit = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(func, OpOverload) or not _is_fit(func, result):
            self.is_unfit = True
        return result


_FILLS = {
    aten.full,
    aten.zeros,
    aten.ones,
    aten.scalar_tensor,
    aten.full_like,
    aten.zeros_like,
} | {aten.ones_like, aten.new_full, aten.new_zeros, aten.new_ones}


def _is_fit(func: OpOverload, result: Any) -> bool:
    """Whether kernels compute an operator for each score."""
    packet = func.overloadpacket
    if packet in _FILLS:
        return result.dim() == 0
    if packet is aten.lift_fresh:  # of torch.tensor; it counts as a view
        return False
    return (
        torch.Tag.pointwise in func.tags or func.is_view or packet in _READS or packet in _COPIES
    )


@contextlib.contextmanager
def _without_autocast(tx: Any, device: str) -> Iterator[None]:
    """Mods are exact under autocast: so is what they make before the call."""
    if not torch.is_autocast_enabled(device):
        yield
        return
    modes = torch.amp.autocast_mode
    with torch.autocast(device, enabled=False):
        entered = tx.output.create_proxy(
            "call_function", modes._enter_autocast, (device, None, False, None), {}
        )
        yield
        tx.output.create_proxy("call_function", modes._exit_autocast, (entered,), {})
