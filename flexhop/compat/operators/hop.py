"""Operator class and dispatch helpers.

All names below exist with these signatures on torch 2.11 to 2.15; the exceptions say so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._C import DispatchKey, DispatchKeySet
from torch._C._functorch import (
    TransformType,
    _add_batch_dim,
    get_unwrapped,
    is_batchedtensor,
    maybe_get_bdim,
    maybe_get_level,
    unwrap_if_dead,
)
from torch._dispatch.python import enable_python_dispatcher, suspend_functionalization
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import detect_fake_mode
from torch._higher_order_ops.utils import (
    _maybe_run_with_interpreter,
    redirect_to_mode,
    register_fake,
    setup_compilation_env,
)
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, disable_functional_mode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from flexhop.compat.graphs import shared_graphs
from flexhop.compat.imports import after_import
from flexhop.compat.operators.retrace import retraced
from flexhop.compat.storage import below_functorch
from flexhop.errors import FlexhopError
from flexhop.options import debug

__all__ = [
    "OPERATORS",
    "FakeTensorMode",
    "FunctionalTensor",
    "Operator",
    "as_compiled",
    "below_autograd",
    "can_checkpoint",
    "capture_like",
    "is_tracing",
    "isolated_trace",
    "like_tree",
    "make_fx",
    "pytree",
    "register_autocast",
    "register_autograd",
    "register_checkpoint",
    "register_dense",
    "register_fake",
    "register_flops",
    "register_functionalize",
    "register_proxy",
    "register_refusal",
    "register_vmap",
    "setup_compilation_env",
    "share",
    "unwrap_dead",
    "without_modes",
]

share = shared_graphs.share
OPERATORS: dict[str, Operator] = {}


def _find_operator(name: str) -> Operator:
    return OPERATORS[name]


class Operator(HigherOrderOperator):
    """A higher-order operator with the operands of a NamedTuple.

    `cacheable=True` lets Inductor's and AOTAutograd's caches store graphs that contain it. A rule
    added by `py_functionalize_impl` makes the object unpicklable, hence `__reduce__`.
    """

    def __init__(
        self,
        name: str,
        args_type: type[Any],
        callables: Sequence[str],
        door: type[Any] | None = None,
        optional: str = "",
    ) -> None:
        """Name an operator.

        Args:
            name: name of the operator.
            args_type: the NamedTuple of its operands.
            callables: which of them are functions.
            door: the NamedTuple of the operands as Dynamo sees them.
            optional: the last operand, if it is omitted when ().
        """
        super().__init__(name, cacheable=True)
        self.args_type = args_type
        self.door = door
        self.optional = optional
        self.callable_positions = tuple(args_type._fields.index(field) for field in callables)
        self.refusal: FlexhopError | None = (
            None  # the latest one; Dynamo of 2.15 loses the original
        )
        self.examples: Callable[..., Sequence[Sequence[Any]]]  # of its callables; register_proxy
        OPERATORS[name] = self

    def __call__(self, *operands: Any) -> Any:
        """Dispatch one call; operands as in `args_type`, defaults filled."""
        try:
            return super().__call__(*self.wire(self.args_type(*operands)))
        except FlexhopError as error:
            self.refusal = error
            raise

    def wire(self, args: Any) -> tuple[Any, ...]:
        """Operands in graphs: flat, without the optional one if it is ()."""
        flat = tuple(args)
        is_left_out = self.optional and getattr(args, self.optional) == ()
        return flat[:-1] if is_left_out else flat

    def __reduce__(self) -> tuple[Callable[[str], Operator], tuple[str]]:
        """Pickle by name."""
        return _find_operator, (self._name,)


def register_dense(op: Operator) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the operator's result if nothing traces or differentiates it."""
    return op.py_impl(DispatchKey.CompositeExplicitAutograd)


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Dispatch below the autograd keys."""
    with torch._C._AutoDispatchBelowAutograd():
        yield


def register_autograd(op: Operator) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the rule at the autograd key.

    PyTorch's own decorator skips the rule if nothing requires a gradient, and thereby drops the
    tangents of forward mode.
    """
    return op.py_impl(DispatchKey.Autograd)


