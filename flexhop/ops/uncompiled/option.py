"""Kernels for calls outside torch.compile: the option, and how such a call runs.

The call becomes the operator, as in a graph, and keeps all rules of autograd, torch.func and
dispatch modes. Instead of the reference, the operator runs code that Inductor compiled for it
alone (compat/operators/alone.py). Every derivative of a call is an operator that does the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from flexhop.compat.compilation import keeping
from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.operators import hop
from flexhop.compat.operators.alone import Alone, is_leaf
from flexhop.compat.operators.retrace import trace_callable
from flexhop.options import KernelOptions

__all__ = ["eager_kernels", "find_alone", "run_alone", "wants_kernels"]

OPTION = "eager_kernels"


class _Entered(threading.local):
    value = False


_ENTERED = _Entered()


@contextlib.contextmanager
def eager_kernels(enabled: bool = True) -> Generator[None, None, None]:
    """Run fused kernels for attention outside torch.compile.

        with flexhop.eager_kernels():
            loss = model(tokens)  # not compiled

    Each problem compiles its kernels at its first call. A second length compiles once more, for
    any length. Every call is one operator, `flexhop_attention`, which activation checkpointing,
    hooks and dispatch modes see, and which is differentiable any number of times in either mode.
    Backward passes need not run inside the context. Compiled calls do not change.

    Args:
        enabled: False turns kernels off again inside. A call's own
            KernelOptions(eager_kernels=...) takes precedence.
    """
    before, _ENTERED.value = _ENTERED.value, enabled
    try:
        yield
    finally:
        _ENTERED.value = before


def wants_kernels(options: Any) -> bool:
    """Whether a call outside torch.compile runs kernels.

    Args:
        options: the user's kernel_options.
    """
    if options is None:
        return _ENTERED.value
    if isinstance(options, Mapping):
        wanted = options.get(OPTION)
    else:
        wanted = KernelOptions.of(options).eager_kernels
    return _ENTERED.value if wanted is None else bool(wanted)


def run_alone(operator: hop.Operator, args: Any) -> list[Tensor]:
    """Run an operator's own compiled code.

    Args:
        operator: any of flexhop's operators.
        args: its operands, with real tensors.

    Returns:
        Its results, flat.
    """
    alone, leaves = _found(operator, args)
    return alone(leaves)


def find_alone(operator: hop.Operator, args: Any) -> Alone:
    """The compiled code that `run_alone` runs."""
    return _found(operator, args)[0]


def _found(operator: hop.Operator, args: Any) -> tuple[Alone, list[Any]]:
    """An operator's compiled code, and what it takes."""
    leaves: list[Any] = []
    key: list[Any] = [operator]
    for operand in args:
        if isinstance(operand, Tensor):
            leaves.append(operand)
            key.append(Tensor)
        elif isinstance(operand, tuple):
            for item in operand:
                if is_leaf(item):
                    leaves.append(item)
                    key.append(Tensor)
                else:
                    key.append(item)
            key.append(len(operand))
        else:
            key.append(tuple(operand.items()) if isinstance(operand, dict) else operand)
    key.append(torch.get_float32_matmul_precision())
    owner = args[operator.callable_positions[0]]
    return keeping(tuple(key), owner, lambda: _alone(operator, args)), leaves


def _alone(operator: hop.Operator, args: Any) -> Alone:
    operands = list(args)
    for position, example in zip(
        operator.callable_positions, operator.examples(*args), strict=True
    ):
        operands[position] = _graph_of(operands[position], example)
    options: Any = args.options
    operands[args._fields.index("options")] = {k: v for k, v in options.items() if k != OPTION}
    return Alone(operator, operands)


def _graph_of(function: Any, example: Sequence[Any]) -> fx.GraphModule:
    """A mod as a graph; vmap turns graphs into functions."""
    if isinstance(function, fx.GraphModule):
        return function
    with hop.isolated_trace(*example), IndexMode():
        return trace_callable(function, list(map(hop.capture_like, example)))
