"""Kernel sources: Jinja files that are Python once their holes are filled. See README.md here."""

from __future__ import annotations

import functools
from importlib.resources import files

# Every kernel is its own file, then the device functions it calls.
_PARTS = {
    "forward": ("forward", "attend", "lists", "tile", "mods"),
    "decode": ("decode", "attend", "lists", "tile", "mods"),
    "decode_combine": ("decode_combine",),
    "grad_query": ("grad_query", "grad_tile", "lists", "tile", "mods", "mod_grads"),
    "grad_key_value": ("grad_key_value", "grad_tile", "lists", "tile", "mods", "mod_grads"),
    "hopper_forward": (
        "hopper_forward", "hopper_produce", "hopper_consume", "hopper_step", "hopper_score",
        "hopper_store", "hopper_tile", "mods",
    ),
}  # fmt: skip
KERNELS = tuple(_PARTS)
_GLUON = ("hopper_forward",)


def part(name: str) -> str:
    """Text of one template file."""
    return files(__name__).joinpath(f"{name}.py.jinja").read_text(encoding="utf-8")


@functools.cache
def source(kernel: str) -> str:
    """Text of one kernel with the device functions it calls.

    Args:
        kernel: one of KERNELS.
    """
    text = "\n\n".join(part(name).strip("\n") for name in _PARTS[kernel]) + "\n"
    # The user's functions are printed for the kernel's dialect (flexhop/compat/gluon.py).
    return text.replace("@triton.jit", "@gluon.jit") if kernel in _GLUON else text
