"""Kernels for calls outside of torch.compile: the option, and the way of such a call.

The call becomes the operator, as in a graph, and keeps all rules of autograd, torch.func and
dispatch modes. Only where the operator would compute its definition, it runs code that Inductor
compiled for this operator alone (compat/alone.py). So every derivative of a call is an operator
that does the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from flexhop.compat import hop
from flexhop.compat.alone import Alone, is_leaf
from flexhop.compat.indexing import IndexMode
from flexhop.compat.kept import keeping
from flexhop.options import KernelOptions

__all__ = ["eager_kernels", "run_alone", "wants_kernels"]

OPTION = "eager_kernels"


class _Entered(threading.local):
    value = False


_ENTERED = _Entered()


@contextlib.contextmanager
def eager_kernels(enabled: bool = True) -> Iterator[None]:
    """Let attention outside of torch.compile run fused kernels.

        with flexhop.eager_kernels():
            loss = model(tokens)  # not compiled

    Each problem compiles its kernels at its first call; lengths that change are compiled once
    more, for any length. Every call is one operator, `flexhop_attention`, that activation
    checkpointing, hooks and dispatch modes see, and that is differentiable any number of times in
    either mode. Backward passes need not run inside the context. Compiled calls do not change.

    Args:
        enabled: False switches kernels off again inside. KernelOptions(eager_kernels=...) of a
            call wins over the context.
    """
    before, _ENTERED.value = _ENTERED.value, enabled
    try:
        yield
    finally:
        _ENTERED.value = before


def wants_kernels(options: Any) -> bool:
    """Whether a call outside of torch.compile runs kernels.

    Args:
        options: what the user gave as kernel_options.
    """
    if options is None:
        return _ENTERED.value
    if isinstance(options, Mapping):
        wanted = options.get(OPTION)
    else:
        wanted = KernelOptions.of(options).eager_kernels
    return _ENTERED.value if wanted is None else bool(wanted)


def run_alone(operator: hop.Operator, args: Any) -> list[Tensor]:
    """Compute an operator by its own compiled code.

    Args:
        operator: any of ours.
        args: its operands, with real tensors.

    Returns:
        Its results, flat.
    """
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
    return keeping(tuple(key), owner, lambda: _alone(operator, args))(leaves)


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
    """A mod as a graph; vmap makes functions of graphs."""
    if isinstance(function, fx.GraphModule):
        return function
    with hop.isolated_trace(*example), IndexMode():
        return hop.trace_callable(function, list(map(hop.capture_like, example)))
