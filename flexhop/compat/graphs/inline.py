"""Inductor: lower a formula of plain PyTorch operators in place of one operator.

The formula is traced as AOTAutograd would trace it, and its nodes are lowered one by one into the
current graph. An operator can also be called as it is. The names below are the same in torch 2.11
to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import process_subgraph_nodes
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from flexhop.compat.kernels.inductor import empty
from flexhop.compat.operators import hop
from flexhop.compat.operators.retrace import has_writes
from flexhop.compat.operators.transforms import write_zeros

__all__ = [
    "call_at_run_time",
    "decompose",
    "fake",
    "fake_operands",
    "leaves",
    "lower_formula",
    "lower_operands",
    "separate",
    "trace",
    "trace_fresh",
    "while_loop",
    "with_strides",
]

Tensors = tuple[torch.Tensor, ...]
aten, prims = torch.ops.aten, torch.ops.prims
_DIVISIONS = (aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode)


def fake_operands() -> tuple[Any, ...]:
    """Operands of the node being lowered, with fake tensors and SymInts in place of IR."""
    return torch.fx.node.map_arg(V.graph.current_node.args, _fake)


def _fake(node: torch.fx.Node) -> Any:
    if node.op == "get_attr":
        value = V.graph.module
        for name in str(node.target).split("."):
            value = getattr(value, name)
        if isinstance(value, torch.fx.GraphModule):
            return value
    return node.meta["val"]


def decompose(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph of `trace_callable` with Inductor's decompositions, as the compiler sees it."""
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with hop.isolated_trace(*inputs), torch.no_grad():
        run = torch.fx.Interpreter(graph).run
        return make_fx(run, decomposition_table=select_decomp_table())(*inputs)


def fake(size: Sequence[Any], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """An example input of a formula, contiguous, on the device of `like`."""
    with V.fake_mode:
        return torch.empty(size, dtype=dtype, device=like.device)


leaves = _pytree.tree_leaves


def separate(tree: Any) -> tuple[list[int], Callable[[Sequence[Any]], Any]]:
    """Split a tree into graph inputs (tensors, SymInts, SymFloats) and the rest.

    Returns:
        The positions of the inputs among the leaves of `tree`; the function from other values of
        these leaves to the tree that holds them.
    """
    flat, spec = _pytree.tree_flatten(tree)
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat)
    positions = [i for i, leaf in enumerate(flat) if isinstance(leaf, kinds)]
    # What `rebuild` keeps alive: it gets other values for the inputs.
    flat = [None if isinstance(leaf, kinds) else leaf for leaf in flat]

    def rebuild(values: Sequence[Any]) -> Any:
        known = dict(zip(positions, values, strict=True))
        return _pytree.tree_unflatten([known.get(i, leaf) for i, leaf in enumerate(flat)], spec)

    return positions, rebuild


def lower_operands(formula: Callable[[Any], Sequence[Any]], args: Any) -> list[Any]:
    """Lower a formula of an operator's operands.

    Args:
        formula: of a named tuple like `args` with tensors and SymInts.
        args: the operands of the node that is being lowered, as IR.

    Returns:
        The formula's results as IR.
    """
    fakes = type(args)(*fake_operands())
    positions, rebuild = separate(fakes)
    examples, values = ([leaves(tree)[i] for i in positions] for tree in (fakes, args))
    return lower_formula(lambda *given: formula(rebuild(given)), examples, values)


def lower_formula(
    formula: Callable[..., Sequence[Any]], fakes: Sequence[Any], values: Sequence[Any]
) -> list[Any]:
    """Lower `formula`.

    Args:
        formula: of tensors and SymInts; a sequence of tensors. Writes to none of its inputs.
        fakes: its example inputs.
        values: the same inputs as IR and sympy expressions.

    Returns:
        The formula's results as IR.
    """
    graph = trace(formula, fakes)
    for part in graph.modules():
        if isinstance(part, torch.fx.GraphModule):
            part.graph.eliminate_dead_code()
            write_zeros(part)
            _hide_scatter_indices(part)
            _hide_dividends(part)
    _adopt_attributes(graph)
    boxes = (ir.StorageBox, ir.BaseView)
    boxed = [ir.TensorBox(v) if isinstance(v, boxes) else v for v in values]
    results = list(process_subgraph_nodes(graph, boxed))
    _keep_loop_memory()
    return results


