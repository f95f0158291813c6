"""The server of tests/programs.py forks what a new interpreter would be."""

import os
import subprocess
import time

import pytest

from tests.programs import python, run_code


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


def test_programs_of_programs_are_forked_too():
    """And get the pipes that are passed to them."""
    inner = "import os, sys; print('torch' in sys.modules); os.write(int(sys.argv[1]), b'told')"
    code = f"""
import os, subprocess, sys
read, write = os.pipe()
command = [sys.executable, "-u", "-c", {inner!r}, str(write)]
print(subprocess.run(command, pass_fds=[write], capture_output=True).stdout, os.read(read, 9))
"""
    found = run_code(code)
    assert found.stdout.strip() == r"b'True\n' b'told'", found.stderr


def test_modules_and_files(tmp_path):
    (tmp_path / "other.py").write_text("NUMBER = 7")
    (tmp_path / "main.py").write_text("import sys, other; print(sys.argv[1:], other.NUMBER)")
    for arguments, folder in ((["main.py", "a"], tmp_path), (["-m", "main", "a"], tmp_path)):
        found = subprocess.run([python("torch"), *arguments], cwd=folder, capture_output=True)
        assert found.stdout == b"['a'] 7\n", found.stderr


def test_a_program_ends_with_who_asked_for_it():
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    command = [python("torch"), "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        program = int(asking.stdout.readline())
        assert program != asking.pid
        asking.kill()
        assert asking.stdout.read() == ""  # at once: nothing holds the pipe any more
    with pytest.raises(ProcessLookupError):
        for _ in range(500):
            os.kill(program, 0)
            time.sleep(0.01)
