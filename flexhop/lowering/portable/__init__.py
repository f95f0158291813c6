"""The portable Triton kernels, which support every GPU."""

from __future__ import annotations

from flexhop.lowering.portable.backward import GRADIENTS
from flexhop.lowering.portable.forward import ATTENTION

__all__ = ["DIALECT"]


class Portable:
    """The last dialect: it takes the calls that no other one supports."""

    name = "triton"
    title = "portable kernel"
    architectures = None
    forward = ATTENTION
    backward = GRADIENTS

    def expect(self) -> None:
        """Does nothing: these kernels need no preparation."""


DIALECT = Portable()