def trace(formula: Callable[..., Any], fakes: Sequence[Any]) -> torch.fx.GraphModule:
    """The graph of a formula, as AOTAutograd would trace it."""
    with V.fake_mode, torch.no_grad():
        return make_fx(formula, decomposition_table=select_decomp_table())(*fakes)


def trace_fresh(function: Callable[..., Any], likes: Sequence[Any]) -> Any:
    """The graph of a function (a tensor or a tuple of them) of inputs like these."""
    with V.fake_mode:
        fresh = [
            torch.empty(t.shape, dtype=t.dtype, device=t.device)
            if isinstance(t, torch.Tensor)
            else t
            for t in likes
        ]

    def written(*values: Any) -> Any:
        with _DenseTangents():
            return function(*values)

    graph = trace(written, fresh)
    if has_writes(graph):
        graph = trace(torch.func.functionalize(graph), fresh)
    for node in graph.graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


class _DenseTangents(TorchDispatchMode):
    """Memory for tangents that can be written to.

    Forward mode within forward mode multiplies by tangents that are 0, and gives the result's
    tangent the layout of the result, which is an expanded 0.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Intercept the allocation."""
        if func is aten._new_zeros_with_same_feature_meta.default and not kwargs:
            tangent, result = args
            return aten.full.default(
                list(result.shape), 0, dtype=tangent.dtype, device=tangent.device
            )
        return func(*args, **(kwargs or {}))


def _keep_loop_memory() -> None:
    """Keep other buffers from reusing the memory that a loop starts with.

    Its body writes there in place and returns it as a result, but Inductor (2.11 to 2.15) takes
    the result for another buffer and this one for free.
    """
    for operation in V.graph.operations:
        if isinstance(operation, ir.WhileLoop):
            V.graph.never_reuse_buffers.update(b.get_name() for b in operation.carried_inputs)


def _hide_scatter_indices(part: torch.fx.GraphModule) -> None:
    """Make the addresses of atomic additions opaque to Inductor's C++ kernels.

    In a transposed tile, 2.11 to 2.14 replace a loop counter twice if the address is linear in it,
    and sums go elsewhere; 2.11 to 2.15 fail if the address is the same for a whole vector. A
    bitwise `or` with a comparison that is never true avoids both.
    """
    nodes = part.graph.find_nodes(op="call_function", target=aten.index_put.default)
    for node in nodes:
        total, indices, values, *accumulate = node.args
        if accumulate != [True] or total.meta["val"].is_complex():  # which no such kernel adds
            continue
        with part.graph.inserting_before(node):
            rows = _per_place(part.graph, values, total, len(indices))
            never = _insert(part.graph, aten.lt.Tensor, rows, rows)
            never = _insert(part.graph, prims.convert_element_type.default, never, torch.int64)
            hidden = [_insert(part.graph, aten.bitwise_or.Tensor, i, never) for i in indices]
        node.args = (total, hidden, values, True)
    part.recompile()


def _per_place(graph: torch.fx.Graph, values: Any, total: Any, indexed: int) -> Any:
    """One of the values to add at each place, with shapes that broadcast with the places.

    A place's values fill the dimensions of `total` that have no index.
    """
    for _ in range(min(total.meta["val"].dim() - indexed, values.meta["val"].dim())):
        values = _insert(graph, aten.select.int, values, -1, 0)
    return values


def _hide_dividends(part: torch.fx.GraphModule) -> None:
    """Make dividends opaque if an integer quotient may be an index of a read.

    Inductor's C++ backend (2.11 to 2.15) splits a loop by the divisor of its counter, and drops
    the rest of a length that the divisor does not divide.
    """
    for node in list(part.graph.nodes):
        divides = node.op == "call_function" and node.target in _DIVISIONS
        if not divides or not isinstance(node.args[0], torch.fx.Node):
            continue
        if node.meta["val"].is_floating_point():
            continue
        with part.graph.inserting_before(node):
            hidden = _insert(part.graph, aten.bitwise_or.Scalar, node.args[0], 0)
        node.args = (hidden, *node.args[1:])
    part.recompile()


