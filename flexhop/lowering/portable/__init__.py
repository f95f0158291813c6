"""The kernels in portable Triton, which serve every GPU."""

from __future__ import annotations

from flexhop.lowering.portable.backward import GRADIENTS
from flexhop.lowering.portable.forward import ATTENTION

__all__ = ["DIALECT"]


class Portable:
    """The dialect that comes last: what no other one serves."""

    name = "triton"
    title = "portable kernel"
    architectures = None
    forward = ATTENTION
    backward = GRADIENTS

    def expect(self) -> None:
        """Nothing: nothing of these kernels can be prepared."""


DIALECT = Portable()
