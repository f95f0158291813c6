"""Derivatives of attention of any order, as programs that identify a function.

A function maps inputs to outputs. Each of them is like one of attention's own values: an input
like query has query's shape and dtype, whether it is query, a tangent of it or a gradient.
Attention itself maps query, key, value and the tensors that score_mod captured to out and lse. A
program is a sequence of steps, each of which turns the last function into a new one:

    "jvp 0 1"      takes tangents of the inputs 0 and 1 as further inputs, and returns, after the
                   outputs, their tangents.
    "vjp 0 > 1 2"  takes the gradient of output 0 as a further input, and returns the gradients of
                   the inputs 1 and 2 alone.

So ("vjp 0 > 0 1 2",) is the backward pass, and appending "vjp 0 1 2 > 0 1 2 3" differentiates it
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexhop.compat.operators import transforms

Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensors]
Program = tuple[str, ...]

QUERY, KEY, VALUE, OUT, LSE = "query", "key", "value", "out", "lse"
ROWS = (QUERY, OUT, LSE)  # values with a row per query; all others are sums over queries
_ARROW = ">"


class Step(NamedTuple):
    """One step of a program."""

    kind: str  # "jvp" or "vjp"
    given: tuple[int, ...]  # inputs with tangents, or outputs with gradients
    wanted: tuple[int, ...] = ()  # vjp: inputs whose gradients are returned

    def word(self) -> str:
        """The step as a word of a program."""
        wanted = [_ARROW, *self.wanted] if self.kind == "vjp" else []
        return " ".join(map(str, [self.kind, *self.given, *wanted]))


def read_step(word: str) -> Step:
    """Parse a word of a program."""
    kind, *rest = word.split()
    if _ARROW not in rest:
        return Step(kind, tuple(map(int, rest)))
    border = rest.index(_ARROW)
    return Step(kind, tuple(map(int, rest[:border])), tuple(map(int, rest[border + 1 :])))


class Signature(NamedTuple):
    """What the inputs and outputs of a function are like: QUERY, ..., LSE, or a capture's name."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def capture_name(position: int) -> str:
    """The name of a captured tensor in a signature."""
    return f"capture {position}"


def capture_position(name: str) -> int | None:
    """The position of a captured tensor; None for other values."""
    kind, _, number = name.partition(" ")
    return int(number) if kind == "capture" else None


def signature(num_captures: int, program: Sequence[str]) -> Signature:
    """Inputs and outputs of the function that a program derives from attention.

    Args:
        num_captures: captures of score_mod, including numbers: they are inputs without
            derivatives.
        program: see above.
    """
    captures = (capture_name(i) for i in range(num_captures))
    inputs: tuple[str, ...] = (QUERY, KEY, VALUE, *captures)
    outputs: tuple[str, ...] = (OUT, LSE)
    for step in map(read_step, program):
        if step.kind == "jvp":
            inputs, outputs = (*inputs, *(inputs[i] for i in step.given)), (*outputs, *outputs)
        else:
            gradients = tuple(outputs[i] for i in step.given)
            outputs = tuple(inputs[i] for i in step.wanted)
            inputs = (*inputs, *gradients)
    return Signature(inputs, outputs)


def run(function: Function, program: Sequence[str], values: Sequence[object]) -> Tensors:
    """Evaluate the function that a program derives from `function`, at the inputs `values`."""
    for word in program:
        step = read_step(word)
        function = (_jvp if step.kind == "jvp" else _vjp)(function, step)
    return function(*values)


def _jvp(function: Function, step: Step) -> Function:
    def pushed(*values: Tensor) -> Tensors:
        count = len(values) - len(step.given)
        primals, tangents = values[:count], values[count:]
        chosen = tuple(primals[i] for i in step.given)
        results, changes = transforms.jvp(_of(function, primals, step.given), chosen, tangents)
        return (*results, *changes)

    return pushed


def _vjp(function: Function, step: Step) -> Function:
    def pulled(*values: Tensor) -> Tensors:
        count = len(values) - len(step.given)
        primals, grads = values[:count], values[count:]
        restricted = _of(function, primals, step.wanted)

        def chosen(*inputs: Tensor) -> Tensors:
            results = restricted(*inputs)
            return tuple(results[i] for i in step.given)

        pull = torch.func.vjp(chosen, *(primals[i] for i in step.wanted))[1]
        return pull(grads)

    return pulled


def _of(function: Function, values: Sequence[Tensor], positions: Sequence[int]) -> Function:
    """`function` of the inputs at `positions`; the others are constants."""

    def restricted(*chosen: Tensor) -> Tensors:
        known = dict(zip(positions, chosen, strict=True))
        return function(*(known.get(i, value) for i, value in enumerate(values)))

    return restricted
