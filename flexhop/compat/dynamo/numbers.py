"""Captured Python numbers that change between calls: pass them to kernels as tensors.

Under dynamic shapes, Dynamo turns a changing float into a tensor, and a symbol behind `.item()`. A
mod that used the symbol would be recompiled for every value: AOTAutograd gives up on a symbolic
float, and specialises, wherever it is more than an operand of arithmetic. So each such number
becomes a captured 0-d tensor, in the dtype in which the mod uses it. Arithmetic among numbers is
done before the call. Symbolic ints stay: kernels take them as arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["as_captures"]

WIDE = torch.float64
_ARITHMETIC = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.pow, operator.neg, operator.pos, operator.abs,
}  # fmt: skip
_CLAMPS = {"clamp", "clip"}
_FILLS = {"full", "full_like", "new_full"}


class _NeedsNumber(Exception):
    """An operation that accepts only a number."""


def as_captures(
    tx: Any, graph: Graph, lifted: Sequence[Proxy], device: torch.device
) -> tuple[Graph, tuple[Proxy, ...]]:
    """A mod's graph and captures, with tensors in place of symbolic floats.

    Args:
        tx: Dynamo's translator.
        graph: of the mod, as Dynamo traced it.
        lifted: its captures, the last inputs of the graph.
        device: of the call.

    An operation that accepts no tensor there, such as leaky_relu, gets this call's number, with a
    guard: calls with another number recompile.
    """
    if not any(map(_is_number, graph.nodes)):
        return graph, tuple(lifted)
    return _Rewriting(tx, graph, lifted, device).run()


def _float(number: Any) -> float:
    """A number that operations take as it is; a symbolic one is guarded."""
    node = getattr(number, "node", None)
    if node is not None and not node.expr.free_symbols:
        # 2.15: a constant can be ToFloat(0.0), which SymPy cannot compare.
        return float(node.hint)
    return float(number)


def _is_number(node: Node) -> bool:
    """Whether a value is a symbolic float that the user did not read from a tensor."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.SymFloat):
        return False
    is_read = node.op == "call_method" and node.target == "item"
    return not (is_read and free_unbacked_symbols(value))


