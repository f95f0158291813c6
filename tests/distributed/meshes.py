"""Meshes of a fleet's ranks, made once: each process group of gloo wakes a thread all the time."""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed.problems import DEVICE

make_mesh = functools.cache(init_device_mesh)


def mesh_of(*shape: int) -> DeviceMesh:
    """The fleet's ranks by sequence, and by heads if two sizes are given; 1-D by default."""
    sizes = shape or (dist.get_world_size(),)
    return make_mesh(DEVICE.type, sizes, mesh_dim_names=("cp", "heads")[: len(sizes)])
