"""The trackers of the operators.

A tracker is Dynamo's rule for a callable in a traced function. Dynamo imports ours with the first
operator that it traces (trackers.py).
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from traceback import StackSummary
from typing import Any, NamedTuple

import torch
from torch._dynamo.exc import (
    ObservedException,
    TorchDynamoException,
    TorchRuntimeError,
    UncapturedHigherOrderOpError,
    Unsupported,
    UserError,
)
from torch._dynamo.utils import set_example_value
from torch._dynamo.variables import higher_order_ops as hops
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import FunctoolsPartialVariable, UserMethodVariable
from torch._dynamo.variables.lists import BaseListVariable, ListVariable, TupleVariable
from torch._dynamo.variables.nn_module import NNModuleVariable, UnspecializedNNModuleVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.user_defined import FrozenDataClassVariable
from torch.fx import Graph, GraphModule, Proxy
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from flexhop.compat.dynamo.captured import with_scale_in_mod
from flexhop.compat.dynamo.numbers import as_captures
from flexhop.compat.dynamo.results import convert_result, no_tensor, result_of
from flexhop.compat.dynamo.subgraph import speculate
from flexhop.compat.mods.errors import known
from flexhop.compat.mods.graphs import reads_on_host, refuse_by_running, refuse_reads_on_host
from flexhop.compat.mods.location import users_line
from flexhop.compat.mods.made import make_before, spell_numbers
from flexhop.compat.mods.ordered_sets import order_sets
from flexhop.compat.mods.own_backward import note_own_backward
from flexhop.compat.mods.written_graphs import without_writes
from flexhop.compat.operators.vmapped import is_mapped
from flexhop.errors import FlexhopError, ModLoweringError

NUM_INDICES = 4


class ModRules(NamedTuple):
    """The tracker's interface to the rest of flexhop.

    prepare(query, key, value, blocks, call) -> (scale, options), on fake tensors.
    prepare_cached(query, key, value, blocks, pages, call) -> the same, for a call with a cache.
    check_function(function, kind): raise for a wrong signature. check_result(result, kind, name):
    raise for a wrong result, a fake tensor. check_captures(query, kind, captures): raise for
    unusable captures. on_trace(): called before the first graph is written. index_mode: context
    manager under which mods are traced.
    """

    prepare: Callable[..., tuple[float, dict[str, Any]]]
    prepare_cached: Callable[..., tuple[float, dict[str, Any]]]
    check_function: Callable[[Any, str], None]
    check_result: Callable[[Any, str, str], None]
    check_captures: Callable[[Any, str, tuple[Any, ...]], None]
    on_trace: Callable[[], None]
    index_mode: Callable[[], Any]


def as_dynamo_error(error: FlexhopError) -> FlexhopError:
    """Convert an error to one that Dynamo passes to its caller unchanged.

    Dynamo wraps exceptions that it does not know in an internal error. Ours must reach the user
    unchanged, so the class derives from both.
    """
    kind = type(error)
    combined = type(
        kind.__name__, (kind, UncapturedHigherOrderOpError), {"__module__": kind.__module__}
    )
    twin = combined.__new__(combined)
    UncapturedHigherOrderOpError.__init__(twin, str(error))
    twin.facts = error.facts
    return twin


def _cause(error: BaseException | None) -> FlexhopError | None:
    """Our error behind one of Dynamo's."""
    while error is not None and not isinstance(error, FlexhopError):
        error = error.__cause__ or error.__context__
    return error


def python_value(tx: Any, variable: VariableTracker) -> Any:
    """The Python value of a variable: a constant, SymInt, frozen dataclass, dict, or nested tuple
    of them."""
    variable = variable.realize()
    if isinstance(variable, SymNodeVariable):
        return variable.sym_num
    if isinstance(variable, BaseListVariable):
        return tuple(python_value(tx, item) for item in variable.items)
    if isinstance(variable, FrozenDataClassVariable):
        kind = variable.python_type()
        names = [field.name for field in dataclasses.fields(kind)]
        return kind(**{n: static_value(tx, _attribute(tx, variable, n)) for n in names})
    if isinstance(variable, ConstDictVariable):
        return {k.vt.as_python_constant(): static_value(tx, v) for k, v in variable.items.items()}
    return variable.as_python_constant()