class _Rewriting:
    """One pass over the graph of a mod."""

    def __init__(
        self, tx: Any, graph: Graph, lifted: Sequence[Proxy], device: torch.device
    ) -> None:
        self.tx = tx
        self.old = graph
        self.device = device
        self.graph = Graph()
        self.made: dict[Node, Node] = {}  # by the node of the old graph
        self.captures: list[tuple[Node, Proxy]] = []
        self.numbers: dict[tuple[Node, torch.dtype], Node] = {}
        inputs = graph.find_nodes(op="placeholder")
        self.outer = dict(zip(inputs[len(inputs) - len(lifted) :], lifted, strict=True))
        self.before = _Before(tx, device)

    def run(self) -> tuple[Graph, tuple[Proxy, ...]]:
        """The new graph, and its captures."""
        for node in self.old.nodes:
            if node.op == "output":
                self.graph.output(self._mapped(node.args[0]))
            elif node.op == "placeholder":
                self._input(node)
            elif not _is_number(node):
                self._operation(node)
        kept = [(node, proxy) for node, proxy in self.captures if node.users]
        for node, _ in self.captures:
            if not node.users:
                self.graph.erase_node(node)
        self.graph.lint()
        return self.graph, tuple(proxy for _, proxy in kept)

    def _input(self, node: Node) -> None:
        if _is_number(node):
            return
        self.made[node] = self.graph.node_copy(node)
        if node in self.outer:
            self.captures.append((self.made[node], self.outer[node]))

    def _operation(self, node: Node) -> None:
        """Copy a node, with tensors for its numbers, or numbers if it accepts no tensors."""
        if not any(map(_is_number, node.all_input_nodes)):
            self.made[node] = self.graph.node_copy(node, self.made.__getitem__)
            return
        before = set(self.graph.nodes)
        try:
            self.made[node] = self._with_tensors(node)
        except _NeedsNumber:
            for made in reversed(self.graph.nodes):
                if made not in before and made.op != "placeholder":
                    self.graph.erase_node(made)
            args, kwargs = self._mapped(node.args), self._mapped(node.kwargs)
            self.made[node] = self._create(node, (node.op, node.target, args, kwargs))

    def _with_tensors(self, node: Node) -> Node:
        dtype = _dtype_of_use(node)
        name = _name(node)
        if name in _FILLS:
            return self._filled(node, dtype)
        args, kwargs = (self._mapped(part, dtype) for part in (node.args, node.kwargs))
        if name in _CLAMPS:
            named = dict(zip(("input", "min", "max"), args, strict=False)) | dict(kwargs)
            first, least, most = (named.get(part) for part in ("input", "min", "max"))
            bounds = {"min": self._tensor(least, dtype), "max": self._tensor(most, dtype)}
            return self._create(node, (node.op, node.target, (first,), bounds))
        if name in ("add", "sub") and isinstance(kwargs.get("alpha"), Node):
            scaled = self.graph.call_function(operator.mul, (args[1], kwargs["alpha"]))
            self._note(scaled, node)
            return self._create(node, (node.op, node.target, (args[0], scaled), {}))
        if name == "masked_fill":  # 2.11 to 2.15: no batching rule for one with a tensor
            named = dict(zip(("input", "mask", "value"), args, strict=False)) | dict(kwargs)
            operands = (named["mask"], named["value"], named["input"])
            return self._create(node, ("call_function", torch.where, operands, {}))
        return self._create(node, (node.op, node.target, args, kwargs))

    def _filled(self, node: Node, dtype: torch.dtype) -> Node:
        """A tensor filled with a number: zeros, plus the number."""
        value = node.kwargs.get("fill_value", node.args[-1])
        result = _example(node)
        if not (isinstance(value, Node) and _is_number(value) and result.is_floating_point()):
            raise _NeedsNumber
        args, kwargs = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda arg: 0.0 if arg is value else self._mapped(arg)
        )
        zeros = self._create(node, (node.op, node.target, args, kwargs))
        number = self._number(value, dtype)
        return self._create(node, ("call_function", operator.add, (zeros, number), {}))

    def _tensor(self, bound: Any, dtype: torch.dtype) -> Any:
        """A bound of a clamp as a tensor, if present: both must be tensors, or neither."""
        if bound is None or isinstance(bound, Node):
            return bound
        full = self.graph.call_function(
            torch.full, ((), bound), {"dtype": dtype, "device": self.device}
        )
        self._note(full, full)
        return full

    def _create(self, node: Node, call: tuple[str, Any, Any, Any]) -> Node:
        made = self.graph.create_node(*call)
        self._note(made, node)
        return made

    def _note(self, made: Node, like: Node) -> None:
        """Metadata of a new node; raises _NeedsNumber if it cannot be computed from tensors."""
        made.meta = dict(like.meta)
        args, kwargs = torch.fx.node.map_arg((made.args, made.kwargs), _example)
        try:
            with self.tx.fake_mode, torch.enable_grad(), _Watch():
                if made.op == "call_method":
                    value = getattr(args[0], made.target)(*args[1:], **kwargs)
                else:
                    value = made.target(*args, **kwargs)
        except (TypeError, RuntimeError, ValueError) as error:
            raise _NeedsNumber from error
        made.meta["example_value"] = value

    def _mapped(self, value: Any, dtype: torch.dtype | None = None) -> Any:
        """Operands in the new graph; numbers as tensors of a dtype, or without one as they are."""

        def new(node: Node) -> Any:
            if not _is_number(node):
                return self.made[node]
            return _float(_example(node)) if dtype is None else self._number(node, dtype)

        return torch.fx.node.map_arg(value, new)

    def _number(self, node: Node, dtype: torch.dtype) -> Node:
        """The input that holds a number in a dtype."""
        if (node, dtype) not in self.numbers:
            proxy = self.before.cast(self.before.value(node, self.outer), dtype)
            last = self.graph.find_nodes(op="placeholder")[-1]
            with self.graph.inserting_after(last):
                made = self.graph.placeholder(f"number_{len(self.numbers)}", type_expr=Tensor)
            made.meta["example_value"] = _example(proxy.node)
            self.numbers[node, dtype] = made
            self.captures.append((made, proxy))
        return self.numbers[node, dtype]