def register_autocast(
    op: Operator, cast: Callable[[torch.dtype, tuple[Any, ...]], tuple[Any, ...]]
) -> None:
    """Under autocast: apply `cast(dtype, operands)`, then dispatch without autocast."""
    for device, key in (("cpu", DispatchKey.AutocastCPU), ("cuda", DispatchKey.AutocastCUDA)):

        def rule(*operands: Any, device: str = device, key: DispatchKey = key) -> Any:
            operands = cast(torch.get_autocast_dtype(device), operands)
            with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(key)):
                return op(*operands)

        op.py_impl(key)(rule)


def register_functionalize(op: Operator, check: Callable[..., None]) -> None:
    """Unwrap, `check(pre_dispatch, *operands)`, functionalize the callables, dispatch, wrap."""

    def rule(ctx: Any, *operands: Any) -> Any:
        plain = [
            operand if position in op.callable_positions else ctx.unwrap_tensors(operand)
            for position, operand in enumerate(operands)
        ]
        with ctx.redispatch_to_next():
            check(hasattr(ctx, "mode") and ctx.mode.pre_dispatch, *plain)
            for position in op.callable_positions:
                function = plain[position]
                wrapped = ctx.functionalize(_maybe_run_with_interpreter(function))
                # The wrapper stays recognisable as the user's function, whose graphs calls share.
                plain[position] = shared_graphs.hand_on(function, wrapped)
            return ctx.wrap_tensors(op(*plain))

    op.py_functionalize_impl(rule)


def register_proxy(
    op: Operator,
    names: Sequence[str],
    examples: Callable[..., Sequence[Sequence[Any]]],
    mode_of_mods: Callable[[], contextlib.AbstractContextManager[Any]],
) -> None:
    """Record one node whose callables are named submodules, traced on `examples(*operands)`.

    Operators with the same first callable, passed to `share`, share these graphs.
    """
    op.examples = examples

    def rule(mode: ProxyTorchDispatchMode, *operands: Any) -> Any:
        result = op(*operands)
        traced, graphs = list(operands), {}
        for position, name, example in zip(
            op.callable_positions, names, examples(*operands), strict=True
        ):
            graph = retraced(operands[position], example, mode_of_mods)
            debug.show_graph(name.removeprefix("flexhop_"), graph)
            qualified = mode.tracer.get_fresh_qualname(name)
            mode.tracer.root.register_module(qualified, graph)
            traced[position] = graphs[name] = graph
        proxies = pytree.tree_map(mode.tracer.unwrap_proxy, tuple(traced))
        node = mode.tracer.create_proxy("call_function", op, proxies, {}, name=op._name)
        shared_graphs.note(node.node, operands[op.callable_positions[0]], graphs)
        return track_tensor_tree(result, node, constant=None, tracer=mode.tracer)

    op.py_impl(ProxyTorchDispatchMode)(rule)


def register_checkpoint(op: Operator) -> None:
    """Let selective activation checkpointing see the operator."""
    redirect_to_mode(op, _CachingTorchDispatchMode)
    redirect_to_mode(op, _CachedTorchDispatchMode)


def register_flops(op: Operator, formula: Callable[..., int]) -> None:
    """Count the operator in FlopCounterMode.

    2.11 to 2.14 return the mode's NotImplemented to the caller, and 2.11's `register_flop_formula`
    rejects operators. Hence the registry and our own rule; 2.15 would look in the registry.
    """

    def rule(mode: Any, *operands: Any) -> Any:
        result = op(*operands)
        mode.counter._count_flops(op, result, operands, {})
        return result

    def register() -> None:
        from torch.utils import flop_counter

        flop_counter.flop_registry[op] = formula
        op.py_impl(flop_counter._FlopCounterMode)(rule)

    after_import("torch.utils.flop_counter", register)  # it imports Triton, which is slow


def register_refusal(op: Operator, transform: str, error: Callable[[], Exception]) -> None:
    """Make a functorch transform raise, "Vmap" or "Jvp"."""

    def rule(interpreter: Any, *operands: Any) -> Any:
        raise error()

    op.py_impl(getattr(TransformType, transform))(rule)