def _attribute(tx: Any, variable: VariableTracker, name: str) -> VariableTracker:
    """2.11 to 2.14 call it var_getattr, 2.15 tp_getattro_impl."""
    read = getattr(variable, "var_getattr", None) or variable.tp_getattro_impl
    return read(tx, name)


def static_value(tx: Any, variable: VariableTracker) -> Any:
    """A value that code depends on: guard on a number that Dynamo made symbolic."""
    variable = variable.realize()
    if isinstance(variable, SymNodeVariable):
        return variable.evaluate_expr()
    if isinstance(variable, BaseListVariable):
        return tuple(static_value(tx, item) for item in variable.items)
    return python_value(tx, variable)


def fake_of(proxy: Proxy) -> Any:
    """The fake tensor of a graph's value."""
    return proxy.node.meta["example_value"]


def example_of(proxy: Any) -> Any:
    """The same for a value that may be a number instead of a proxy."""
    return fake_of(proxy) if isinstance(proxy, Proxy) else proxy


class AttentionVariable(hops.TorchHigherOrderOperatorVariable):
    """Tracker of the forward operator: traces both mods into subgraphs and lifts their captures.

    User code calls the operator with the operands of its `door`; the graph gets those of its
    `args_type`.
    """

    _HOP_NAME = "flexhop_attention"
    # A graph break inside a mod must be an error: the eager path would silently need S² memory.
    _ALLOW_FALLBACK_TO_EAGER = False
    rules: ModRules

    def _call_function(
        self, tx: Any, args: Sequence[VariableTracker], kwargs: Any
    ) -> VariableTracker:
        self.rules.on_trace()
        self.value.refusal = None
        try:
            # The wire form comes from a previously traced graph.
            if len(args) == len(self.value.door._fields):
                return self._write_node(tx, self.value.door(*args))
            return _write_wire(tx, self.value, args)
        except (FlexhopError, TorchRuntimeError, Unsupported, ObservedException) as error:
            ours = _cause(error) or self.value.refusal
            if ours is None:
                raise
            raise as_dynamo_error(ours) from None

    def _write_node(self, tx: Any, door: Any) -> VariableTracker:
        tensors = [
            TupleVariable(list(pack.realize().items)) for pack in (door.blocks, door.dropout_seed)
        ]
        operands = [door.query, door.key, door.value, *tensors]
        (q, k, v, lists, seeds), _ = hops.proxy_args_kwargs(operands, {})
        fakes = [example_of(proxy) for proxy in (q, k, v)]
        fake_lists = tuple(fake_of(proxy) for proxy in lists)
        score_mod, call = self.scaled(tx, door.score_mod, door.call)
        scale, options = self.rules.prepare(*fakes, fake_lists, python_value(tx, call))
        derives = any(door_input.realize().requires_grad for door_input in (door.query, door.key))
        score = self.trace_mod(tx, door.query, score_mod, "score_mod", derives=derives)
        mask = self.trace_mod(tx, door.query, door.mask_mod, "mask_mod")
        for kind, (_, captures) in (("score_mod", score), ("mask_mod", mask)):
            self.rules.check_captures(fakes[0], kind, tuple(map(example_of, captures)))
        captures = [tuple(placed(tx, c, fakes[0].device) for c in mod[1]) for mod in (score, mask)]
        args = self.value.args_type(
            query=q, key=k, value=v, score_mod=score[0], mask_mod=mask[0], blocks=lists,
            scale=scale, options=options, score_captures=captures[0], mask_captures=captures[1],
            dropout_seed=seeds,
        )  # fmt: skip
        return self.write(tx, args)

    def scaled(self, tx: Any, mod: VariableTracker, call: VariableTracker) -> tuple[Any, Any]:
        """A score_mod and a call whose scale is a number."""
        scaled, call = with_scale_in_mod(tx, mod, call)
        if scaled is not mod and (function := _function_of(mod)) is not None:
            self.rules.check_function(function, "score_mod")  # its wrapper has another signature
        return scaled, call

    def write(self, tx: Any, args: Any) -> VariableTracker:
        """Emit the node of a call with these operands."""
        wire = self.value.wire(args)
        proxy = tx.output.create_proxy("call_function", self.value, args=wire, kwargs={})
        return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None)

    def trace_mod(
        self, tx: Any, query: VariableTracker, mod: VariableTracker, kind: str,
        *, derives: bool = False,
    ) -> tuple[Proxy, tuple[Any, ...]]:  # fmt: skip
        """A mod as a subgraph, and its captures; derives: whether scores need a gradient."""
        function = _function_of(mod)
        if function is not None:
            self.rules.check_function(function, kind)
        # Example inputs belong to the mod's graph; the user's graph must not create them.
        with hops.discard_graph_changes(tx):
            inputs = _mod_inputs(tx, query, kind, derives)
        try:
            with self.rules.index_mode():
                result, graph, lifted = speculate(tx, mod, inputs, kind, self.value)
                graph = without_writes(tx, graph, len(inputs), kind)
            name = getattr(function, "__name__", type(function).__name__ if function else kind)
            self.rules.check_result(result_of(graph, result), kind, name)
            if kind == "score_mod":
                convert_result(graph, inputs[0].as_proxy().node)
            device = fake_of(query.as_proxy()).device
            spell_numbers(graph)
            with self.rules.index_mode():
                order_sets(tx, graph)
            graph, lifted = as_captures(tx, graph, lifted, device)
        except (Unsupported, UncapturedHigherOrderOpError, UserError) as error:
            raise _cause(error) or _untraceable(kind, error) from None
        except (TorchRuntimeError, ObservedException) as error:  # 2.15 observes the latter
            ours = _cause(error) or self.value.refusal or known(error, kind, _line_of(error))
            if ours is None:
                raise
            raise ours from None
        except (GuardOnDataDependentSymNode, SyntaxError):
            # 2.11 to 2.15: at a branch, Dynamo prints the graph so far, and cannot print none.
            raise reads_on_host(kind) from None
        note_own_backward(graph)
        refuse_reads_on_host(graph, kind)
        with self.rules.index_mode():
            refuse_by_running(tx, graph, kind)
        graph, lifted = make_before(tx, graph, lifted, device)
        _forget_batched_inputs(graph)
        attribute = tx.output.install_subgraph(kind, GraphModule(tx.output.nn_modules, graph))
        return hops.make_attr(tx, attribute), tuple(lifted)


