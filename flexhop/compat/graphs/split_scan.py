"""Inductor's Triton kernels for running sums that are split among programs (torch 2.11, 2.12).

`create_block_mask` for a long sequence compiles to such sums: the place of a block in its list is
the number of blocks before it. A split kernel handles one row per program, so the index of the
row is a number, not a tensor. 2.11 lacks a case for such an index if code fused with the sum uses
it as a value, and raises a TypeError. It also records the sum itself as a number. 2.13 does
neither.
"""

from __future__ import annotations

import functools
from typing import Any

import sympy
from torch._inductor.codegen import triton, triton_split_scan
from torch._inductor.virtualized import V
from torch.utils._sympy.symbol import SymT, make_symbol

from flexhop.compat import torch_version

__all__ = ["repair_split_scans"]

# Stands for any number. PyTorch's own symbols count up from 0.
_NUMBER = make_symbol(SymT.PRECOMPUTED_SIZE, 2**31)


def repair_split_scans() -> None:
    """From now on, generate split sums correctly."""
    if torch_version() >= (2, 13):
        return
    symbols, kernel = triton.TritonSymbols, triton_split_scan.TritonSplitScanKernel
    find, scan = symbols.get_block_shape.__func__, kernel.scan

    @functools.wraps(find)
    def get_block_shape(cls: Any, expr: sympy.Expr) -> Any:
        numbers = {symbol: _NUMBER for symbol in expr.free_symbols if _is_number(symbol)}
        return find(cls, expr.xreplace(numbers))

    @functools.wraps(scan)
    def scan_row(self: Any, *operands: Any) -> Any:
        sums = scan(self, *operands)
        for each in sums:
            each.shape = tuple(self.dense_size_list())
        return sums

    symbols.get_block_shape = classmethod(get_block_shape)  # type: ignore[assignment]
    kernel.scan = scan_row  # type: ignore[method-assign]


def _is_number(symbol: Any) -> bool:
    """Whether a kernel's index has one value per program."""
    node = V.kernel.range_tree_nodes.get(symbol)
    return node is not None and node.root.tensor_dim is None
