"""A process that compiles one kernel: the program that isolated.py starts.

It reads a job from its input: Triton's text of a kernel, and what Triton's compiler was given. It
writes what each stage of the compiler made of it, or the error. It imports nothing of flexhop or
PyTorch, which takes seconds; Triton takes a tenth of one. Names are the same in Triton 3.6 to 3.9.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import signal
import sys
import tempfile
from typing import Any

# What a text of LLVM promises of an operation of vectors of integers: that no number overflows,
# loses bits, or is negative.
_PROMISES = re.compile(
    r"(= (?:add|sub|mul|shl|lshr|ashr|udiv|sdiv|or|trunc|zext|uitofp|icmp))"
    r"(?: (?:nuw|nsw|exact|disjoint|nneg|samesign))+(?= (?:[a-z]+ )?<\d)"
)


def mend(stages: dict[str, Any]) -> None:
    """Let LLVM write PTX without promises about vectors.

    Its vectoriser makes a vector of two numbers of which only one is ever used, and a promise that
    holds for that one. In Triton 3.6, LLVM then puts both into 64 bits and believes the promise
    of the other one, whose lost bits end in the one that is used. An operation without promises
    computes the same. `stages` are those of Triton's compiler, which this changes.
    """
    if write := stages.get("ptx"):  # "llir" is its input
        stages["ptx"] = lambda text, metadata: write(without_promises(text), metadata)


def without_promises(text: str) -> str:
    """A text of LLVM that says the same and promises nothing about vectors of integers."""
    return _PROMISES.sub(r"\1", text)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The stages' results by name, and what they wrote to the metadata."""
    # isolated.py imports this module on machines without Triton, too.
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    context, backend = ir.context(), make_backend(job["target"])
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, *job["arguments"])
    mend(stages)
    module, results = _parse(job["text"], context), {}
    for name in list(stages)[list(stages).index(job["first"]) :]:
        module = stages[name](module, job["metadata"])
        results[name] = module if isinstance(module, (str, bytes)) else str(module)
    return {"results": results, "metadata": job["metadata"]}


def _parse(text: str, context: Any) -> Any:
    from triton._C.libtriton import ir

    with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
        file.write(text)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    return module


def _answer(job: dict[str, Any]) -> bytes:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            answer = run(job)
    except Exception as error:  # whoever waits raises it
        answer = {"error": _portable(error)}
    return pickle.dumps({**answer, "printed": printed.getvalue()})


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same and can be read by another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # any: of a class whose arguments are not its message
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def main() -> None:
    """Do one job."""
    import triton.compiler.compiler  # noqa: F401 - it takes a while, and so does the job's text

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever waits ends this process
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what C++ prints is no answer
    try:
        job = pickle.load(sys.stdin.buffer)
    except EOFError:  # nobody waits any more
        return
    with answers:
        answers.write(_answer(job))
    os._exit(0)  # nothing here needs to be taken apart


if __name__ == "__main__":
    main()
