"""Inductor's C++: three repairs.

`place_checks` (torch 2.11 and 2.12): move index checks after the index. A kernel first loads, then
computes. 2.11 emits the check of an index among the loads. If the mask also uses the index as a
number, that number was computed earlier under a name that is not declared yet, and the C++ does
not compile. `tokens[b, q_idx]` in a mask_mod with a symbolic length triggers this.

`keep_rows_apart` (2.11 to 2.15): loops that share outer loops hand over a row in a buffer of the
row's size. If these loops are vectorised over the outer loop, several rows write to that buffer at
once, and the results are wrong. A score_mod that reads `t[k]` of a strided tensor can
trigger this.

`split_evenly` (2.11 to 2.15): a loop over n that computes with `i // 50` is split into n // 50
loops over 50. The rest stays uninitialised, such as 6 of the 256 document ids in
`torch.arange(256) // 50`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import sympy
from torch._inductor.codegen import cpp
from torch._inductor.codegen.cpp_utils import LocalBufferContext
from torch._inductor.ir import ComputedBuffer
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

from flexhop.compat import torch_version

__all__ = ["keep_rows_apart", "place_checks", "split_evenly"]


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


def keep_rows_apart() -> None:
    """From now on, share no outer loop that is vectorised if a row's buffer is handed over."""
    node = cpp.OuterLoopFusedSchedulerNode
    check = node.check_outer_fusion_loop_level_attr

    @functools.wraps(check)
    def can_share(self: Any, kernels: Sequence[Any], depth: int) -> bool:
        context: Any = V.local_buffer_context
        outer = (loop for kernel in kernels for loop in kernel.loop_nest.loops[:depth])
        hands_over = isinstance(context, LocalBufferContext) and bool(context.local_buffers)
        if hands_over and any(loop.steps != 1 for loop in outer):
            return False
        return check(self, kernels, depth)

    node.check_outer_fusion_loop_level_attr = can_share  # type: ignore[method-assign]


def split_evenly() -> None:
    """From now on, split no loop that would leave a rest."""
    split = cpp.CppScheduling.try_loop_split

    @functools.wraps(split)
    def try_loop_split(self: Any, nodes: list[Any]) -> list[Any]:
        return nodes if any(map(_leaves_rest, nodes)) else split(self, nodes)

    cpp.CppScheduling.try_loop_split = try_loop_split  # type: ignore[method-assign]


def _leaves_rest(node: Any) -> bool:
    """Whether a loop of a node has a length that is not known to be a multiple of what its
    variable is divided by."""
    if not isinstance(node.node, ComputedBuffer):
        return False
    (lengths, _), body, _ = node.node.get_default_sizes_body()
    length_of = dict(zip(body.iter_vars, lengths, strict=False))
    divisions = (
        division.args
        for index in body.indexing_exprs.values()
        if isinstance(index, sympy.Expr)
        for division in index.find(FloorDiv)
    )
    sizes: Any = V.graph.sizevars
    return any(
        dividend in length_of
        and not sizes.statically_known_multiple_of(length_of[dividend], divisor)
        for dividend, divisor in divisions
    )
