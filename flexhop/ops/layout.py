"""Memory layout of results."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def dense_strides(sizes: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of `sizes` with the dimension order of `like`.

    The last dimension stays innermost if it is innermost in `like`. Otherwise the result is
    contiguous, because kernels write rows.
    """
    order = list(range(len(sizes)))
    if like[-1] == 1:
        # Stable sort: among equal strides (expanded dimensions), the outer dimension stays outer.
        order[:-1] = sorted(order[:-1], key=lambda d: like[d], reverse=True)
    strides = [0] * len(sizes)
    step = 1
    for dimension in reversed(order):
        strides[dimension] = step
        step = step * sizes[dimension]
    return tuple(strides)


def empty_ordered(sizes: Sequence[int], like: Tensor) -> Tensor:
    """Uninitialised dense tensor of `sizes` in the dtype, device and order of `like`."""
    return like.new_empty_strided(tuple(sizes), dense_strides(sizes, like.stride()))


def ordered(result: Tensor, like: Tensor) -> Tensor:
    """`result` stored in the dimension order of `like`."""
    # Do not write to an empty tensor: under torch.vmap and forward mode it may lack a dimension.
    strides = dense_strides(result.shape, like.stride())
    order = sorted(range(len(strides)), key=lambda d: strides[d], reverse=True)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return result.permute(order).contiguous().permute(inverse)