class _Before:
    """Numbers as tensors in the graph around a mod."""

    def __init__(self, tx: Any, device: torch.device) -> None:
        self.tx = tx
        self.device = device
        self.known: dict[Node, Proxy] = {}

    def value(self, node: Node, outer: dict[Node, Proxy]) -> Proxy:
        """A number, [] fp64 on the device of the call.

        Args:
            node: in the graph of a mod, or in one around it.
            outer: captures of the graph of the mod, by its inputs.
        """
        if node not in self.known:
            self.known[node] = self._value(node, outer)
        return self.known[node]

    def cast(self, number: Proxy, dtype: torch.dtype) -> Proxy:
        """A number in another dtype."""
        return number if dtype == WIDE else self._call("call_method", "to", (number, dtype))

    def _value(self, node: Node, outer: dict[Node, Proxy]) -> Proxy:
        if node.op == "placeholder":
            proxy = outer[node] if node in outer else _around(self.tx, node)
            if isinstance(_example(proxy.node), Tensor):
                return self._call("call_method", "to", (proxy, self.device, WIDE))
            return self.value(proxy.node, outer)
        if node.op == "call_method" and node.target == "item":
            (tensor,) = node.args
            proxy = self._outside(tensor, outer)
            return self._call("call_method", "to", (proxy, self.device, WIDE))
        function = _on_tensors(node.target)
        args = [self._operand(arg, outer) for arg in node.args]
        return self._call("call_function", function, tuple(args))

    def _operand(self, arg: Any, outer: dict[Node, Proxy]) -> Any:
        if not isinstance(arg, Node):
            return arg
        if isinstance(_example(arg), torch.SymFloat):
            return self.value(arg, outer)
        keywords = {"dtype": WIDE, "device": self.device}
        operands = ((), self._outside(arg, outer))
        return self._call("call_function", torch.full, operands, keywords)

    def _outside(self, node: Node, outer: dict[Node, Proxy]) -> Proxy:
        """The outer value of a node in a mod's graph, or in one around it."""
        if node in outer:
            return outer[node]
        tracer = self.tx.output.current_tracer
        while tracer is not None and tracer.graph is not node.graph:
            tracer = tracer.parent
        if tracer is None:
            raise _NeedsNumber
        return Proxy(node, tracer)

    def _call(self, op: str, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> Proxy:
        proxy = self.tx.output.create_proxy(op, target, args=args, kwargs=kwargs or {})
        return wrap_fx_proxy(tx=self.tx, proxy=proxy, example_value=None).as_proxy()


def _around(tx: Any, node: Node) -> Proxy:
    """The outer value of an input of a graph that Dynamo is writing."""
    tracer = tx.output.current_tracer
    while tracer is not None:
        for outside, inside in tracer.lifted_freevars.items():
            if inside.node is node:
                return outside
        tracer = tracer.parent
    raise _NeedsNumber


def _on_tensors(function: Any) -> Callable[..., Any]:
    """The tensor version of a function of symbols."""
    if function in _ARITHMETIC:
        return function
    if function is torch.sym_float:
        return torch.clone
    name = getattr(function, "__name__", "")
    found = getattr(torch, name.removeprefix("_sym_"), None) if name.startswith("_sym_") else None
    if found is None:
        raise _NeedsNumber
    return found


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _dtype_of_use(node: Node) -> torch.dtype:
    """The dtype of a Python float among an operation's tensors; at least fp32."""
    operands = [_example(arg) for arg in node.all_input_nodes]
    tensors = [value for value in operands if isinstance(value, Tensor)]
    result = _example(node)
    found = torch.get_default_dtype()
    if isinstance(result, Tensor) and result.is_floating_point():
        found = result.dtype
    elif tensors:
        found = tensors[0].dtype
        for tensor in tensors:
            found = torch.promote_types(found, tensor.dtype)
        found = found if found.is_floating_point else torch.get_default_dtype()
    return torch.promote_types(found, torch.float32)


def _example(node: Node) -> Any:
    return node.meta["example_value"]


class _Watch(TorchDispatchMode):
    """Finds operations that would read a tensor's value on the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise _NeedsNumber
        return func(*args, **(kwargs or {}))
