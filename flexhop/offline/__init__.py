"""Kernels without a GPU: generate them, run them on the CPU, compile them to machine code.

`generate` serves `flexhop.explain()` and the tests. `flexhop.offline.interpret` runs generated
code in Triton's interpreter, `flexhop.offline.cubin` compiles it for an architecture.
"""

from flexhop.offline.codegen import Generated, generate
from flexhop.offline.kernel import Kernel

__all__ = ["Generated", "Kernel", "generate"]
