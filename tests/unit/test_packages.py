"""Packages compiled ahead of time: what Inductor's C++ allocates for kernels."""

from tests.programs import run_code

PROGRAM = """
import flexhop
from torch._inductor.codegen.common import TritonScratchWorkspace
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

workspace = TritonScratchWorkspace(size=512, generate_dtype_str=lambda: "uint8")
lines, name = CUDADeviceOpOverrides().cpp_scratch(7, workspace, prefix="global")
print(lines[0])
print(name)
empty = TritonScratchWorkspace(size=0, generate_dtype_str=lambda: "uint8")
print(CUDADeviceOpOverrides().cpp_scratch(8, empty)[0])
"""


def test_every_program_of_a_kernel_has_its_own_memory():
    """In a process of its own: importing flexhop is enough, before Inductor is."""
    done = run_code(PROGRAM)
    assert done.returncode == 0, done.stderr
    size, name, empty = done.stdout.splitlines()
    assert size.startswith(f"int64_t {name}_size[] = {{")
    assert "(512) * grid_0 * grid_1 * grid_2}" in size
    assert empty == "['CUdeviceptr scratch_8 = 0;']"
