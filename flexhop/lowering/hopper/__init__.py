"""The Hopper kernels, in Gluon: what they support, their constants, and the kernels before
them."""

from __future__ import annotations

from flexhop.compat.kernels import gluon_versions
from flexhop.compat.workers import warm as warm_workers
from flexhop.lowering.hopper.attention import ATTENTION
from flexhop.lowering.hopper.gradients import GRADIENTS
from flexhop.templates.hopper import MODULES

__all__ = ["DIALECT"]


class Hopper:
    """The dialect of sm_90: warpgroup matrix products, copies by the tensor memory accelerator."""

    name = "hopper"
    title = "Hopper kernel"
    architectures = ((9, 0),)
    forward = ATTENTION
    backward = GRADIENTS

    def expect(self) -> None:
        """Make Inductor's workers import the modules that the kernels need."""
        if not gluon_versions.obstacle():
            warm_workers.warm_workers(*MODULES)


DIALECT = Hopper()
