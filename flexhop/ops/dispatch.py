"""Run a call: eagerly, as one operator of a graph, or under a tracer."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import flexhop
from flexhop import errors
from flexhop.compat.modes import without_dynamo
from flexhop.compat.mods.errors import refused
from flexhop.compat.mods.held import is_filled
from flexhop.compat.mods.private import private
from flexhop.compat.mods.wrapped import has_checkpoint_policy
from flexhop.compat.operators import hop
from flexhop.compat.operators.autograd import wanted_dtype, without_autocast
from flexhop.compat.sizes import is_symbolic
from flexhop.mods.frozen import frozen
from flexhop.mods.functions import check_arity
from flexhop.mods.keys import noop_key
from flexhop.ops.args import AttentionArgs, AttentionDoor, CachedArgs, CachedDoor
from flexhop.ops.cached import cached_attention, cast_cached
from flexhop.ops.cached_call import prepare_cached
from flexhop.ops.cached_eager import attend_cached
from flexhop.ops.call import (
    Call,
    check_captures,
    check_gradients,
    check_requests,
    check_result,
    prepare,
)
from flexhop.ops.eager import attend
from flexhop.ops.forward import attention, cast_operands
from flexhop.ops.layout import ordered
from flexhop.ops.replicated import with_summed_gradients
from flexhop.ops.uncompiled.calls import run_cached_with_kernels, run_lifted
from flexhop.ops.uncompiled.option import wants_kernels

Args = TypeVar("Args", AttentionArgs, CachedArgs)


def run_operator(args: AttentionArgs, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Evaluate one call whose `scale` and `options` are not set yet.

    Dynamo sees the operator itself, with `call` in place of options: its tracker (compat.dynamo)
    calls `prepare` and emits the node.
    """
    out, lse, max_scores = _evaluate(args, call)
    if lse.dtype == torch.float64 and out.dtype != torch.float64:
        lse = lse.to(torch.float32)  # wide for backward alone; see ops/wide_lse.py
    return out, lse, max_scores


