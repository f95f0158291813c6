"""Meshes of a fleet's ranks, made once: each process group of gloo wakes a thread all the time."""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed.problems import DEVICE


@functools.cache
def named_mesh(**sizes: int) -> DeviceMesh:
    """A mesh by the names and sizes of its dimensions."""
    return init_device_mesh(DEVICE.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@functools.cache
def unnamed_mesh(*sizes: int) -> DeviceMesh:
    """A mesh whose dimensions have no names."""
    return init_device_mesh(DEVICE.type, sizes)


def mesh_of(*shape: int) -> DeviceMesh:
    """The fleet's ranks by sequence, and by heads if two sizes are given; 1-D by default."""
    sizes = shape or (dist.get_world_size(),)
    return named_mesh(**dict(zip(("cp", "heads"), sizes, strict=False)))
