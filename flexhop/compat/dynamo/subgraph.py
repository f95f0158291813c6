"""Dynamo traces a mod into a subgraph."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from traceback import StackSummary
from typing import Any

from torch._dynamo import config
from torch._dynamo.variables import higher_order_ops as hops
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch.fx import Graph

from flexhop.compat.dynamo.captured import captured_numbers
from flexhop.compat.mods.location import users_line
from flexhop.compat.mods.own_backward import is_refused_at_once, own_backward
from flexhop.compat.operators.transforms import is_deriving

__all__ = ["speculate"]


def speculate(
    tx: Any, mod: VariableTracker, inputs: list[VariableTracker], kind: str, operator: Any
) -> tuple[VariableTracker, Graph, Any]:
    """Trace a mod: (what it returns, graph, lifted captures)."""
    # 2.15 forbids a subgraph to return its input, and renamed the permission; it also rejects
    # writes to inputs, which we do ourselves to name the line.
    known = inspect.signature(hops.speculate_subgraph).parameters
    permissions = ("supports_aliasing", "supports_input_input_aliasing", "supports_input_mutation")
    own = _own_functions(tx, kind)
    with _same_side_effects(tx), _guarded_defaults(), captured_numbers(), own:
        (returned, _), graph, lifted = hops.speculate_subgraph(
            tx, mod, inputs, {}, description=f"flexhop {kind}", source_target=operator,
            set_subgraph_inputs="flatten_manual", **{p: True for p in permissions if p in known},
        )  # fmt: skip
    return returned, graph, lifted


@contextlib.contextmanager
def _own_functions(tx: Any, kind: str) -> Iterator[None]:
    """Refuse a torch.autograd.Function inside a score_mod if a transform takes derivatives.

    2.11 to 2.15: Dynamo records such a function, and `note_own_backward` finds it, if one of its
    arguments requires a gradient. Under a transform none says so: Dynamo would trace its forward
    alone, and derivatives would be those of the forward's operators.
    """
    if kind != "score_mod" or not (is_refused_at_once() or is_deriving()):
        yield
        return
    original = AutogradFunctionVariable.call_apply

    def refuse(function: Any, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
        found: list[bool] = []

        def visit(variable: VariableTracker) -> None:
            if variable.is_tensor():
                found.append(variable.as_proxy().node.meta["example_value"].is_floating_point())

        VariableTracker.visit(visit, (args, kwargs))
        if any(found):
            stack = StackSummary.from_list([tx.frame_summary()])
            raise own_backward(users_line("".join(stack.format())))
        return original(function, tx, args, kwargs)

    AutogradFunctionVariable.call_apply = refuse
    try:
        yield
    finally:
        AutogradFunctionVariable.call_apply = original


def _guarded_defaults() -> contextlib.AbstractContextManager[Any]:
    """2.11 and 2.12: Dynamo takes the defaults of a function that has another default in a later
    call for the first ones. Mods are recreated in each call: `lambda s, *_, rate=rate: s * rate`.
    """
    name = "skip_guards_on_constant_func_defaults"
    return config.patch(**{name: False}) if hasattr(config, name) else contextlib.nullcontext()


@contextlib.contextmanager
def _same_side_effects(tx: Any) -> Iterator[None]:
    """Keep the object that records side effects.

    Tracing a subgraph replaces it by a copy. In 2.13, the tracker of an object's `__dict__` holds
    the record that it saw first, and writes there. Such an object would lose the attributes that
    it gets after the call, for example a cache of transformers that its first key fills.
    """
    record = tx.output.side_effects
    yield
    vars(record).update(vars(tx.output.side_effects))
    tx.output.side_effects = record
