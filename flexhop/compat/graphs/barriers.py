"""Barriers between the loops of Inductor's Triton kernels for reductions (torch 2.11 to 2.15).

Such a kernel may store numbers in one loop and read them in the next. Triton chooses for each load
and each store which thread does it, by the width of the numbers: bools and fp32 go to different
threads. If no reduction between the loops makes threads wait, one reads before another has stored.
Seen on an H200: gradients of tangents in fp32, with a mask in one byte beside scores in four,
differed from run to run.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._inductor.codegen.triton import TritonKernel

__all__ = ["separate_loops"]

_TOUCHED = "_flexhop_touched"  # whether earlier text of a kernel loads, and whether it stores


def separate_loops() -> None:
    """From now on, threads wait before a loop that uses what an earlier one may have stored."""
    generate = TritonKernel.codegen_body

    @functools.wraps(generate)
    def codegen_body(self: Any) -> None:
        loads, stores = bool(self.loads), bool(self.stores or self.post_loop_store)
        loaded, stored = getattr(self, _TOUCHED, (False, False))
        if (stored and loads) or ((loaded or stored) and stores):
            self.body.writeline("tl.debug_barrier()")
        setattr(self, _TOUCHED, (loaded or loads, stored or stores))
        generate(self)

    TritonKernel.codegen_body = codegen_body  # type: ignore[method-assign]
