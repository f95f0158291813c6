"""What LLVM is not told about vectors, because it believes it of numbers that nobody uses."""

import pytest
import torch
from triton._C.libtriton import llvm
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from flexhop.compat.kernels import isolated
from flexhop.compat.kernels.compiler_process import mend, without_promises
from flexhop.offline.ptx.machine import Machine
from flexhop.offline.ptx.memory import GlobalMemory
from flexhop.offline.ptx.order import ANY_ORDER
from flexhop.offline.ptx.parse import parse

# As LLVM's vectoriser leaves positions in a tile: `%s` shifts the thread's number, which loses
# bits, beside the program's, which does not, and only the second is used.
PAIR = """
target triple = "nvptx64-nvidia-cuda"
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
define ptx_kernel void @pair(ptr addrspace(1) %out) "nvvm.reqntid"="128" {
  %t = tail call range(i32 0, 128) i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %c = tail call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %a = insertelement <2 x i32> poison, i32 %t, i64 0
  %b = insertelement <2 x i32> %a, i32 %c, i64 1
  %m = and <2 x i32> %b, <i32 28, i32 poison>
  %s = shl nuw nsw <2 x i32> %b, <i32 28, i32 1>
  %u = shufflevector <2 x i32> %m, <2 x i32> %s, <2 x i32> <i32 0, i32 3>
  %r = lshr exact <2 x i32> %u, <i32 2, i32 1>
  %i = extractelement <2 x i32> %r, i64 0
  %v = extractelement <2 x i32> %s, i64 1
  %p = getelementptr i32, ptr addrspace(1) %out, i32 %t
  store i32 %v, ptr addrspace(1) %p
  %q = getelementptr i32, ptr addrspace(1) %p, i32 128
  store i32 %i, ptr addrspace(1) %q
  ret void
}
"""


def _stages():
    """Triton's, of a kernel for sm_90."""
    isolated.install()
    llvm.init_targets()  # as the stage before does
    backend = make_backend(GPUTarget("cuda", 90, 32))
    found = {}
    backend.add_stages(found, backend.parse_options({}), None)
    return found


def run(ptx, program):
    """The used number of each thread."""
    out = torch.full((256,), -1, dtype=torch.int32)
    memory = GlobalMemory("pair", {"out": out})
    symbols = {"pair_param_0": out.data_ptr()}
    machine = Machine(parse(ptx), memory, 0, symbols, ANY_ORDER)
    machine.start({"%ctaid.x": program, "%nctaid.x": 8})
    assert machine.run(10**6)
    return out[:128].tolist()


@pytest.mark.parametrize("program", [0, 5])
def test_a_number_that_nobody_uses_is_nowhere(program):
    with isolated.mended():
        write = _stages()["ptx"]
    assert run(write(PAIR, {}), program) == [2 * program] * 128


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("%1 = shl nuw nsw <2 x i32> %0, splat (i32 1)", "%1 = shl <2 x i32> %0, splat (i32 1)"),
        ("%1 = lshr exact <4 x i32> %0, %2", "%1 = lshr <4 x i32> %0, %2"),
        ("%1 = or disjoint <2 x i64> %0, %2", "%1 = or <2 x i64> %0, %2"),
        ("%1 = zext nneg <2 x i32> %0 to <2 x i64>", "%1 = zext <2 x i32> %0 to <2 x i64>"),
        ("%1 = icmp samesign ult <2 x i32> %0, %2", "%1 = icmp ult <2 x i32> %0, %2"),
        ("%1 = add nuw nsw i32 %0, 1", "%1 = add nuw nsw i32 %0, 1"),
        ("%1 = fadd nnan <2 x float> %0, %2", "%1 = fadd nnan <2 x float> %0, %2"),
    ],
)
def test_promises(line, found):
    assert without_promises(line) == found


def test_other_kernels_keep_theirs():
    """Only what flexhop compiles is mended: others' kernels are theirs."""
    assert _stages()["ptx"].__module__ != mend.__module__
    with isolated.mended():
        assert _stages()["ptx"].__module__ == mend.__module__