def _mod_inputs(
    tx: Any, query: VariableTracker, kind: str, derives: bool
) -> list[VariableTracker]:
    """Example inputs of a mod: indices, after the element that it transforms, if any."""
    dtype = torch.float64 if fake_of(query.as_proxy()).dtype == torch.float64 else torch.float32
    changes_score, changes_key = kind == "score_mod", kind in ("k_mod", "v_mod")
    count = NUM_INDICES - changes_key  # an element of a key has no query
    inputs = [_scalar(tx, query, torch.int32) for _ in range(count)]
    if changes_score:
        inputs.insert(0, _scalar(tx, query, dtype, requires_grad=derives))
    elif changes_key:
        inputs.insert(0, _scalar(tx, query, dtype))
    return inputs


def _untraceable(kind: str, error: TorchDynamoException) -> FlexhopError:
    """Our error for code that Dynamo could not trace: its first line is the operation."""
    if "body output unsupported" in str(error) or "should output a" in str(error):
        return no_tensor(kind, str(error))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explanations = [line for line in lines if line.startswith("Explanation:")]
    reason = (
        explanations[0].removeprefix("Explanation:").strip()
        if explanations
        else "torch.compile cannot trace it"
    )
    return ModLoweringError(
        mod=kind,
        operation=lines[0].rstrip(".") if lines else type(error).__name__,
        location=_line_of(error),
        reason=reason.rstrip("."),
    )


