"""Kernel sources: Jinja files that are Python once their holes are filled. See README.md here."""

from __future__ import annotations

import functools
from importlib.resources import files

_CACHED = ("cached_keys", "cached_sums", "halves")
_BY_QUERY = ("key_blocks", "lists", "tile", "mods")
_BY_KEY = ("query_blocks", "lists", "tile", "mods")
# Every kernel is its own file, then the device functions it calls.
_PARTS = {
    "forward": ("forward", "attend", "keys", *_BY_QUERY),
    "decode": ("decode", "attend", "keys", *_BY_QUERY),
    "cached_forward": ("forward", "attend", *_CACHED, *_BY_QUERY, "key_mods"),
    "cached_decode": ("decode", "attend", *_CACHED, *_BY_QUERY, "key_mods"),
    "decode_combine": ("decode_combine",),
    "mask_bits": ("mask_bits", "lists", "tile", "mods"),
    "add_order": ("add_order", "query_blocks", "lists"),
    "grad_query": ("grad_query", "grad_tile", *_BY_QUERY, "mod_grads"),
    "grad_key_value": ("grad_key_value", "grad_tile", *_BY_KEY, "mod_grads"),
    "hopper_forward": (
        "hopper_forward", "hopper_produce", "hopper_consume", "hopper_step", "hopper_score",
        "hopper_line", "hopper_bits", "hopper_spans", "hopper_weights", "hopper_store",
        "hopper_tile",
        "hopper_common", "mods",
    ),
    "hopper_backward": (
        "hopper_backward", "hopper_grad_produce", "hopper_grad_consume", "hopper_grad_step",
        "hopper_grad_wide", "hopper_grad_score", "hopper_grad_store", "hopper_grad_tile",
        "hopper_turns", "hopper_order", "hopper_spans", "hopper_common", "mods",
        "mod_grads",
    ),
}  # fmt: skip
KERNELS = tuple(_PARTS)
EXTRAS = ("dropout", "exact_sum")
# What hopper_backward needs for gradients of captured tensors.
CAPTURED = ("hopper_captured", "hopper_sums", "hopper_distances")
_GLUON = ("hopper_forward", "hopper_backward")


def part(name: str) -> str:
    """Text of one template file."""
    return files(__name__).joinpath(f"{name}.py.jinja").read_text(encoding="utf-8")


@functools.cache
def source(kernel: str, extras: tuple[str, ...] = ()) -> str:
    """Text of one kernel with the device functions it calls.

    Args:
        kernel: one of KERNELS.
        extras: of EXTRAS, or CAPTURED: files whose functions its holes call.
    """
    parts = (*_PARTS[kernel], *extras)
    text = "\n\n".join(part(name).strip("\n") for name in parts) + "\n"
    # The user's functions are printed for the kernel's dialect (flexhop/compat/gluon.py).
    return text.replace("@triton.jit", "@gluon.jit") if kernel in _GLUON else text
