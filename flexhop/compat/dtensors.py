"""DTensors: detection, placements, and local parts.

Importing DTensor takes a second or two, so it is imported with the first one seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor, without importing the class."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


class Axis(NamedTuple):
    """One dimension of a mesh: its size, this rank's index in it, the name of its group."""

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
    """A DTensor's placements: for each mesh dimension, the sharded dimension, or a word."""
    return tuple(_kind(placement) for placement in tensor.placements)


def _kind(placement: Any) -> str | int:
    # Subclasses of Shard interleave their parts, so a rank's part is not contiguous.
    if type(placement).__name__ == "Shard":
        return int(placement.dim)
    if placement.is_replicate():
        return "whole"
    return "partial" if placement.is_partial() else type(placement).__name__


def local_part(tensor: Any, summed: tuple[bool, ...]) -> Tensor:
    """A rank's part of a DTensor.

    Args:
        tensor: the DTensor.
        summed: for each mesh dimension, whether the ranks' gradients are addends.
    """
    from torch.distributed.tensor import Partial

    placements = [
        Partial() if sums else placement
        for sums, placement in zip(summed, tensor.placements, strict=True)
    ]
    return tensor.to_local(grad_placements=placements)


def whole_part(tensor: Any) -> Tensor:
    """The whole DTensor on this rank; every rank has the whole gradient."""
    from torch.distributed.tensor import Replicate

    whole = [Replicate()] * tensor.device_mesh.ndim
    return tensor.redistribute(placements=whole).to_local(grad_placements=whole)


def from_parts(tensor: Tensor, like: Any) -> Tensor:
    """A DTensor from parts, placed like `like`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(tensor, like.device_mesh, like.placements, run_check=False)
