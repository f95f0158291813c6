"""Telling Dynamo about the operators.

A tracker is Dynamo's rule for a callable that it meets in a traced function. Dynamo finds ours by the
operator's name in one private table (the same in 2.11 to 2.15).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._dynamo.exc import UncapturedHigherOrderOpError
from torch._dynamo.utils import set_example_value
from torch._dynamo.variables import higher_order_ops as hops
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.lists import BaseListVariable, ListVariable, TupleVariable
from torch._dynamo.variables.nn_module import NNModuleVariable, UnspecializedNNModuleVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.user_defined import FrozenDataClassVariable
from torch.fx import Graph, GraphModule, Proxy

from flexhop.errors import FlexhopError

NUM_INDICES = 4


class ModRules(NamedTuple):
    """What the tracker asks of the rest of flexhop.

    prepare(query, key, value, blocks, call) -> (scale, options), on fake tensors.
    check_function(function, kind): refuse a wrong signature.
    check_result(result, kind): refuse a wrong result, a fake tensor.
    check_captures(query, kind, captures): refuse unusable captures.
    on_trace(): called before the first graph is written.
    index_mode: context manager under which mods are traced.
    """

    prepare: Callable[..., tuple[float, dict[str, Any]]]
    check_function: Callable[[Any, str], None]
    check_result: Callable[[Any, str], None]
    check_captures: Callable[[Any, str, tuple[Any, ...]], None]
    on_trace: Callable[[], None]
    index_mode: Callable[[], Any]


def as_dynamo_error(error: FlexhopError) -> FlexhopError:
    """The same error as one that Dynamo hands to its caller unchanged.

    Dynamo wraps exceptions that it does not know into an internal error; ours must reach the user
    as they are, so the class derives from both.
    """
    kind = type(error)
    combined = type(kind.__name__, (kind, UncapturedHigherOrderOpError), {"__module__": kind.__module__})
    twin = combined.__new__(combined)
    UncapturedHigherOrderOpError.__init__(twin, str(error))
    twin.facts = error.facts
    return twin


def _python_value(tx: Any, variable: VariableTracker) -> Any:
    """Constant, SymInt, frozen dataclass, or nested tuple of them behind a variable."""
    variable = variable.realize()
    if isinstance(variable, SymNodeVariable):
        return variable.sym_num
    if isinstance(variable, BaseListVariable):
        return tuple(_python_value(tx, item) for item in variable.items)
    if isinstance(variable, FrozenDataClassVariable):
        kind = variable.python_type()
        names = [field.name for field in dataclasses.fields(kind)]
        return kind(**{n: _python_value(tx, variable.var_getattr(tx, n)) for n in names})
    return variable.as_python_constant()


def _fake(proxy: Proxy) -> Any:
    return proxy.node.meta["example_value"]


def _example_of(proxy: Any) -> Any:
    return _fake(proxy) if isinstance(proxy, Proxy) else proxy


class AttentionVariable(hops.TorchHigherOrderOperatorVariable):
    """Tracker of the forward operator: traces both mods into subgraphs and lifts their captures.

    At the door the operator is called as (query, key, value, score_mod, mask_mod, blocks, scale, call);
    the graph gets the wire form of flexhop.ops.args.
    """

    _HOP_NAME = "flexhop_attention"
    # A graph break inside a mod must be an error: the eager path would need S² memory in silence.
    _ALLOW_FALLBACK_TO_EAGER = False
    rules: ModRules

    def _call_function(self, tx: Any, args: Sequence[VariableTracker], kwargs: Any) -> VariableTracker:
        self.rules.on_trace()
        try:
            return self._write_node(tx, *args)
        except FlexhopError as error:
            raise as_dynamo_error(error) from None

    def _write_node(self, tx: Any, *args: VariableTracker) -> VariableTracker:
        query, key, value, score_mod, mask_mod, blocks, _, call = args
        operands = [query, key, value, TupleVariable(list(blocks.realize().items))]
        (q, k, v, lists), _ = hops.proxy_args_kwargs(operands, {})
        fakes = [_fake(proxy) for proxy in (q, k, v)]
        fake_lists = tuple(_fake(proxy) for proxy in lists)
        scale, options = self.rules.prepare(*fakes, fake_lists, _python_value(tx, call))
        score = self._trace_mod(tx, query, score_mod, "score_mod")
        mask = self._trace_mod(tx, query, mask_mod, "mask_mod")
        for kind, (_, captures) in (("score_mod", score), ("mask_mod", mask)):
            self.rules.check_captures(fakes[0], kind, tuple(map(_example_of, captures)))
        wire = (q, k, v, score[0], mask[0], lists, scale, options, score[1], mask[1])
        proxy = tx.output.create_proxy("call_function", self.value, args=wire, kwargs={})
        return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None)

    def _trace_mod(
        self, tx: Any, query: VariableTracker, mod: VariableTracker, kind: str
    ) -> tuple[Proxy, tuple[Any, ...]]:
        function = _function_of(mod)
        if function is not None:
            self.rules.check_function(function, kind)
        with hops.discard_graph_changes(tx):
            inputs = [_scalar(tx, query, torch.int32) for _ in range(NUM_INDICES)]
            if kind == "score_mod":
                dtype = torch.float64 if _fake(query.as_proxy()).dtype == torch.float64 else torch.float32
                inputs = [_scalar(tx, query, dtype, requires_grad=query.requires_grad), *inputs]
        # 2.15 is strict about a subgraph that returns its input, and names the permission anew.
        known = inspect.signature(hops.speculate_subgraph).parameters
        permissions = ("supports_aliasing", "supports_input_input_aliasing")
        with self.rules.index_mode():
            (_, _), graph, lifted = hops.speculate_subgraph(
                tx, mod, inputs, {}, description=f"flexhop {kind}", source_target=self.value,
                set_subgraph_inputs="flatten_manual", **{p: True for p in permissions if p in known},
            )  # fmt: skip
        self.rules.check_result(_result_of(graph), kind)
        name = tx.output.install_subgraph(kind, GraphModule(tx.output.nn_modules, graph))
        return hops.make_attr(tx, name), tuple(lifted)


def _scalar(
    tx: Any, query: VariableTracker, dtype: torch.dtype, *, requires_grad: bool = False
) -> VariableTracker:
    keywords = {"dtype": dtype, "requires_grad": requires_grad}
    built = {name: VariableTracker.build(tx, value) for name, value in keywords.items()}
    return query.call_method(tx, "new_empty", [VariableTracker.build(tx, [])], built)


def _function_of(mod: VariableTracker) -> Any:
    """The Python function behind a variable, or None for what exists only while tracing."""
    mod = mod.realize()
    getter = getattr(mod, "get_function", None)
    if getter is None:
        return None
    try:
        return getter()
    except NotImplementedError:  # a closure made inside the traced function
        return None


def _result_of(graph: Graph) -> Any:
    """Fake result of a traced mod; a mod that returns a constant has no node."""
    result = graph.find_nodes(op="output")[0].args[0]
    if isinstance(result, (tuple, list)) and len(result) == 1:
        result = result[0]
    return result.meta.get("example_value") if isinstance(result, torch.fx.Node) else result


class BackwardVariable(hops.TorchHigherOrderOperatorVariable):
    """Tracker of the backward operator, met only by compiled autograd: its subgraphs are GraphModules."""

    _HOP_NAME = "flexhop_attention_backward"

    def _call_function(self, tx: Any, args: Sequence[VariableTracker], kwargs: Any) -> VariableTracker:
        operands = tuple(_graph_operand(tx, arg) for arg in args)
        proxy = tx.output.create_proxy("call_function", self.value, args=operands, kwargs={})
        return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None)


def _graph_operand(tx: Any, variable: VariableTracker) -> Any:
    variable = variable.realize()
    if isinstance(variable, (TupleVariable, ListVariable)):
        return variable.python_type()(_graph_operand(tx, item) for item in variable.items)
    if isinstance(variable, (UnspecializedNNModuleVariable, NNModuleVariable)):
        module = getattr(variable, "value", None)
        if module is None:
            module = tx.output.nn_modules[variable.module_key]
        attribute = hops.make_attr(tx, tx.output.install_subgraph("flexhop_subgraph", module))
        set_example_value(attribute.node, module)
        return attribute
    return variable.as_proxy()


def register(forward: str, backward: str, rules: ModRules) -> None:
    """Tell Dynamo the trackers of our operators, by the operators' names."""
    AttentionVariable.rules = rules
    hops._hop_name_to_variable_class[forward] = AttentionVariable
    hops._hop_name_to_variable_class[backward] = BackwardVariable


__all__ = ["ModRules", "as_dynamo_error", "register"]
