"""The files of each Hopper kernel, written in Gluon, and of the kernels before it."""

from __future__ import annotations

from flexhop.templates import join
from flexhop.templates.portable import BLOCKS, LISTS

_SHARED = ("hopper/common", "hopper/columns", "portable/walk")
_LATENT = (
    "hopper/latent/kernel", "hopper/latent/share", "hopper/latent/weigh",
    "hopper/latent/follow", "hopper/weighing",
)  # fmt: skip
KERNELS = {
    "forward": (
        "hopper/forward/kernel", "hopper/forward/produce",
        "hopper/forward/consume", "hopper/forward/one_loop", "hopper/forward/three_loops",
        "hopper/forward/step", "hopper/forward/score", "hopper/forward/line",
        "hopper/spans", "hopper/forward/weights", "hopper/forward/store",
        "hopper/weighing",
        "hopper/forward/tile", "hopper/forward/gather", "hopper/forward/places",
        *_SHARED, "mods/mods",
    ),
    "latent": (*_LATENT, "hopper/latent/dense", *_SHARED, "mods/mods"),
    "latent_paged": (*_LATENT, "hopper/latent/pages", *_SHARED, "mods/mods"),
    "backward": (
        "hopper/backward/kernel", "hopper/backward/produce", "hopper/backward/consume",
        "hopper/backward/step", "hopper/backward/wide", "hopper/backward/halves",
        "hopper/backward/score",
        "hopper/backward/store", "hopper/backward/query", "hopper/backward/tile",
        "hopper/backward/turns",
        "hopper/spans", *_SHARED, "mods/mods", "mods/mod_grads",
    ),
}  # fmt: skip
# In portable Triton: kernels that run before one of those above.
BEFORE = {
    "mask_bits": ("hopper/before/mask_bits", *BLOCKS),
    "add_order": ("hopper/before/add_order", "portable/query_blocks", *LISTS),
}
# Files that backward needs for gradients of captured tensors.
CAPTURED = ("hopper/backward/captured", "hopper/backward/sums", "hopper/backward/distances")
# Files that forward needs if it copies a bias of pairs.
PAIRS = ("hopper/forward/pairs",)
# Names that IMPORTS imports from here.
MODULES = ("flexhop.templates.hopper.records", "flexhop.templates.hopper.runtime")
IMPORTS = """
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait,
)
from flexhop.templates.hopper.records import *
from flexhop.templates.hopper.runtime import (
    add_async, as_parts, in_flight, load_async, specialize_warps, stash, store_async, unstash,
)
"""


def source(kernel: str, extras: tuple[str, ...] = ()) -> str:
    """Text of a kernel.

    Args:
        kernel: one of KERNELS.
        extras: CAPTURED, PAIRS, or nothing.
    """
    # Shared files are Triton that Gluon accepts; the user's functions are printed for the kernel's
    # dialect (flexhop/compat/kernels/gluon.py).
    return join((*KERNELS[kernel], *extras)).replace("@triton.jit", "@gluon.jit")


def source_before(kernel: str) -> str:
    """Text of one of BEFORE."""
    return join(BEFORE[kernel])