def _line_of(error: TorchDynamoException) -> str:
    """The user's line that Dynamo could not trace."""
    return users_line("".join((getattr(error, "real_stack", None) or StackSummary()).format()))


def _forget_batched_inputs(graph: Graph) -> None:
    """Drop the example values of captures that a torch.vmap around the call maps.

    2.11 to 2.15: Dynamo's last pass records the symbolic sizes of each input by an operator that
    has no batching rule. It skips inputs without an example.
    """
    for node in graph.find_nodes(op="placeholder"):
        if is_mapped(node.meta.get("example_value")):
            del node.meta["example_value"]


def placed(tx: Any, capture: Any, device: torch.device) -> Any:
    """Move a captured CPU scalar to the query's device, as arithmetic with it would."""
    example = example_of(capture)
    if not isinstance(example, torch.Tensor) or example.device == device:
        return capture
    proxy = tx.output.create_proxy("call_method", "to", args=(capture, device), kwargs={})
    return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None).as_proxy()


def _scalar(
    tx: Any, query: VariableTracker, dtype: torch.dtype, *, requires_grad: bool = False
) -> VariableTracker:
    keywords = {"dtype": dtype, "requires_grad": requires_grad}
    built = {name: VariableTracker.build(tx, value) for name, value in keywords.items()}
    zero = query.call_method(tx, "new_zeros", [VariableTracker.build(tx, [])], built)
    # A mod may write to it, which autograd refuses for a leaf.
    return zero.call_method(tx, "clone", [], {}) if requires_grad else zero


def _function_of(mod: VariableTracker) -> Any:
    """The Python object of a variable, or None if it exists only while tracing."""
    mod = mod.realize()
    if mod.is_python_constant() and not hasattr(mod, "get_function"):
        return mod.as_python_constant()
    if isinstance(mod, FunctoolsPartialVariable):
        function = _function_of(mod.func)
        if function is None:
            return None
        return functools.partial(function, *[None] * len(mod.args), **dict.fromkeys(mod.keywords))
    if not hasattr(mod, "get_function"):
        return getattr(mod, "value", None)
    try:
        function = mod.get_function()
    except NotImplementedError:  # a closure made inside the traced function
        return None
    # A method's variable gives the underlying function, with self among its parameters.
    return types.MethodType(function, mod) if isinstance(mod, UserMethodVariable) else function


class BackwardVariable(hops.TorchHigherOrderOperatorVariable):
    """Tracker of operators that occur only in wire form: in compiled autograd and alone.py."""

    _HOP_NAME = "flexhop_attention_backward"

    def _call_function(
        self, tx: Any, args: Sequence[VariableTracker], kwargs: Any
    ) -> VariableTracker:
        return _write_wire(tx, self.value, args)


def _write_wire(tx: Any, operator: Any, args: Sequence[VariableTracker]) -> VariableTracker:
    """Emit one node for a call in wire form, whose functions are GraphModules."""
    operands = tuple(_graph_operand(tx, arg) for arg in args)
    proxy = tx.output.create_proxy("call_function", operator, args=operands, kwargs={})
    return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None)


def _graph_operand(tx: Any, variable: VariableTracker) -> Any:
    variable = variable.realize()
    if isinstance(variable, (TupleVariable, ListVariable)):
        # Tuples, also where export's file format made lists of them.
        return tuple(_graph_operand(tx, item) for item in variable.items)
    if isinstance(variable, (UnspecializedNNModuleVariable, NNModuleVariable)):
        module = getattr(variable, "value", None)
        if module is None:
            module = tx.output.nn_modules[variable.module_key]
        # A copy: Dynamo does not rename a value that it already knows (2.11 to 2.15).
        module = GraphModule(module, module.graph)
        attribute = hops.make_attr(tx, tx.output.install_subgraph("flexhop_subgraph", module))
        set_example_value(attribute.node, module)
        return attribute
    return variable.as_proxy()


__all__ = ["AttentionVariable", "BackwardVariable", "ModRules", "as_dynamo_error"]
