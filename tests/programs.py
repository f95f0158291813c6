"""Programs in processes of their own that need not import PyTorch: a server did, and forks.

The server is a new interpreter that has imported some modules and done nothing else. What it
forks differs from a new interpreter only in how long it takes.
"""

from __future__ import annotations

import atexit
import functools
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

import torch

__all__ = ["INDUCTOR", "python", "run_code"]

ROOT = Path(__file__).resolve().parents[1]
# What each program that compiles imports, for three CPU seconds more than torch alone.
INDUCTOR = ("torch", "torch._dynamo", "torch._inductor.compile_fx")


def run_code(code: str) -> CompletedProcess[str]:
    """Run `python -c code` in the root of the project, with torch imported and nothing else."""
    return subprocess.run([python("torch"), "-c", code], cwd=ROOT, capture_output=True, text=True)


@functools.cache
def python(*modules: str) -> str:
    """A command to use instead of `sys.executable`: the modules are imported already.

    It knows -c, -m, -u and files. Programs that ask for `sys.executable` get this command.
    """
    if torch.cuda.is_available() and modules != ("torch",):
        return sys.executable  # the server's imports may ask for GPUs; a fork loses them
    folder = Path(tempfile.mkdtemp(prefix="python-"))
    command, path = folder / "python", folder / "socket"
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "forked.py"), str(path), *modules],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(_end, server, folder)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    client = [sys.executable, "-IS", str(ROOT / "tests" / "asking.py"), str(path), str(command)]
    command.write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
    command.chmod(0o700)
    return str(command)


def _end(server: subprocess.Popen[str], folder: Path) -> None:
    server.communicate()
    shutil.rmtree(folder)
