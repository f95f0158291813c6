"""Check a call that reads a cache; plain Python on real or fake tensors, like ops/call.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexhop import errors
from flexhop.ops.args import CachedArgs
from flexhop.ops.call import DTYPES, Call, Wire, check_requests, prepare

# Dtypes that a kernel can decode.
STORED_DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
)  # fmt: skip


def prepare_cached(
    args: CachedArgs, call: Call, has_mods: tuple[bool, bool]
) -> tuple[float, Wire]:
    """Check a call and return the operator's scale and options.

    Args:
        args: the operator's operands; its mods, scale and options are not read.
        call: everything else.
        has_mods: whether there are a key_mod and a value_mod.

    Raises:
        FlexhopError: one of its subclasses, for each mistake named in flexhop.errors.
    """
    check_requests(call)
    _check_gradients(args[:3])
    if call.dropout_p:
        raise errors.UnsupportedFeatureError(
            feature="dropout_p with page_table, k_mod or v_mod",
            reason="caches are for inference",
            hint="Set dropout_p to 0",
        )
    _check_stored(args, has_mods)
    key = _as_keys(args, args.key, has_mods[0])
    value = _as_keys(args, args.value, has_mods[1])
    return prepare(args.query, key, value, args.blocks, call)


def _check_gradients(tensors: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise gradient_refusal()


def gradient_refusal() -> errors.UnsupportedFeatureError:
    """The error of a call that would need a gradient."""
    return errors.UnsupportedFeatureError(
        feature="A gradient of flex_attention with page_table, k_mod or v_mod",
        reason="a cache is filled without gradients",
        hint="Call it under torch.no_grad(), or with contiguous keys in the dtype of query",
    )


def _check_stored(args: CachedArgs, has_mods: tuple[bool, bool]) -> None:
    """Check that every stored dtype can be decoded."""
    named = (("key", "k_mod", args.key), ("value", "v_mod", args.value))
    for (name, mod, tensor), has in zip(named, has_mods, strict=True):
        if tensor.dtype not in (STORED_DTYPES if has else DTYPES):
            hint = f"pass {mod}=flexhop.mods.dequantize(scale)"
            if has:
                hint = f"{mod} reads {', '.join(str(d)[6:] for d in STORED_DTYPES)}"
            raise errors.CacheShapeError(
                argument=name, found=f"is {tensor.dtype}",
                expected=f"query is {args.query.dtype}; {hint}",
            )  # fmt: skip


def _as_keys(args: CachedArgs, cache: Tensor, has_mod: bool) -> Tensor:
    """A stand-in with the shape and dtype of the decoded keys."""
    if has_mod and cache.dtype != args.query.dtype:
        cache = cache.detach()[:1, :1, :1].to(args.query.dtype).expand(cache.shape)
    if not args.pages:
        return cache
    # The page size is a constant of the kernel: int() is a guard.
    length = args.pages[0].size(1) * int(cache.size(2))
    return cache[:1, :, :1].expand(args.query.size(0), -1, length, -1)
