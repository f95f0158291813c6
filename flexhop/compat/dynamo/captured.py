"""Numbers that mods read, as Dynamo makes variables of them: of NumPy, and floats that change.

All names below exist with these signatures on torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.source import CallMethodItemSource, Source
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import FunctoolsPartialVariable
from torch._dynamo.variables.lists import BaseListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable

__all__ = ["captured_numbers", "with_scale_in_mod"]


@contextlib.contextmanager
def captured_numbers() -> Iterator[None]:
    """While mods are traced: NumPy's scalars are numbers, and floats belong to the whole graph.

    Dynamo makes a tensor of a NumPy scalar, which `float`, `int` and `item` then cannot read in a
    subgraph. Of a float that changed it makes a tensor as well, and reads it by an `item` in the
    subgraph that asks first. No other subgraph may use that.
    """
    patches = [
        mock.patch.object(VariableBuilder, "wrap_numpy_ndarray", _wrap_scalar(VariableBuilder)),
        mock.patch.object(VariableBuilder, "wrap_symfloat", _wrap_float(VariableBuilder)),
        mock.patch.object(ConstantVariable, "call_method", _with_item(ConstantVariable)),
        mock.patch.object(ConstantVariable, "const_getattr", _no_constant(ConstantVariable)),
        mock.patch.object(SymNodeVariable, "call_method", _with_item(SymNodeVariable)),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _wrap_scalar(kind: Any) -> Any:
    original = kind.wrap_numpy_ndarray

    def wrap(builder: Any, value: Any) -> VariableTracker:
        number = value.item() if value.ndim == 0 else None
        if not isinstance(number, (bool, int, float)):
            return original(builder, value)
        return VariableBuilder(builder.tx, CallMethodItemSource(builder.get_source()))(number)

    return wrap


def _wrap_float(kind: Any) -> Any:
    original = kind.wrap_symfloat

    def wrap(builder: Any, value: float) -> VariableTracker:
        tracers = builder.tx.output.tracers
        inner = tracers[1:]
        del tracers[1:]
        try:
            return original(builder, value)
        finally:
            tracers.extend(inner)

    return wrap


def _with_item(kind: Any) -> Any:
    """NumPy's `number.item()`: the number."""
    original = kind.call_method

    def call(number: Any, tx: Any, name: str, args: Any, kwargs: Any) -> VariableTracker:
        if name == "item" and not args and not kwargs:
            return number
        return original(number, tx, name, args, kwargs)

    return call


def _no_constant(kind: Any) -> Any:
    """Leave `number.item` to `call_method`, as Dynamo does for methods that numbers have."""
    original = kind.const_getattr

    def read(number: Any, tx: Any, name: str) -> Any:
        if name == "item":
            raise NotImplementedError
        return original(number, tx, name)

    return read


def _reconstruct(source: Any, codegen: Any) -> None:
    """Bytecode that reads `base.item()`; Dynamo reads such a source in guards alone."""

    def load() -> None:
        codegen(source.base)
        codegen.extend_output(codegen.create_load_attrs("item"))

    codegen.add_push_null(load)
    codegen.extend_output(create_call_function(0, False))


if CallMethodItemSource.reconstruct is Source.reconstruct:
    CallMethodItemSource.reconstruct = _reconstruct


def _scaled(mod: Callable[..., Tensor], scale: float, score: Tensor, *indices: Tensor) -> Tensor:
    """What score_mod computes from a score that lacks the scale."""
    return mod(score * scale, *indices)


def with_scale_in_mod(
    tx: Any, score_mod: VariableTracker, call: VariableTracker
) -> tuple[VariableTracker, VariableTracker]:
    """A score_mod and a call (ops/call.py, as a tuple), whose scale is 1 if it was symbolic.

    A scale is a constant of its kernel. Dynamo makes a float symbolic once it has changed, and one
    that is computed from a symbolic length always is. The operator would guard on its value and
    compile again for every value. So score_mod captures it.
    """
    call = call.realize()
    assert isinstance(call, BaseListVariable)
    scale, *others = call.items
    if not isinstance(scale.realize(), SymNodeVariable):
        return score_mod, call
    scaled = VariableTracker.build(tx, _scaled)
    one = VariableTracker.build(tx, 1.0)
    return FunctoolsPartialVariable(scaled, [score_mod, scale], {}), TupleVariable([one, *others])
