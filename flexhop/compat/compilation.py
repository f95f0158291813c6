"""What is found out about mods, each answer once; a hash of our sources.

Dynamo, both passes of AOTAutograd and the lowerings ask the same questions about the mods of a
call, and the layers of a model have equal mods. An answer counts for a graph that says the same,
for inputs of the same form, in the same circumstances. It is forgotten when the compilation is
over, and never outlives PyTorch's tracing context. Outside of compilations, answers are kept on
functions that later calls reuse. The names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch._guards import TracingContext
from torch.fx import Graph, GraphModule, Node, traceback
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.overrides import _get_current_function_mode_stack

__all__ = [
    "copy_of", "forget", "forms_of", "is_marked", "keeping", "kept", "mark", "module_of", "once",
    "remember", "say", "source_fingerprint",
]  # fmt: skip

_KEY = "flexhop_kept"  # of answers on functions
F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")
_PACKAGE = Path(__file__).parents[1]
_found: WeakKeyDictionary[TracingContext, dict[Hashable, Any]] = WeakKeyDictionary()
_AUTOCAST = (
    ("cpu", torch._C.DispatchKey.AutocastCPU),
    ("cuda", torch._C.DispatchKey.AutocastCUDA),
)


def once(key: Hashable, function: Any, make: Callable[[], Any]) -> Any:
    """The result of `make`, made once for equal graphs of a compilation.

    Args:
        key: the question, and all that its answer depends on besides the function.
        function: a mod. Outside a compilation, one that `mark` marked keeps its answers for later
            calls. Others that are no graph are asked each time.
        make: finds the answer, which nobody may change.
    """
    context = TracingContext.try_get()
    if context is None or not isinstance(function, GraphModule):
        return keeping(key, function, make)
    known = _found.setdefault(context, {})
    whole = (key, _text_of(function), _circumstances(context))
    if whole not in known:
        known[whole] = make()
    return known[whole]


def say(key: Hashable, function: GraphModule, answer: Any) -> None:
    """Answer a question before `once` asks it, with the same arguments."""
    once(key, function, lambda: answer)


def forget() -> None:
    """Forget every answer. A compiled call holds its tracing context until its backward pass."""
    _found.clear()


def forms_of(values: Iterable[Any]) -> tuple[Hashable, ...]:
    """What a trace depends on in its example inputs."""
    return tuple(map(_form_of, values))


def _form_of(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride())
        if not all(type(size) is int for size in sizes):
            sizes = tuple(map(_form_of, sizes))
        return torch.Tensor, sizes, value.dtype, value.device
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expression = getattr(value.node, "expr", None)  # a nested size has none
        return type(value), object() if expression is None else expression
    return type(value), value  # 1, 1.0 and True are equal


def _text_of(module: GraphModule) -> Hashable:
    """What a graph says, with the lines of user code that errors name."""
    return tuple(
        (node.op, _target_of(node, module), repr(node.args), repr(node.kwargs), _lines_of(node))
        for node in module.graph.nodes
    )


def _target_of(node: Node, module: GraphModule) -> Hashable:
    if node.op not in ("get_attr", "call_module"):
        return node.target
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return node.target, _text_of(value) if isinstance(value, GraphModule) else value


def _lines_of(node: Node) -> Any:
    return node.meta.get("stack_trace")


def _circumstances(context: TracingContext) -> Hashable:
    """What a trace depends on besides function and inputs: PyTorch's modes, and the line of the
    call, which the nodes get that come from no line of the mod."""
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    casts = (
        (torch.is_autocast_enabled(d) and not excluded(k), torch.get_autocast_dtype(d))
        for d, k in _AUTOCAST
    )
    return (
        context.fake_mode,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        traceback.has_preserved_node_meta(),
        traceback.get_current_meta().get("stack_trace"),
        *casts,
        *_get_current_function_mode_stack(),
    )


def copy_of(module: GraphModule) -> GraphModule:
    """The same graph, which may be changed."""
    graph, known = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
    return module_of(module, graph)


def module_of(owner: torch.nn.Module, graph: Graph) -> GraphModule:
    """A graph with its owner's attributes, as Python code when somebody calls it or reads that.

    Lowerings write to graphs and walk through them: few are ever called.
    """
    return _LazyGraphModule(owner, graph)


@functools.cache
def source_fingerprint(package: Path = _PACKAGE) -> str:
    """First 16 hexadecimal digits of the SHA-256 of every source file of the package.

    Inductor's cache keys cover the graph, its inputs and PyTorch's own sources, but not flexhop's.
    Every operator of ours has the fingerprint among its operands, so editing a template or
    lowering changes the key.

    It covers all files, because CPU graphs contain the reference (ops/eager.py) and everything
    that it calls. A list of rooms would be wrong as soon as a helper moved.
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".jinja", ".h"):
            digest.update(path.relative_to(package).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def mark(function: F) -> F:
    """Mark a function that later calls will pass again, so results can be cached on it."""
    if not is_marked(function):
        setattr(function, _KEY, {})
    return function


def is_marked(function: Any) -> bool:
    """Whether `mark` was called with it."""
    return hasattr(function, _KEY)


def kept(function: Any) -> dict[Hashable, Any]:
    """The cache of a marked function. It lives as long as the function."""
    return getattr(function, _KEY)


def keeping(key: Hashable, function: Any, make: Callable[[], Any]) -> Any:
    """The cached result of `make` for a marked function; for others, call it."""
    if not is_marked(function):
        return make()
    known = kept(function)
    if key not in known:
        known[key] = make()
    return known[key]


def remember(known: dict[Any, V], key: Hashable, value: V, most: int) -> V:
    """Insert a value into a cache of limited size; evicts the oldest."""
    if len(known) >= most:
        del known[next(iter(known))]
    known[key] = value
    return value
