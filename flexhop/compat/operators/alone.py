"""Compile a single operator call with Inductor, and call it with real tensors.

Dynamo selects the compiled code that fits the tensors, and compiles for any length after the
second. Its decision is cached for tensors of exactly the same shapes, strides and dtypes, because
nothing else affects it; asking Dynamo takes longer than a short kernel.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from flexhop.compat.compilation import remember
from flexhop.compat.mods.lift import own_code
from flexhop.compat.mods.wrapped import apart
from flexhop.compat.operators.hop import Operator, pytree
from flexhop.compat.operators.transforms import above_autograd

__all__ = ["Alone", "is_leaf"]

_MOST = 4096  # cached problems per call; a server that sees every length evicts the oldest
_lock = threading.RLock()


class _Known(NamedTuple):
    """Compiled code, and the mapping of the call's operands and results to it."""

    run: Callable[[list[Any]], Sequence[Any]]
    inputs: tuple[tuple[bool, Any], ...]  # (True, position among leaves) or (False, a number)
    results: tuple[int, ...]


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[Any], note: Callable[..., None]
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs with Inductor.

    note(run, values, results): called whenever the innermost code runs; it takes a list of inputs.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_inner(*given: Any, **more: Any) -> Any:
        code = compile_fx_inner(*given, **more)
        run = getattr(code, "current_callable", None) or code

        def noting(values: list[Any]) -> Any:
            kept = list(values)
            results = run(values)
            note(run, kept, results)
            return results

        noting._boxed_call = True  # as AOTAutograd requires
        return noting

    return compile_fx(module, inputs, inner_compile=compile_inner)


class Alone:
    """A call with fixed functions and options, and changing tensors and numbers."""

    def __init__(self, operator: Operator, operands: Sequence[Any]) -> None:
        """Prepare a call like that of `operands`, whose functions are graphs."""
        self.function = _function_of(operator, operands)
        self.latest: tuple[Any, Sequence[Any], Sequence[Any]] | None = None
        self.known: dict[Hashable, _Known] = {}
        self.compiled = self._compile()

    def _compile(self) -> Callable[..., Any]:
        return torch.compile(own_code(self.function), backend=self._backend, fullgraph=True)

    def __call__(self, leaves: Sequence[Any]) -> list[Tensor]:
        """The operator's results, flat."""
        key = _problem_of(leaves)
        found = self.known.get(key)
        if found is None:
            return self._first(key, leaves)
        # Generated code empties the list.
        return _run_decided(*found, leaves)

    def decided(self, leaves: Sequence[Any]) -> Callable[[Sequence[Any]], list[Tensor]] | None:
        """What runs such leaves: tensors of these sizes, strides, dtypes and devices.

        None if Dynamo has to be asked at every call, or was not yet.
        """
        found = self.known.get(_problem_of(leaves))
        if found is None:
            return None
        return functools.partial(_run_decided, *found)

    def code_for(self, leaves: Sequence[Any]) -> Callable[[], Sequence[Any]]:
        """The compiled code that earlier calls with such tensors ran, to measure what it takes."""
        found = self.known[_problem_of(leaves)]
        return lambda: found.run([leaves[at] if is_leaf else at for is_leaf, at in found.inputs])

    def _first(self, key: Hashable, leaves: Sequence[Any]) -> list[Tensor]:
        """Ask Dynamo."""
        with (
            _lock, apart(), above_autograd(), torch.no_grad(),
        ):  # fmt: skip
            plain = [t.detach() if isinstance(t, Tensor) else t for t in leaves]
            self.latest = None
            results = list(self._run(plain))
            known = _decision(plain, results, self.latest)
            self.latest = None
        if known is not None:
            remember(self.known, key, known, _MOST)
        return results

    def _run(self, plain: Sequence[Any]) -> Sequence[Tensor]:
        from torch._dynamo.exc import FailOnRecompileLimitHit

        try:
            return self.compiled(*plain)
        except FailOnRecompileLimitHit:  # many batch sizes, say: restart the count
            self.compiled = self._compile()
            return self.compiled(*plain)

    def _backend(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(module, inputs, self._note)

    def _note(self, run: Any, values: Sequence[Any], results: Sequence[Any]) -> None:
        self.latest = (run, values, results)


def _run_decided(
    run: Any, inputs: Sequence[tuple[bool, Any]], places: Sequence[int], leaves: Sequence[Any]
) -> list[Tensor]:
    results = run([leaves[at] if is_leaf else at for is_leaf, at in inputs])
    return [results[i] for i in places]


def _problem_of(leaves: Sequence[Any]) -> Hashable:
    """What Dynamo's decision depends on."""
    return tuple([
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ])  # fmt: skip


def _decision(leaves: Sequence[Any], results: Sequence[Any], latest: Any) -> _Known | None:
    """Dynamo's decision, if its code takes and returns only what it was given."""
    if latest is None:
        return None
    run, values, found = latest
    inputs: list[tuple[bool, Any]] = []
    for value in values:
        same = [i for i, leaf in enumerate(leaves) if leaf is value]
        if isinstance(value, Tensor) and not same:
            return None
        inputs.append((True, same[0]) if isinstance(value, Tensor) else (False, value))
    places = [[i for i, t in enumerate(found) if t is result] for result in results]
    if not all(places):
        return None
    return _Known(run, tuple(inputs), tuple(place[0] for place in places))


def _function_of(operator: Operator, operands: Sequence[Any]) -> Callable[..., Any]:
    """(*leaves) -> flat results, as code that Dynamo can trace."""
    graph, owner = fx.Graph(), torch.nn.Module()
    args: list[Any] = []
    for position, operand in enumerate(operands):
        if position in operator.callable_positions:
            setattr(owner, f"mod_{position}", operand)
            args.append(graph.get_attr(f"mod_{position}"))
        else:
            args.append(_with_placeholders(graph, position, operand))
    graph.output(graph.call_function(operator, operator.wire(operator.args_type(*args))))
    # A module would call the hooks of all modules. Dynamo does not trace FlopCounterMode's.
    forward = fx.GraphModule(owner, graph).forward
    return lambda *leaves: pytree.tree_leaves(forward(*leaves))


def is_leaf(value: Any) -> bool:
    """Whether a value in a tuple of operands changes from call to call."""
    return isinstance(value, Tensor) or (isinstance(value, int) and not isinstance(value, bool))


def _with_placeholders(graph: fx.Graph, position: int, operand: Any) -> Any:
    """An operand whose tensors, and numbers among captures, are inputs."""
    if isinstance(operand, Tensor):
        return graph.placeholder(f"operand_{position}")
    if isinstance(operand, tuple):
        return tuple(
            graph.placeholder(f"operand_{position}_{i}") if is_leaf(item) else item
            for i, item in enumerate(operand)
        )
    return operand
