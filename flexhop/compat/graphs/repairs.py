"""Repairs of Inductor's schedulers, searches and wrappers; each says which versions need it.

They are installed when the module that they repair is imported, so they import it themselves.
"""

from __future__ import annotations

import functools
from typing import Any

import sympy

from flexhop.compat import torch_version
from flexhop.compat.mods.location import is_inside_flexhop

__all__ = [
    "keep_renames",
    "leave_softmaxes_of_mods",
    "repair_scratch",
    "repair_split_scans",
    "separate_loops",
]

_TOUCHED = "_flexhop_touched"  # whether earlier text of a kernel loads, and whether it stores


def separate_loops() -> None:
    """From now on, threads wait before a loop that uses what an earlier one may have stored.

    An Inductor kernel for reductions (torch 2.11 to 2.15) may store numbers in one loop and read
    them in the next. Triton chooses for each load and store which thread does it, by the width of
    the numbers: bools and fp32 go to different threads. If no reduction between the loops makes
    threads wait, one reads before another has stored. Seen on an H200: gradients of tangents in
    fp32, with a mask in one byte beside scores in four, differed from run to run.
    """
    from torch._inductor.codegen.triton import TritonKernel

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


def keep_renames() -> None:
    """From now on, keep the dependencies of nodes whose loops change (torch 2.11 to 2.14).

    `index_put(accumulate=True)`, which sums gradients of captured tensors in the reference, adds
    to a buffer of zeros. Under Inductor the sums have a name of their own, and a reader depends on
    that name; its loop names the buffer. If loops are fused or split, the dependencies of a node
    are read from its loop again, and only 2.15 then renames them. A reader without its dependency
    may come before the additions, and then reads zeros.
    """
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode
    from torch.utils._ordered_set import OrderedSet

    if torch_version() >= (2, 15):
        return
    recompute = SchedulerNode.recompute_size_and_body

    @functools.wraps(recompute)
    def recompute_and_rename(self: Any, *args: Any, **kwargs: Any) -> None:
        # Those that no loop shows, which 2.11 drops.
        added = OrderedSet(d for d in self.read_writes.reads if isinstance(d, (WeakDep, StarDep)))
        recompute(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.with_read(added).rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_and_rename  # type: ignore[method-assign]


def repair_scratch() -> None:
    """From now on, C++ wrappers allocate a kernel's own memory for every program (2.11, 2.12).

    Kernels that copy by tensor descriptors write these to such memory, where each program has a
    part. 2.11 allocates one part for all programs, so the others write over what lies behind it: a
    call ended with an illegal instruction, or another tensor was overwritten. 2.13 allocates what
    the grid needs.
    """
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

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


def leave_softmaxes_of_mods() -> None:
    """From now on, the search for softmaxes leaves out those of mods (torch 2.11, 2.12).

    It must come before Inductor's first graph, which prepares the search.

    Inductor finds a softmax in a graph, to compute its largest element and its sum in one loop. If
    the row is shorter than eight numbers, or the loop is split, 2.11 computes them apart and warns
    that it does. `weight.softmax(-1)[h]` in a mod is computed before the kernel, so the softmax is
    one of the graph although nobody wrote it there. It is computed apart without a warning. A
    softmax outside of attention warns as it does without flexhop. 2.13 never warns.
    """
    from torch._inductor.fx_passes import post_grad

    if torch_version() >= (2, 13):
        return
    wants = post_grad.prepare_softmax_extra_check

    @functools.wraps(wants)
    def wants_and_is_apart(match: Any) -> bool:
        return wants(match) and not any(map(is_inside_flexhop, match.nodes))

    post_grad.prepare_softmax_extra_check = wants_and_is_apart


def repair_split_scans() -> None:
    """From now on, generate running sums that are split among programs correctly (2.11, 2.12).

    `create_block_mask` for a long sequence compiles to such sums: the place of a block in its list
    is the number of blocks before it. A split kernel handles one row per program, so the index of
    the row is a number, not a tensor. 2.11 lacks a case for such an index if code fused with the
    sum uses it as a value, and raises a TypeError. It also records the sum itself as a number.
    """
    from torch._inductor.codegen import triton, triton_split_scan
    from torch._inductor.virtualized import V
    from torch.utils._sympy.symbol import SymT, make_symbol

    if torch_version() >= (2, 13):
        return
    symbols, kernel = triton.TritonSymbols, triton_split_scan.TritonSplitScanKernel
    find, scan = symbols.get_block_shape.__func__, kernel.scan
    # Stands for any number. PyTorch's own symbols count up from 0.
    any_number = make_symbol(SymT.PRECOMPUTED_SIZE, 2**31)

    def is_number(symbol: Any) -> bool:
        """Whether a kernel's index has one value per program."""
        node = V.kernel.range_tree_nodes.get(symbol)
        return node is not None and node.root.tensor_dim is None

    @functools.wraps(find)
    def get_block_shape(cls: Any, expr: sympy.Expr) -> Any:
        numbers = {symbol: any_number for symbol in expr.free_symbols if is_number(symbol)}
        return find(cls, expr.xreplace(numbers))

    @functools.wraps(scan)
    def scan_row(self: Any, *operands: Any) -> Any:
        sums = scan(self, *operands)
        for each in sums:
            each.shape = tuple(self.dense_size_list())
        return sums

    symbols.get_block_shape = classmethod(get_block_shape)  # type: ignore[assignment]
    kernel.scan = scan_row  # type: ignore[method-assign]
