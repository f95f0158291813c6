"""Kernel sources: Jinja files that are Python once their holes are filled. See README.md here."""

from __future__ import annotations

import functools
from importlib.resources import files

_CACHED = ("portable/cache/keys", "portable/cache/sums", "portable/cache/halves")
_BLOCKS = ("portable/lists", "portable/tile", "mods/mods")
_BY_QUERY = ("portable/key_blocks", *_BLOCKS)
_BY_KEY = ("portable/query_blocks", *_BLOCKS)
_ATTEND = ("portable/attend", "portable/keys")
_CACHED_ATTEND = ("portable/attend", *_CACHED)
_GRAD = ("portable/grad_tile",)
_HOPPER = ("hopper/spans", "hopper/common", "mods/mods")
# Every kernel is its own file, then the device functions it calls.
_PARTS = {
    "forward": ("portable/forward", *_ATTEND, *_BY_QUERY),
    "decode": ("portable/decode", *_ATTEND, *_BY_QUERY),
    "cached_forward": ("portable/forward", *_CACHED_ATTEND, *_BY_QUERY, "mods/key_mods"),
    "cached_decode": ("portable/decode", *_CACHED_ATTEND, *_BY_QUERY, "mods/key_mods"),
    "decode_combine": ("portable/decode_combine",),
    "mask_bits": ("portable/before/mask_bits", *_BLOCKS),
    "add_order": ("portable/before/add_order", "portable/query_blocks", "portable/lists"),
    "grad_query": ("portable/grad_query", *_GRAD, *_BY_QUERY, "mods/mod_grads"),
    "grad_key_value": ("portable/grad_key_value", *_GRAD, *_BY_KEY, "mods/mod_grads"),
    "hopper_forward": (
        "hopper/forward/kernel", "hopper/forward/produce", "hopper/forward/consume",
        "hopper/forward/step", "hopper/forward/score", "hopper/forward/line",
        "hopper/forward/bits", "hopper/spans", "hopper/forward/weights", "hopper/forward/store",
        "hopper/forward/tile", "hopper/common", "mods/mods",
    ),
    "hopper_backward": (
        "hopper/backward/kernel", "hopper/backward/produce", "hopper/backward/consume",
        "hopper/backward/step", "hopper/backward/wide", "hopper/backward/score",
        "hopper/backward/store", "hopper/backward/tile", "hopper/backward/turns",
        "hopper/backward/order", *_HOPPER, "mods/mod_grads",
    ),
}  # fmt: skip
KERNELS = tuple(_PARTS)
EXTRAS = ("mods/dropout", "mods/exact_sum")
# What hopper_backward needs for gradients of captured tensors.
CAPTURED = ("hopper/backward/captured", "hopper/backward/sums", "hopper/backward/distances")
_GLUON = ("hopper_forward", "hopper_backward")


def part(name: str) -> str:
    """Text of one template file, named by its path below this folder, such as "mods/dropout"."""
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