def _insert(graph: torch.fx.Graph, target: Any, *args: Any) -> torch.fx.Node:
    node = graph.call_function(target, args)
    with V.fake_mode:
        node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
    return node


def _adopt_attributes(graph: torch.fx.GraphModule) -> None:
    """Move the attributes that nodes name (loop bodies, constants) to the module being lowered."""
    root: Any = V.graph.module
    for node in graph.graph.find_nodes(op="get_attr"):
        value = getattr(graph, node.target)
        number = 0
        while hasattr(root, name := f"flexhop_{node.target}_{number}"):
            number += 1
        setattr(root, name, value)
        node.target = name


def while_loop(
    condition: Callable[..., torch.Tensor],
    body: Callable[..., Tensors],
    carried: Tensors,
    fixed: Sequence[Any],
) -> Tensors:
    """Repeat `carried = body(*carried, *fixed)` while `condition(*carried, *fixed)`, when traced.

    Args:
        condition: returns a 0-d bool tensor.
        body: returns fresh tensors with the sizes, strides and dtypes of `carried`.
        carried: contiguous tensors.
        fixed: tensors, ints and SymInts.
    """
    known, symbols = _symbols((*carried, *fixed))
    given = tuple(_with_plain_sizes(value, known) for value in fixed)

    def without_symbols(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values: function(*values[: len(values) - len(symbols)])

    if symbols:
        condition, body = without_symbols(condition), without_symbols(body)
    return torch.ops.higher_order.while_loop(condition, body, carried, (*given, *symbols))


def _symbols(values: Sequence[Any]) -> tuple[set[Any], list[Any]]:
    """The symbols that a loop knows, and those among them that it has to be given.

    Inductor takes the symbols of a loop from sizes, strides and numbers that are one, and stops at
    others, as in 3 * s0. These are given to the loop as numbers.
    """
    numbers = [value for value in values if isinstance(value, torch.SymInt)]
    for tensor in (value for value in values if isinstance(value, torch.Tensor)):
        numbers += [n for n in (*tensor.shape, *tensor.stride()) if isinstance(n, torch.SymInt)]
    exprs = {number.node.expr: number for number in numbers}
    known = {expr for expr in exprs if expr.is_Symbol}
    found: dict[Any, Any] = {}
    for expr, number in exprs.items():
        factor, rest = expr.as_coeff_Mul()
        if rest.is_Symbol and rest not in known:
            found.setdefault(rest, number // int(factor))
    return known | found.keys(), list(found.values())


def _with_plain_sizes(value: Any, known: Collection[Any]) -> Any:
    """A tensor whose sizes have known symbols. Others, as of `arange(1, n)`, get a guard."""
    if not isinstance(value, torch.Tensor):
        return value

    def is_known(size: Any) -> bool:
        return not isinstance(size, torch.SymInt) or size.node.expr.free_symbols <= {*known}

    if all(map(is_known, value.shape)):
        return value
    return value.expand([size if is_known(size) else int(size) for size in value.shape])


def call_at_run_time(
    operator: Any, tensors: Sequence[Any], sizes: Sequence[Any], number: int
) -> None:
    """Call operator(marked, tensors, sizes, number) -> () between kernels, from Python.

    The operator's schema writes to its first argument, so nothing drops the call. This is an empty
    tensor of its own: what reads `tensors` later may still be fused. A CUDA graph would replay
    without Python, so this graph is not recorded in one.
    """
    marked = empty([0], None, torch.float32, tensors[0].get_device())
    marked.realize()
    ir.FallbackKernel.create(operator, marked, list(tensors), list(sizes), number)
    V.graph.disable_cudagraphs_reason = f"{operator} is called from Python"


def with_strides(value: Any, strides: Sequence[Any]) -> Any:
    """IR of `value` stored with `strides`."""
    return ir.ExternKernel.require_exact_strides(value, strides)
