"""The files of each portable kernel: its own, then those of the device functions it calls."""

from __future__ import annotations

from flexhop.templates import join

_CACHED = (
    "portable/cache/keys", "portable/cache/sums", "portable/cache/halves", "portable/products",
)  # fmt: skip
LISTS = ("portable/lists", "portable/walk")
BLOCKS = (*LISTS, "portable/tile", "portable/weights", "mods/mods")
_BY_QUERY = ("portable/key_blocks", *BLOCKS)
_BY_KEY = ("portable/query_blocks", *BLOCKS)
_ATTEND = ("portable/attend", "portable/keys", "portable/products", *_BY_QUERY)
_BENT = ("mods/mod_push", "mods/mod_bend")
_CACHED_ATTEND = ("portable/attend", *_CACHED, *_BY_QUERY, "mods/key_mods")
_GRAD = ("portable/grad_tile", "portable/lse", "portable/products")
_PIECES = ("portable/wide/pieces",)
_WIDE_ATTEND = ("portable/wide/attend", *_PIECES)
KERNELS = {
    "forward": ("portable/forward", *_ATTEND),
    "decode": ("portable/decode", *_ATTEND),
    "jvp_forward": (
        "portable/jvp_forward", "portable/push_tile", "portable/products", *_BY_QUERY,
        "mods/mod_push",
    ),
    "cached_forward": ("portable/forward", *_CACHED_ATTEND),
    "cached_decode": ("portable/decode", *_CACHED_ATTEND),
    "head_lists": ("portable/head_lists", *LISTS),
    "decode_combine": ("portable/decode_combine", "portable/weights"),
    "jvp_grad_query": (
        "portable/jvp_grad_query", "portable/push_grad_tile", "portable/lse", *_BY_QUERY, *_BENT,
    ),
    "jvp_grad_key_value": (
        "portable/jvp_grad_key_value", "portable/push_grad_tile", "portable/lse", *_BY_KEY, *_BENT,
    ),
    "grad_query": ("portable/grad_query", *_GRAD, *_BY_QUERY, "mods/mod_grads"),
    "grad_key_value": (
        "portable/grad_key_value", "portable/few_keys", *_GRAD, *_BY_KEY, "mods/mod_grads",
    ),
    "wide_decode": (
        "portable/wide/decode", *_WIDE_ATTEND, "portable/keys", "portable/products", *_BY_QUERY,
    ),
    "cached_wide_decode": (
        "portable/wide/decode", *_WIDE_ATTEND, *_CACHED, *_BY_QUERY, "mods/key_mods",
    ),
    "wide_grad_query": (
        "portable/wide/grad_query", *_GRAD, *_PIECES, *_BY_QUERY, "mods/mod_grads",
    ),
    "wide_grad_key_value": (
        "portable/wide/grad_key_value", *_GRAD, *_PIECES, *_BY_KEY, "mods/mod_grads",
    ),
}  # fmt: skip
# Files whose functions only some calls need.
EXTRAS = ("dropout", "exact_sum", "groups", "row_sums")


def source(kernel: str, extras: tuple[str, ...] = ()) -> str:
    """Text of a kernel.

    Args:
        kernel: one of KERNELS.
        extras: some of EXTRAS.
    """
    return join((*KERNELS[kernel], *(f"mods/{extra}" for extra in extras)))
