"""User functions: score_mod and mask_mod, how they combine, and how they are checked.

    score_mod(score, b, h, q_idx, kv_idx) -> score    changes one score
    mask_mod(b, h, q_idx, kv_idx) -> bool             keeps (True) or drops one score

The indices are integer tensors: 0-d in kernels and traces, and broadcastable to [B, Hq, M, N] if a
mask is evaluated densely. A mod is written for one score, with tensor operations only, so it works
in both cases. It reads captured tensors by indexing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from flexhop.errors import ModArityError, ModNotCallableError, ModResultError

_CALLS = {
    "score_mod": "(score, b, h, q_idx, kv_idx)",
    "mask_mod": "(b, h, q_idx, kv_idx)",
    "k_mod": "(k, b, h, kv_idx)",
    "v_mod": "(v, b, h, kv_idx)",
}


class ScoreMod(Protocol):
    """Changes one attention score: (score, b, h, q_idx, kv_idx) -> score."""

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, /
    ) -> Tensor:
        """The new score, a floating-point tensor with the shape of `score`."""
        ...


class MaskMod(Protocol):
    """Keeps or drops one attention score: (b, h, q_idx, kv_idx) -> bool."""

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, /) -> Tensor:
        """True where the key is visible to the query, a bool tensor."""
        ...


def noop_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A score_mod that returns the score unchanged: a floating-point tensor of any shape.

    The indices are integer tensors that broadcast to it. They are unused.
    """
    return score


def noop_mask(batch: Tensor, head: Tensor, token_q: Tensor, token_kv: Tensor) -> Tensor:
    """A mask_mod that lets every query see every key. Its parameters have PyTorch's names.

    Returns:
        True, as a 0-d bool tensor on the device of batch. It broadcasts to any shape.
    """
    return batch.new_ones((), dtype=torch.bool)


def _empty_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """No key is visible."""
    return b.new_zeros((), dtype=torch.bool)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """A mask_mod that keeps a pair if all `mask_mods` keep it. With no arguments, it keeps all
    pairs.

    Raises:
        ModNotCallableError: an argument is not callable.
        ModArityError: it does not take the four arguments of a mask_mod.

    Source: torch.nn.attention.flex_attention.and_masks.
    """
    _check_callable("and_masks", mask_mods)
    return _named("and_mask", _and_mask, mask_mods) if mask_mods else noop_mask


