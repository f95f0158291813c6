"""The kernels of Hopper GPUs, in Gluon: what they serve, their constants, and what runs before."""

from __future__ import annotations

from flexhop.compat import warm
from flexhop.lowering.hopper import versions
from flexhop.lowering.hopper.attention import ATTENTION
from flexhop.lowering.hopper.gradients import GRADIENTS
from flexhop.templates.hopper import MODULES

__all__ = ["DIALECT"]


class Hopper:
    """The dialect of sm_90: products of warp groups, copies by the tensor memory accelerator."""

    name = "hopper"
    title = "Hopper kernel"
    architectures = ((9, 0),)
    forward = ATTENTION
    backward = GRADIENTS

    def expect(self) -> None:
        """Have Inductor's workers import what the kernels import."""
        if not versions.obstacle():
            warm.warm_workers(*MODULES)


DIALECT = Hopper()
