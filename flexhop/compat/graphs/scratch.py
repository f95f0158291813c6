"""Inductor's packages compiled ahead of time: memory of a kernel's own (torch 2.11, 2.12).

Kernels that copy by tensor descriptors write these to such memory, where each program has a part.
2.11 allocates one part for all programs, so the others write over what lies behind it: a call
ended with an illegal instruction, or another tensor was overwritten. 2.13 allocates what the grid
needs.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

from flexhop.compat import torch_version

__all__ = ["repair_scratch"]


def repair_scratch() -> None:
    """From now on, C++ wrappers allocate a part for every program."""
    if torch_version() >= (2, 13):
        return
    allocate = CUDADeviceOpOverrides.cpp_scratch

    @functools.wraps(allocate)
    def for_every_program(self: Any, idx: int, workspace: Any, prefix: Any = None) -> Any:
        found = allocate(self, idx, workspace, prefix)
        if found is None:
            return None
        lines, name = found
        size = f"_size[] = {{{workspace.size}}};"
        whole = f"_size[] = {{int64_t({workspace.size}) * grid_0 * grid_1 * grid_2}};"
        return [line.replace(size, whole) for line in lines], name

    CUDADeviceOpOverrides.cpp_scratch = for_every_program  # type: ignore[method-assign]