def register_vmap(
    op: Operator,
    fold: Callable[..., tuple[tuple[Any, ...], Callable[..., Any]]],
    nested: Callable[[Sequence[Any]], Any] = tuple,
) -> None:
    """torch.vmap: `fold(count, mapped, plain)` returns operands without the mapped dimension.

    Args:
        fold: called with the size of the mapped dimension, one tuple of operands where every
            tensor is replaced by whether it is mapped, and the operands with mapped tensors'
            dimension in front. Returns the operator's operands, and what turns its result into
            (result, mapped) where the tensors of `mapped` results have the dimension in front.
        nested: builds the operator's results from these.
    """

    def rule(interpreter: Any, *operands: Any) -> Any:
        level, count = interpreter.level(), interpreter.batch_size()

        def is_mapped(tensor: torch.Tensor) -> bool:
            return is_batchedtensor(tensor) and maybe_get_level(tensor) == level

        def bare(tensor: torch.Tensor) -> torch.Tensor:
            if not is_mapped(tensor):
                return tensor
            return get_unwrapped(tensor).movedim(maybe_get_bdim(tensor), 0)

        mapped = pytree.tree_map_only(torch.Tensor, is_mapped, operands)
        folded, unfold = fold(count, mapped, pytree.tree_map_only(torch.Tensor, bare, operands))
        with interpreter.lower():
            results = op(*folded)
        return nested(
            [
                _add_batch_dim(tensor, 0, level) if has_dimension else tensor
                for tensor, has_dimension in unfold(results)
            ]
        )

    op.py_impl(TransformType.Vmap)(rule)


def can_checkpoint() -> bool:
    """Whether checkpointing works here: not inside torch.func's transforms.

    torch.func.grad forbids the hooks that it needs; torch.vmap has ended when backward recomputes.
    """
    return _allows_hooks() and torch._C._functorch.peek_interpreter_stack() is None


def _allows_hooks() -> bool:
    return torch._C._autograd._saved_tensors_hooks_is_enabled()


def unwrap_dead(values: Any) -> Any:
    """Remove the wrappers of a torch.func transform that has ended, as in a vjp's backward.

    PyTorch does this for its own operators; higher-order ones fail on the wrappers.
    """
    return pytree.tree_map_only(torch.Tensor, unwrap_if_dead, values)


def like_tree(tree: Any, leaves: Sequence[Any]) -> Any:
    """A tree with the structure of `tree` and other leaves."""
    return pytree.tree_unflatten(list(leaves), pytree.tree_flatten(tree)[1])


def is_tracing(*tensors: torch.Tensor) -> bool:
    """Whether a tracer below Dynamo (make_fx, non-strict export) is recording."""
    return get_proxy_mode() is not None or any(isinstance(t, FunctionalTensor) for t in tensors)


@contextlib.contextmanager
def isolated_trace(*tensors: Any) -> Iterator[FakeTensorMode]:
    """Disable every surrounding mode and enter a fake mode, to trace a user function on the side.

    Without it a selective-checkpoint mode would count the traced operations, functionalization
    would wrap them, and `checkpoint(use_reentrant=False)` would pack this trace's fakes into its
    own storage and hand them out as gradients (hence the identity hooks). Anomaly detection would
    ask whether a fake gradient is NaN.
    """
    hooks: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if _allows_hooks():
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with (
        hooks,
        torch.autograd.set_detect_anomaly(False),
        temporarily_clear_interpreter_stack(),
        suspend_functionalization(),
        disable_functional_mode(),
        disable_proxy_modes_tracing(),
    ):
        mode = detect_fake_mode([below_functorch(t) for t in tensors]) or FakeTensorMode(
            allow_non_fake_inputs=True
        )
        with _disable_current_modes(), mode:
            yield mode


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Temporarily leave every dispatch mode, such as a FakeTensorMode around the caller."""
    return _disable_current_modes()


@contextlib.contextmanager
def as_compiled() -> Iterator[None]:
    """Trace as compilers do: without modes, and with operators such as softshrink decomposed."""
    with _disable_current_modes(), enable_python_dispatcher():
        yield


def capture_like(value: Any) -> Any:
    """A fresh tensor with the metadata of `value`; other values stay."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(
        value.size(), value.stride(), dtype=value.dtype, device=value.device
    )


def is_fake(tensor: object) -> bool:
    """Whether a tensor has metadata only."""
    return isinstance(tensor, FakeTensor)
