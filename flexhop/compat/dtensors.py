"""DTensors: which tensors are some, how they are placed, and their local parts.

Importing DTensor takes a second or two, so it is imported when the first one is met.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor, without importing the class."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


class Axis(NamedTuple):
    """One dimension of a mesh: its size, this rank's place in it, the name of its group."""

    size: int
    place: int
    group: str


def axes_of(mesh: Any) -> tuple[Axis, ...]:
    """The dimensions of a mesh."""
    return tuple(
        Axis(mesh.size(dim), mesh.get_local_rank(dim), mesh.get_group(dim).group_name)
        for dim in range(mesh.ndim)
    )


def kinds_of(tensor: Any) -> tuple[str | int, ...]:
    """How a DTensor is placed: by mesh dimension the dimension it is sharded in, or a word."""
    return tuple(_kind(placement) for placement in tensor.placements)


def _kind(placement: Any) -> str | int:
    # Subclasses of Shard interleave their parts, so that a rank's is no run.
    if type(placement).__name__ == "Shard":
        return int(placement.dim)
    if placement.is_replicate():
        return "whole"
    return "partial" if placement.is_partial() else type(placement).__name__


def local_part(tensor: Any, summed: tuple[bool, ...]) -> Tensor:
    """A rank's part of a DTensor.

    Args:
        tensor: the DTensor.
        summed: by mesh dimension, whether gradients of the ranks are parts of a sum.
    """
    from torch.distributed.tensor import Partial

    placements = [
        Partial() if sums else placement
        for sums, placement in zip(summed, tensor.placements, strict=True)
    ]
    return tensor.to_local(grad_placements=placements)


def whole_part(tensor: Any) -> Tensor:
    """All of a DTensor on this rank; every rank has the whole gradient."""
    from torch.distributed.tensor import Replicate

    whole = [Replicate()] * tensor.device_mesh.ndim
    return tensor.redistribute(placements=whole).to_local(grad_placements=whole)


def from_parts(tensor: Tensor, like: Any) -> Tensor:
    """A DTensor of parts that are placed as `like` is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(tensor, like.device_mesh, like.placements, run_check=False)
