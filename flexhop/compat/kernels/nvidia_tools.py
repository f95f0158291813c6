"""NVIDIA's machine code tools, from Triton's wheel or the CUDA toolkit."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["find_tool", "resource_usage", "run_tool"]


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Resources per thread of a kernel: registers (REG), bytes of local memory (STACK, LOCAL)."""
    usage = run_tool("cuobjdump", cubin, "--dump-resource-usage")
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}


def run_tool(name: str, binary: bytes, *options: str) -> str:
    """Run a tool on a cubin and return its output."""
    tool = find_tool(name)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        done = subprocess.run([tool, *options, file.name], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name} {' '.join(options)} failed: {done.stderr.strip()}")
    return done.stdout


def find_tool(name: str) -> str:
    """Path of a tool."""
    import triton  # calls on a CPU import this module, and need no Triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    tool = str(bundled) if bundled.exists() else shutil.which(name)
    if tool is None:
        raise FileNotFoundError(f"{name} is neither in Triton's package nor on PATH.")
    return tool
