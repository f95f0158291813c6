"""Dynamo traces a mod into a subgraph."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from torch._dynamo import config
from torch._dynamo.variables import higher_order_ops as hops
from torch._dynamo.variables.base import VariableTracker
from torch.fx import Graph

__all__ = ["speculate"]


def speculate(
    tx: Any, mod: VariableTracker, inputs: list[VariableTracker], kind: str, operator: Any
) -> tuple[Graph, Any]:
    """Trace a mod: (graph, lifted captures)."""
    # 2.15 forbids a subgraph to return its input, and renamed the permission; it also rejects
    # writes to inputs, which we do ourselves to name the line.
    known = inspect.signature(hops.speculate_subgraph).parameters
    permissions = ("supports_aliasing", "supports_input_input_aliasing", "supports_input_mutation")
    with _same_side_effects(tx), _guarded_defaults():
        (_, _), graph, lifted = hops.speculate_subgraph(
            tx, mod, inputs, {}, description=f"flexhop {kind}", source_target=operator,
            set_subgraph_inputs="flatten_manual", **{p: True for p in permissions if p in known},
        )  # fmt: skip
    return graph, lifted


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