def _and_mask(
    mask_mods: tuple[MaskMod, ...], b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    keep = mask_mods[0](b, h, q_idx, kv_idx)
    for mask_mod in mask_mods[1:]:
        keep = keep & mask_mod(b, h, q_idx, kv_idx)
    return keep


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """A mask_mod that keeps a pair if any of `mask_mods` keeps it. With no arguments, it keeps
    none.

    Raises:
        ModNotCallableError: an argument is not callable.
        ModArityError: it does not take the four arguments of a mask_mod.

    Source: torch.nn.attention.flex_attention.or_masks.
    """
    _check_callable("or_masks", mask_mods)
    return _named("or_mask", _or_mask, mask_mods) if mask_mods else _empty_mask


def _or_mask(
    mask_mods: tuple[MaskMod, ...], b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    keep = mask_mods[0](b, h, q_idx, kv_idx)
    for mask_mod in mask_mods[1:]:
        keep = keep | mask_mod(b, h, q_idx, kv_idx)
    return keep


def _named(name: str, combine: Callable[..., Tensor], mask_mods: tuple[MaskMod, ...]) -> MaskMod:
    """A combination of masks under the name that it has in PyTorch.

    Unlike a closure, a partial can be pickled.
    """
    mask_mod = functools.partial(combine, mask_mods)
    if not torch.compiler.is_dynamo_compiling():  # which sets no attributes of a partial
        vars(mask_mod)["__name__"] = name
    return mask_mod


def _check_callable(combinator: str, mask_mods: tuple[object, ...]) -> None:
    for position, mask_mod in enumerate(mask_mods):
        if not callable(mask_mod):
            raise ModNotCallableError(
                argument=f"argument {position} of {combinator}", found=type(mask_mod).__name__
            )
        if not torch.compiler.is_dynamo_compiling():
            check_arity(mask_mod, "mask_mod")


# checks


def check_arity(mod: object, kind: str) -> None:
    """Check that a mod can be called with the arguments of its kind.

    Args:
        mod: a function, lambda, functools.partial, bound method or callable object. Defaults,
            `*args` and callables without a readable signature pass.
        kind: "score_mod", "mask_mod", "k_mod" or "v_mod".

    Raises:
        ModNotCallableError: `mod` is not callable.
        ModArityError: it requires more or takes fewer arguments.
    """
    if not callable(mod):
        raise ModNotCallableError(argument=kind, found=type(mod).__name__)
    signature = _signature(mod)
    count = 5 if kind == "score_mod" else 4
    if signature is not None and not _takes(signature, count):
        raise ModArityError(mod=kind, name=_name(mod), expected=_CALLS[kind], found=str(signature))


def is_score_mod(mod: Callable[..., Any]) -> bool:
    """Whether `mod` is a score_mod (five arguments) rather than a mask_mod (four).

    Parameters with defaults do not count, so `def mask(b, h, q_idx, kv_idx, window=8)` is a mask.

    Raises:
        ModArityError: it is neither, or cannot be told apart, as with `*args`.
    """
    if torch.compiler.is_dynamo_compiling():
        return _required_by_code(mod) == 5
    signature = _signature(mod)
    required = _required(signature) if signature is not None else 0
    if signature is None or required not in (4, 5) or not _takes(signature, required):
        raise ModArityError(
            mod="mod",
            name=_name(mod),
            expected=f"{_CALLS['score_mod']} or {_CALLS['mask_mod']}",
            found="unknown" if signature is None else str(signature),
        )
    return required == 5


def _required_by_code(mod: Any) -> int:
    """How many arguments a mod requires, for Dynamo: it makes no signature of a function that was
    defined in what it traces, and reports a call with too many arguments itself."""
    if isinstance(mod, functools.partial):
        return _required_by_code(mod.func) - len(mod.args) - len(mod.keywords)
    if not hasattr(mod, "__code__"):
        mod = mod.__call__
    count = mod.__code__.co_argcount - len(mod.__defaults__ or ())
    return count - 1 if inspect.ismethod(mod) else count


def _signature(mod: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters that `mod` itself takes, not those of a function that it wraps."""
    try:
        return inspect.signature(mod, follow_wrapped=False)
    except (TypeError, ValueError):  # builtins and extension types may have no signature
        return None


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _required(signature: inspect.Signature) -> int:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature.parameters.values()
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def _name(mod: Any) -> str:
    """The user's name for it: the name of a function, or the class of a callable object."""
    name = getattr(mod, "__name__", None)
    if name is None and isinstance(mod, functools.partial):
        return f"partial({_name(mod.func)})"
    return name or type(mod).__name__


def check_mask_result(result: object, name: str = "mask_mod") -> None:
    """Check that a mask_mod returned a bool tensor.

    Args:
        result: a real, fake or traced tensor, or anything else that the user returned.
        name: what the user calls the function.

    Raises:
        ModResultError: the result is not a tensor of dtype torch.bool.
    """
    if not isinstance(result, Tensor) or result.dtype != torch.bool:
        raise ModResultError(
            mod="mask_mod", name=name, expected="a bool tensor", found=_described(result)
        )


def check_score_result(result: object, name: str = "score_mod", kind: str = "score_mod") -> None:
    """Check that a score_mod, k_mod or v_mod returned a tensor of real numbers.

    As in PyTorch, integers and bools of a score_mod are converted.

    Args: see `check_mask_result`. kind: which of the three.

    Raises:
        ModResultError: the result is not such a tensor.
    """
    is_score = kind == "score_mod"
    if not isinstance(result, Tensor) or (
        result.is_complex() if is_score else not result.is_floating_point()
    ):
        wanted = "a tensor of real numbers" if is_score else "a floating-point tensor"
        raise ModResultError(mod=kind, name=name, expected=wanted, found=_described(result))


def _described(result: object) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of dtype {result.dtype}"
    return f"an object of type {type(result).__name__}"


# built-in score mods
