"""Inductor's C++: move index checks after the index. torch 2.11 and 2.12.

A kernel first loads, then computes. 2.11 emits the check of an index among the loads. If the mask
also uses the index as a number, that number was computed earlier under a name that is not declared
yet, and the C++ does not compile. `tokens[b, q_idx]` in a mask_mod with a symbolic length triggers
this.
"""

from __future__ import annotations

import functools
from typing import Any

import sympy
from torch._inductor.codegen import cpp

from flexhop.compat import torch_version

__all__ = ["place_checks"]


def place_checks() -> None:
    """From now on, emit checks of previously computed indices after them."""
    if torch_version() >= (2, 13):
        return
    check = cpp.CppKernel.check_bounds

    @functools.wraps(check)
    def check_bounds(self: Any, expr: sympy.Expr, *rest: Any) -> None:
        loads = self.loads
        if self.cse.try_get(cpp.cexpr(self.rename_indexing(expr))) is not None:
            self.loads = self.compute
        try:
            check(self, expr, *rest)
        finally:
            self.loads = loads

    cpp.CppKernel.check_bounds = check_bounds  # type: ignore[method-assign]