def _evaluate(args: AttentionArgs, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    if torch.compiler.is_dynamo_compiling():
        door = AttentionDoor(
            args.query, args.key, args.value, args.score_mod, args.mask_mod, args.blocks,
            _plain(call), args.dropout_seed,
        )  # fmt: skip
        return attention(*door)
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise errors.UnsupportedFeatureError(
            feature="torch.jit.trace", reason="TorchScript has no operators that take functions",
            hint="Use torch.export.export or torch.compile",
        )  # fmt: skip
    if hop.is_tracing(args.query, args.key, args.value):
        return _run_traced(run_operator, args, call)
    has_kernels = wants_kernels(call.kernel_options)
    # A mistake goes to the eager path, which raises it without compiling anything.
    if (has_kernels or has_checkpoint_policy()) and call.mistake is None:
        if not has_kernels:
            _warn_once()
        return run_lifted(args, call, has_kernels=has_kernels)
    with without_dynamo():
        return _run_eagerly(args, call)


def run_cached_operator(args: CachedArgs, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Like run_operator, for a call that reads a cache."""
    has_mods = (args.key_mod is not noop_key, args.value_mod is not noop_key)
    if torch.compiler.is_dynamo_compiling():
        door = CachedDoor(
            args.query, args.key, args.value, args.score_mod, args.mask_mod, args.key_mod,
            args.value_mod, args.blocks, args.pages, (_plain(call), has_mods),
        )  # fmt: skip
        return cached_attention(*door)
    if hop.is_tracing(args.query, args.key, args.value):
        return _run_traced(run_cached_operator, args, call)
    if wants_kernels(call.kernel_options) and call.mistake is None:
        return run_cached_with_kernels(args, call)
    with without_dynamo():
        return _run_cached_eagerly(args, call, has_mods)


def _plain(call: Call) -> tuple[Any, ...]:
    """The call as plain tuples: Dynamo's variables for named tuples differ between versions."""
    facts: Any = None if call.mask is None else tuple(call.mask)
    return tuple(call._replace(mask=facts))


def _run_traced(run: Any, args: Any, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """make_fx and non-strict export do not lift captured tensors. Dynamo does, so it goes
    first."""
    if any(is_symbolic(size) for t in (args.query, args.key, args.value) for size in t.shape):
        # Dynamo would compare the sizes with those of earlier calls, which would make them fixed.
        # It keeps its results per code object: use a copy.
        run = types.FunctionType(run.__code__.replace(), run.__globals__)
    with hop.setup_compilation_env() as backend:
        return torch.compile(run, backend=backend, fullgraph=True)(args, call)


def _run_cached_eagerly(
    args: CachedArgs, call: Call, has_mods: tuple[bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    check_requests(call)
    args = _autocast(args, cast_cached)
    named: dict[str, Any] = {
        "score_mod": args.score_mod, "mask_mod": args.mask_mod,
        "k_mod": args.key_mod, "v_mod": args.value_mod,
    }  # fmt: skip
    for kind, mod in named.items():
        check_arity(mod, kind)
    scale, options = prepare_cached(args, call, has_mods)
    for kind, mod in named.items():
        check_captures(args.query, kind, closed_over(mod))
    _warn_once()
    score, mask, key, value = (_checked(mod, kind, private(mod)) for kind, mod in named.items())
    args = args._replace(
        score_mod=score, mask_mod=mask, key_mod=key, value_mod=value, scale=scale, options=options
    )
    with without_autocast(args.query.device.type):  # the definition is exact
        out, lse, max_scores = attend_cached(args)
    return ordered(out, args.query), lse, max_scores


def _run_eagerly(args: AttentionArgs, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    check_requests(call)
    args = _autocast(args, cast_operands)
    check_arity(args.score_mod, "score_mod")
    check_arity(args.mask_mod, "mask_mod")
    scale, options = prepare(args.query, args.key, args.value, args.blocks, call)
    mask_tensors = closed_over(args.mask_mod)
    # A mask needs its query side only for gradients, so forward passes may lack it.
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*args[:3], *mask_tensors)):
        check_gradients(mask_tensors, options)
    for kind, mod in (("score_mod", args.score_mod), ("mask_mod", args.mask_mod)):
        check_captures(args.query, kind, closed_over(mod))
    _warn_once()
    if call.sum_groups and torch.is_grad_enabled():
        summed = with_summed_gradients(args.score_mod, args.query, call.sum_groups)
        args = args._replace(score_mod=summed)
    score, mask = _Kept(args.score_mod), _Kept(args.mask_mod)
    args = args._replace(
        scale=scale, options=options,
        score_mod=_checked(args.score_mod, "score_mod", score),
        mask_mod=_checked(args.mask_mod, "mask_mod", mask),
    )  # fmt: skip
    with without_autocast(args.query.device.type):  # the definition is exact
        out, lse, max_scores = attend(args)
    score.keep()
    mask.keep()
    return ordered(out, args.query), lse, max_scores


class _Kept:
    """A mod; from `keep` on, for backward, as it was when this was made."""

    def __init__(self, mod: Callable[..., Tensor]) -> None:
        self._run = private(mod)
        self._kept = private(frozen(mod)) if torch.is_grad_enabled() else self._run

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self._run(*inputs)

    def keep(self) -> None:
        """End the forward pass."""
        self._run = self._kept


def _checked(
    mod: Callable[..., Tensor], kind: str, run: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Run the mod, with checks of its result and of what it does."""
    name = getattr(mod, "__name__", type(mod).__name__)
    held = [tensor for tensor in closed_over(mod) if not tensor.is_inference()]
    # A version counts writes to a tensor and its views. Inference tensors have none.
    versions = [tensor._version for tensor in held]

    @functools.wraps(mod, updated=())
    def call_and_check(*inputs: Tensor) -> Tensor:
        if [tensor._version for tensor in held] != versions:
            raise errors.CaptureChangedError(mod=f"{kind} {name!r}")
        try:
            result = run(*inputs)
        except Exception as error:
            ours = refused(error, f"{kind} {name!r}")
            if ours is None:
                raise
            raise ours from error
        check_result(result, kind, name)
        if [tensor._version for tensor in held] != versions:
            raise errors.CaptureMutationError(mod=f"{kind} {name!r}", location=_place_of(mod))
        return result

    return call_and_check


def _place_of(mod: Any) -> str:
    code = getattr(mod, "__code__", None)
    return "its body" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _autocast(args: Args, cast: Callable[[torch.dtype, tuple[Any, ...]], Args]) -> Args:
    """Apply autocast to the operands; it sees the operator itself only in compiled calls."""
    dtype = wanted_dtype(args.query.device.type)
    return args if dtype is None else cast(dtype, args)


def closed_over(mod: Any) -> tuple[Tensor, ...]:
    """Tensors in a function's closure, its globals, or the arguments of a functools.partial.

    Excludes those inside modules, objects and called functions: PyTorch itself reports a wrong
    device there.
    """
    if isinstance(mod, functools.partial):
        held = (*mod.args, *mod.keywords.values())
        return (*closed_over(mod.func), *(t for t in held if isinstance(t, Tensor)))
    cells = getattr(mod, "__closure__", None) or ()
    filled = (cell.cell_contents for cell in cells if is_filled(cell))
    found = [value for value in filled if isinstance(value, Tensor)]
    names = getattr(getattr(mod, "__code__", None), "co_names", ())
    of_module = getattr(mod, "__globals__", {})
    return (*found, *(of_module[n] for n in names if isinstance(of_module.get(n), Tensor)))


@functools.cache
def _warn_once() -> None:
    warnings.warn(errors.EagerWarning(), stacklevel=_level_of_user())


def _level_of_user() -> int:
    """The `stacklevel`, for the caller's warning, of the nearest code outside libraries."""
    libraries = tuple(str(Path(inspect.getfile(module)).parent) for module in (flexhop, torch))
    frame, level = inspect.currentframe(), 0
    while frame and frame.f_code.co_filename.startswith(libraries):
        frame, level = frame.f_back, level + 1
    return level


def reset_warnings() -> None:
    """Allow the eager warning to appear again."""
    _warn_once.cache_clear()
