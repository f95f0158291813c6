import pickle
import subprocess
from unittest import mock

import pytest
import torch

from flexhop.compat.kernels.machine_code import find_tool
from flexhop.offline import generate
from flexhop.offline.cubin import (
    ARCHITECTURES,
    compile_kernel,
    compile_source,
    local_accesses,
    lost_addends,
)
from flexhop.offline.interpret import run_kernel
from tests.unit.offline.kernels import POINTERS, kernel

_PRODUCT = """
i = tl.arange(0, 64)
at = i[:, None] * 64 + i[None, :]
total = tl.zeros([64, 64], tl.float32)
for step in range(0, steps):
    total += tl.dot(tl.load(a + step * 4096 + at), tl.load(b + step * 4096 + at))
tl.store(out + at, total)
"""
_SIGNATURE = {"a": "*bf16", "b": "*bf16", "out": "*fp32", "steps": "i32"}
_INSTRUCTION = {80: "mma", 86: "mma", 89: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_matrix_products(architecture):
    cubin = compile_kernel(kernel(_SIGNATURE, _PRODUCT), architecture)
    found = {name for name in ("mma", "wgmma", "tcgen05") if getattr(cubin, name)}
    assert found == {_INSTRUCTION[architecture]}
    assert 16 < cubin.registers <= 255
    assert cubin.shared >= 2 * 64 * 64 * 2
    assert (cubin.spills, cubin.local) == (0, 0)


def test_machine_code_and_its_loop():
    cubin = compile_kernel(kernel(_SIGNATURE, _PRODUCT), 80, num_stages=1)
    loops = cubin.loops()
    assert any("HMMA" in loop for loop in loops)
    assert all("HMMA" not in line for line in cubin.sass().splitlines()[:5])


def test_spills_are_counted():
    body = _PRODUCT.replace("64", "128").replace("4096", "16384")
    cubin = compile_kernel(kernel(_SIGNATURE, body), 80, num_warps=1)
    assert cubin.spills > 0
    assert cubin.stack > 0


def test_a_kernel_without_local_memory_is_not_disassembled():
    with mock.patch("flexhop.offline.cubin._sass") as disassemble:
        cubin = compile_kernel(kernel(_SIGNATURE, _PRODUCT), 80)
    assert (cubin.stack, cubin.local, cubin.spills) == (0, 0, 0)
    assert local_accesses(cubin.sass()) == 0
    disassemble.assert_not_called()


def test_kernel_of_inductor_needs_its_constants():
    (written,) = generate(lambda x: x.sum(-1), torch.ones(8, 40)).kernels
    with pytest.raises(ValueError, match=r"needs values for \['XBLOCK'\]"):
        compile_kernel(written, 90)
    assert compile_kernel(written, 90, {"XBLOCK": 8}).registers > 0


def test_compiling_after_interpreting():
    written = kernel(POINTERS, "i = tl.arange(0, 8)\ntl.store(out + i, tl.sum(tl.load(x + i), 0))")
    out = torch.empty(8)
    run_kernel(written, (1,), {"x": torch.ones(8), "out": out})
    assert (out == 8).all()
    assert compile_kernel(written, 90).registers > 0


def test_result_travels_between_processes():
    cubin = compile_kernel(kernel(_SIGNATURE, _PRODUCT), 80)
    assert pickle.loads(pickle.dumps(cubin)) == cubin


def test_source():
    function = kernel(_SIGNATURE, _PRODUCT).module().kernel
    cubin = compile_source(function, _SIGNATURE, {}, 90, num_warps=8)
    assert cubin.wgmma > 0


_HALF_OF_A_SUM = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry high_half(.param .u64 terms, .param .u64 sums)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<4>;
    .reg .b16 %rs<2>;
    ld.param.b64 %rd1, [terms];
    ld.param.b64 %rd2, [sums];
    ld.global.b32 %r1, [%rd1];
    mov.b32 %r2, 0x00800000;
    add.s16x2 %r3, %r1, %r2;
    mov.b32 {_, %rs1}, %r3;
    st.global.b16 [%rd2], %rs1;
    ret;
}
"""


def test_lost_constants_are_found(tmp_path):
    """With ptxas of CUDA 12.8; once a later one keeps the constant, the mend may go."""
    source, binary = tmp_path / "sum.ptx", tmp_path / "sum.cubin"
    source.write_text(_HALF_OF_A_SUM)
    subprocess.run([find_tool("ptxas"), "-arch=sm_90a", "-o", binary, source], check=True)
    (lost,) = lost_addends(_HALF_OF_A_SUM, binary.read_bytes())
    assert lost.startswith("VIADD.16x2")
    assert lost_addends("ld.global.b32", binary.read_bytes()) == []
