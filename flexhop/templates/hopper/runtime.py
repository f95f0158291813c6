"""Device functions that the Hopper kernels import, because templates cannot contain them.

They call Triton's own builder, which a kernel's text does not see.
"""

# Triton reads the signatures of its functions: parameters of kernels stay without types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language._semantic import GluonCallerContext
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = [
    "add_async",
    "as_parts",
    "in_flight",
    "load_async",
    "specialize_warps",
    "stash",
    "store_async",
    "unstash",
]

# Copies by the tensor memory accelerator; the second names are those of 3.6, gone in 3.9.
load_async: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_async: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def add_async(tensor: Any, coordinates: Any, source: Any, _semantic: Any = None) -> None:
    """Start adding a tile of shared memory to a tensor; Triton's language has no name for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor.handle, coordinates, source.handle
    )


@builtin
def specialize_warps(
    functions: Any,
    num_warps: Any,
    num_registers: Any,
    _semantic: Any = None,
    _generator: Any = None,
) -> None:
    """Run functions side by side, the first by the kernel's own warps, as warp_specialize does.

    Triton visits a function once for each number of warps that run it, and the kernel's own warps
    have none in its view. Here they have: what one consumer calls is not visited again for the
    next. All of it is inlined later, so the machine code is the same.
    """
    outside = _generator.caller_context
    _generator.caller_context = GluonCallerContext(_semantic.builder.options.num_warps)
    try:
        gl.warp_specialize(
            functions, num_warps, num_registers, _semantic=_semantic, _generator=_generator
        )
    finally:
        _generator.caller_context = outside


@builtin
def in_flight(product: Any, _semantic: Any = None) -> Any:
    """A product that is not waited for yet as a tensor, which branches and loops may give back."""
    return gl.tensor(product.handle, product.type.tensor_type)


# Of scores [64, 64] as a product leaves them: four neighbours for each lane, then its next four.
_ASIDE = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0],
         [0, 8], [0, 16], [0, 32]]
    )
)  # fmt: skip


@builtin
def _as_scores(memory: Any, _semantic: Any = None) -> Any:
    """64 x 64 numbers of shared memory as `_ASIDE`; its own method has two names by version."""
    return _semantic.memdesc_reinterpret(memory, gl.float32, [64, 64], _ASIDE.value)


@builtin
def as_parts(
    memory: Any, shape: Any, layout: Any, dtype: Any = None, _semantic: Any = None
) -> Any:
    """Shared memory as parts of 16 bits per element, [parts, *one], one behind the other.

    dtype: of the parts; None: that of the memory.
    """
    # Constants of a kernel are wrapped, one by one or all together.
    # A tuple of Triton 3.6 takes any name for a field, so it is not asked for one.
    given = shape.value if isinstance(shape, gl.constexpr) else shape
    sizes = [size.value if isinstance(size, gl.constexpr) else size for size in given]
    element = dtype.value if isinstance(dtype, gl.constexpr) else dtype
    return _semantic.memdesc_reinterpret(memory, element or memory.dtype, sizes, layout)


@gluon.jit
def stash(memory, x):
    """Stash scores [64, 64] in shared memory [1, 1, 64, 64], where each thread reads its own."""
    _as_scores(memory).store(x)


@gluon.jit
def unstash(memory, layout: gl.constexpr):
    """Stashed scores, as new values: everything computed from the old ones is recomputed."""
    return _as_scores(memory).load(layout)
