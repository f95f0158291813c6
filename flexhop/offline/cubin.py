"""Compile generated kernels to machine code for a GPU that may be absent, and inspect it.

All functions take and return picklable values, so a process pool can compile kernels for several
architectures at once. Triton caches compiled kernels on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from flexhop.compat.kernels.isolated import mended
from flexhop.compat.kernels.machine_code import find_tool, resource_usage, run_tool
from flexhop.offline.kernel import Kernel

__all__ = [
    "ARCHITECTURES",
    "Cubin",
    "WrongMachineCode",
    "compile_kernel",
    "compile_source",
    "local_accesses",
    "lost_addends",
    "product_notes",
    "wrong_products",
]

ARCHITECTURES = (80, 86, 89, 90, 100, 120)

_MATRIX_PRODUCTS = {
    "mma": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
}


@dataclasses.dataclass(frozen=True)
class Cubin:
    """The machine code of one kernel, and its resources.

    Args:
        name: name of the kernel.
        architecture: 90 for sm_90.
        registers: per thread.
        stack: bytes of local memory per thread: arrays that do not fit in registers, and spills.
        local: bytes of local memory per thread that the loader reserves besides the stack.
        shared: bytes of shared memory per program.
        scratch: bytes of global memory per program, for descriptors of tensors.
        spills: register spills: loads from and stores to local memory in the machine code.
        mma: warp-level matrix products in the PTX (sm_80 and later).
        wgmma: warpgroup-level matrix products (sm_90).
        tcgen05: tensor-memory matrix products (sm_100).
        ir: Triton's text with layouts, the last before LLVM's.
        ptx: assembly text.
        binary: the cubin.
        log: ptxas's, with -v. Empty if Triton found the kernel in its cache on disk.
    """

    name: str
    architecture: int
    registers: int
    stack: int
    local: int
    shared: int
    scratch: int
    spills: int
    mma: int
    wgmma: int
    tcgen05: int
    ir: str = dataclasses.field(repr=False)
    ptx: str = dataclasses.field(repr=False)
    binary: bytes = dataclasses.field(repr=False)
    log: str = dataclasses.field(repr=False)

    def sass(self) -> str:
        """The machine code as text, one instruction per line."""
        return _sass(self.binary)

    def loops(self) -> list[str]:
        """The bodies of the loops in order of their first instruction: from a jump's target to it.

        A jump to itself is not a loop: it pads after the last instruction.
        """
        lines = self.sass().splitlines()
        labels = {m[1]: n for n, line in enumerate(lines) if (m := _LABEL.match(line.strip()))}
        jumps = ((n, m[1]) for n, line in enumerate(lines) if (m := _JUMP.search(line)))
        spans = sorted((labels[target], n) for n, target in jumps if labels.get(target, n) < n - 1)
        return ["\n".join(lines[start : end + 1]) for start, end in spans]


_LABEL = re.compile(r"(\.L_x_\d+):$")
_JUMP = re.compile(r"\bBRA(?:\.\w+)*\s.*?\(?(\.L_x_\d+)\)?")
_LOCAL_ACCESS = re.compile(r"\b(?:LDL|STL)\b")


def local_accesses(sass: str) -> int:
    """Loads from and stores to local memory in machine code, such as a loop of `Cubin.loops`."""
    return len(_LOCAL_ACCESS.findall(sass))


def compile_kernel(
    kernel: Kernel,
    architecture: int,
    constants: Mapping[str, Any] | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> Cubin:
    """Compile a generated kernel.

    Args:
        kernel: Triton or Gluon. For Gluon, the architecture it was written for.
        architecture: 90 for sm_90; see `ARCHITECTURES`.
        constants: for the kernel's `constexprs`, e.g. {"XBLOCK": 1024}; Inductor's own kernels
            have some, templates have none.
        num_warps: overrides the kernel's own.
        num_stages: overrides the kernel's own.

    Raises:
        ValueError: a constant is missing.
        WrongMachineCode: see `lost_addends`.
    """
    constants = dict(constants or {})
    missing = set(kernel.constexprs) - set(constants)
    if missing:
        raise ValueError(f"{kernel.name} needs values for {sorted(missing)}.")
    function = getattr(kernel.module(), kernel.name)
    configs = kernel.meta.get("configs") or [{}]
    options = {
        "num_warps": num_warps or kernel.num_warps or 4,
        "num_stages": num_stages or kernel.num_stages or 2,
        "enable_fp_fusion": kernel.meta.get("enable_fp_fusion", True),
        # As Inductor does: with assertions about indices, without those about overflow.
        "debug": kernel.inductor_meta.get("assert_indirect_indexing", True),
        "sanitize_overflow": False,
    }
    return compile_source(
        function,
        kernel.meta["signature"] | dict.fromkeys(constants, "constexpr"),
        kernel.meta.get("constants", {}) | constants,
        architecture,
        attributes=configs[0],
        **options,
    )


def compile_source(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    architecture: int,
    *,
    attributes: Mapping[Any, Any] | None = None,
    **options: Any,
) -> Cubin:
    """Compile a function decorated with `@triton.jit` or `@gluon.jit`.

    Args:
        function: the decorated function, outside the interpreter.
        signature: argument name -> type, e.g. {"q": "*bf16", "n": "i32", "BLOCK": "constexpr"}.
        constants: values of the constexpr arguments.
        architecture: 90 for sm_90.
        attributes: argument position as a 1-tuple -> facts about it, e.g.
            {(0,): [["tt.divisibility", 16]]}.
        **options: options of Triton's compiler, e.g. num_warps=4, num_stages=2.

    Raises:
        WrongMachineCode: see `lost_addends`.
    """
    # Triton's default is about to change; Inductor sets it explicitly, too.
    options.setdefault("enable_fp_fusion", True)
    source = _source_class(function)(
        fn=function,
        signature=dict(signature),
        constexprs=dict(constants),
        attrs={_position(key): value for key, value in (attributes or {}).items()},
    )
    target = GPUTarget("cuda", architecture, 32)
    with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log, mended():
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=options)
    return _inspect(compiled, architecture, log.getvalue())


def _source_class(function: Any) -> Any:
    if not function.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _position(key: Any) -> tuple[int, ...]:
    return key if isinstance(key, tuple) else (key,)


def _inspect(compiled: CompiledKernel, architecture: int, log: str) -> Cubin:
    binary, ptx = compiled.asm["cubin"], compiled.asm["ptx"]
    if lost := lost_addends(ptx, binary):
        raise WrongMachineCode(f"{compiled.metadata.name}: ptxas lost constants: {lost}")
    counts = resource_usage(binary)
    # Spills are in local memory. Where there is none, nothing needs to be disassembled.
    has_local = counts["STACK"] + counts["LOCAL"] > 0
    return Cubin(
        name=compiled.metadata.name,
        architecture=architecture,
        registers=counts["REG"],
        stack=counts["STACK"],
        local=counts["LOCAL"],
        shared=compiled.metadata.shared,
        scratch=compiled.metadata.global_scratch_size,
        spills=local_accesses(_sass(binary)) if has_local else 0,
        ir=compiled.asm["ttgir"],
        ptx=ptx,
        binary=binary,
        log=log,
        **{name: len(re.findall(text, ptx)) for name, text in _MATRIX_PRODUCTS.items()},
    )


def product_notes(cubin: Cubin) -> list[str]:
    """ptxas' notes on warpgroup-level products that it had to serialise.

    Such a kernel is correct but runs at a fraction of the speed, and Triton shows no notes.
    """
    return [line for line in (cubin.log or _assemble(cubin)).splitlines() if "(C75" in line]


class WrongMachineCode(RuntimeError):
    """The machine code does not compute what the kernel says."""


def lost_addends(ptx: str, binary: bytes) -> list[str]:
    """Sums of two 16-bit halves in the machine code whose constant is gone.

    ptxas up to 13.1 writes 0 for the constant on sm_90 if only one half of the sum is read. LLVM
    makes such sums from 32-bit ones whose terms it knows to be small.
    """
    if "add.s16x2" not in ptx:
        return []
    return _LOST_ADDEND.findall(_sass(binary))


_LOST_ADDEND = re.compile(r"VIADD\.16x2 R\d+, \S+, 0x0\b")


def wrong_products(cubin: Cubin) -> list[str]:
    """Operands of products that Triton up to 3.7 computes wrongly, as it writes them.

    An operand whose numbers come from narrower ones may be held for several products at once
    (kWidth). With eight, and 16 numbers to add up, half of the sum is lost.
    """
    return sorted(set(_WRONG_OPERAND.findall(cubin.ir)))


_WRONG_OPERAND = re.compile(
    r"tensor<(?:\d+x16x\w+, #ttg\.dot_op<\{opIdx = 0|16x\d+x\w+, #ttg\.dot_op<\{opIdx = 1)"
    r", parent = #mma\d*, kWidth = (?:8|16)\}>>"
)


def _assemble(cubin: Cubin) -> str:
    """ptxas's log of a kernel that Triton had in its cache."""
    architecture = f"sm_{cubin.architecture}{'a' if cubin.architecture == 90 else ''}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(cubin.ptx)
        file.flush()
        command = [find_tool("ptxas"), "-v", f"--gpu-name={architecture}", "-o", os.devnull]
        done = subprocess.run([*command, file.name], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ptxas failed: {done.stderr.strip()}")
    return done.stderr


@functools.lru_cache(maxsize=4)  # counted, then looked at
def _sass(binary: bytes) -> str:
    text = run_tool("nvdisasm", binary, "--print-code", "--no-dataflow")
    return "\n".join(line for line in text.splitlines() if line.strip())
