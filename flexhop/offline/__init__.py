"""Kernels without a GPU: generate them, run them on the CPU, compile them to machine code.

`generate` returns the kernels of a function, and `generate_code` does so without computing its
result. `flexhop.offline.interpret` runs them in Triton's interpreter or in an emulator of a GPU,
`flexhop.offline.cubin` compiles them for an architecture.
"""

from flexhop.offline.codegen import Generated, generate, generate_code
from flexhop.offline.kernel import Kernel

__all__ = ["Generated", "Kernel", "generate", "generate_code"]
