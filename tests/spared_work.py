"""What PyTorch does for its logs, or for nothing, and tests do without: a tenth of their time."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.fx._symbolic_trace as symbolic_trace

__all__ = ["spare", "spare_dynamo"]

# They make texts of every graph, whether or not a log takes them.
_LOGGERS = ("torch._inductor.compile_fx", "torch._functorch._aot_autograd.graph_compile")


def spare() -> None:
    """Once, before the first test."""
    # pytest listens to loggers that do not propagate: PyTorch would write out each graph.
    logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore
    root = logging.getLogger()
    root.setLevel = _set_level(root.setLevel)
    patcher = symbolic_trace._Patcher
    patcher.patch_method = _patch_method(patcher.patch_method)
    module = torch.fx.GraphModule
    module.print_readable = _print_readable(module.print_readable)


def spare_dynamo() -> None:
    """Once Dynamo is there."""
    import torch._dynamo.guards as guards

    # A number for PyTorch's logs: it empties the processor's caches to time the guards.
    guards.profile_guard_manager = lambda *_: 0.0
    # A program that would repeat the compilation.
    if after_aot := sys.modules.get("torch._dynamo.repro.after_aot"):
        after_aot.save_graph_repro = lambda *_, **__: None  # type: ignore[attr-defined]
    if ranges := sys.modules.get("torch.utils._sympy.value_ranges"):
        kind = ranges.ValueRanges
        if not hasattr(kind.__and__, "__wrapped__"):
            kind.__and__ = _same_or(kind.__and__)
    propagation = sys.modules.get("torch._inductor.dtype_propagation")
    handler = getattr(propagation, "DtypePropagationOpsHandler", None)
    if handler is not None and not hasattr(handler.__init__, "__wrapped__"):
        handler.__init__ = _filled_once(handler.__init__)


def _set_level(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """pytest sets the same level twelve times per test, and that visits all loggers of PyTorch."""

    def set_level(level: Any) -> None:
        if level != logging.getLogger().level:
            original(level)

    return set_level


def _filled_once(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Inductor fills its one table of types anew for every operation that it writes.

    That took a seventh of the time of a large C++ kernel. It is filled again if rules come.
    """

    @functools.wraps(original)
    def fill(self: Any) -> None:
        rules = torch._inductor.utils.op_dtype_propagation_rules
        size = len(rules), len(torch._inductor.codegen.common.pointwise_overrides_data)
        if vars(self).get("_filled_with") != size:
            original(self)
            self._filled_with = size

    return fill


def _same_or(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Inductor intersects the range of a variable with itself whenever an operation is repeated.

    SymPy's maximum and minimum took a tenth of the time of a large C++ kernel.
    """

    @functools.wraps(original)
    def intersection(self: Any, other: Any) -> Any:
        return self if self == other else original(self, other)

    return intersection


def _print_readable(original: Callable[..., str]) -> Callable[..., str]:
    def print_readable(self: Any, *args: Any, **named: Any) -> str:
        if sys._getframe(1).f_globals["__name__"] in _LOGGERS:
            return ""
        return original(self, *args, **named)

    return print_readable


def _patch_method(original: Callable[..., None]) -> Callable[..., None]:
    """Every trace replaces two methods of Module, and Python then visits all of its subclasses.

    Every graph is one of them: with a thousand graphs that took two thirds of a trace. What
    `make_fx` puts there calls the original and does nothing else.
    """

    def patch_method(
        self: Any, owner: type, name: str, new: Any, deduplicate: bool = True
    ) -> None:
        originals = symbolic_trace._orig_module_call, symbolic_trace._orig_module_getattr
        if owner is torch.nn.Module and getattr(owner, name) in originals and _does_nothing(new):
            return
        original(self, owner, name, new, deduplicate)

    return patch_method


def _does_nothing(wrapper: Any) -> bool:
    """Whether the tracer that made a wrapper calls modules, and reads their attributes, as usual.

    A tracer that wraps no functions of other modules, as these are found by such calls.
    """
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer

    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
    tracer = cells["self"].cell_contents
    return type(tracer) is PythonKeyTracer and not tracer._autowrap_function_ids
