"""Kernels without a GPU: generate them, run them on the CPU, compile them to machine code.

`generate` returns the kernels of a function, `generate_code` does so without computing its result,
and `generate_codes` does it for several GPUs. `flexhop.offline.interpret` runs them in Triton's
interpreter or in an emulator of a GPU, `flexhop.offline.cubin` compiles them for an architecture.
"""

from flexhop.offline.codegen import Generated, generate, generate_code, generate_codes
from flexhop.offline.kernel import Kernel

__all__ = ["Generated", "Kernel", "generate", "generate_code", "generate_codes"]
