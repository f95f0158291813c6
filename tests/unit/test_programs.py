"""The server of tests/programs.py forks what a new interpreter would be."""

import os

import pytest

from tests.programs import run_code


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit(3)", 3), ("sys.exit('why')", 1), ("1 / 0", 1), ("os.abort()", -6)],
)
def test_how_a_program_ends(end, status):
    code = (
        f"import atexit, os, sys; print('out', flush=True); atexit.register(print, 'last')\n{end}"
    )
    found = run_code(code)
    assert found.returncode == status
    assert found.stdout.split() == (["out"] if status == -6 else ["out", "last"])
    assert ("ZeroDivisionError" in found.stderr) == (end == "1 / 0")


def test_what_a_program_starts_with(monkeypatch):
    """Nothing of the tests or of earlier programs, and the environment of now."""
    monkeypatch.setenv("FLEXHOP_STRICT", "of now")
    run_code("import sys; sys.modules['earlier'] = sys; import sympy")
    code = """
import os, sys
print(os.environ["FLEXHOP_STRICT"], sys.argv, __name__, os.getcwd(), os.listdir("/proc/self/task"))
print([m for m in ("torch", "flexhop", "sympy", "earlier", "pytest", "tests") if m in sys.modules])
"""
    first, second = run_code(code).stdout.splitlines()
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    assert first.startswith(f"of now ['-c'] __main__ {root} ['") and first.count("'") == 4
    assert second == "['torch']"
