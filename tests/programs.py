"""Programs in processes of their own that need not import PyTorch: a server did, and forks.

The server is a new interpreter that has imported torch, as `import flexhop` does first, and done
nothing else. What it forks differs from a new interpreter only in how long it takes.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

__all__ = ["run_code"]

ROOT = Path(__file__).resolve().parents[1]


def run_code(code: str) -> CompletedProcess[str]:
    """Run `python -c code` in the root of the project."""
    return _server().run(code)


class _Server:
    def __init__(self) -> None:
        code = "import sys, torch; exec(sys.stdin.readline()); serve(sys.stdin)"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        atexit.register(self._end)
        self._tell(f"exec(open({str(ROOT / 'tests' / 'forked.py')!r}).read())")

    def _end(self) -> None:
        self._process.communicate()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def run(self, code: str) -> CompletedProcess[str]:
        """As `subprocess.run` does it."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = (str(Path(folder) / name) for name in ("out", "err"))
            self._tell(json.dumps([code, dict(os.environ), out, err]))
            assert self._process.stdout is not None
            answer = self._process.stdout.readline()
            assert answer, "the server ended"
            return CompletedProcess(
                ["-c", code], int(answer), Path(out).read_text(), Path(err).read_text()
            )


@functools.cache
def _server() -> _Server:
    """It ends with this process, which holds the other end of its input."""
    return _Server()
