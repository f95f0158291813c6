"""Start one worker per case, let them compile in parallel, then time them one at a time."""

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.worker import ANSWER


@dataclass(frozen=True)
class Settings:
    """What every worker is told."""

    device: str
    directions: tuple[str, ...]
    names: tuple[str, ...]
    rounds: int
    compile_timeout: float
    time_timeout: float


class WorkerFailed(RuntimeError):
    """A worker died or did not answer in time; the message says which and why."""


class CaseProcess:
    """The parent's handle on the worker of one case."""

    def __init__(self, case: str, settings: Settings, folder: Path) -> None:
        """Start the process with Inductor's and Triton's caches in a fresh folder of its own."""
        self.case = case
        self.log = folder / f"{case}.log"
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": str(folder / case),
            "TRITON_CACHE_DIR": str(folder / case / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": "4",  # of the kernels of one case
        }
        request = json.dumps(asdict(settings) | {"case": case})
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker", request],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | caches,
            )
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                self.lines.put(line[len(ANSWER) :])
        self.lines.put(None)

    def receive(self, timeout: float) -> dict[str, Any]:
        """The next reply."""
        try:
            line = self.lines.get(timeout=timeout)
        except queue.Empty:
            self.stop()
            raise WorkerFailed(f"no answer within {timeout:.0f} s") from None
        if line is None:
            raise WorkerFailed(f"process ended: {self.last_words()}")
        return json.loads(line)

    def ask(self, request: str, timeout: float) -> dict[str, Any]:
        """Send a request and wait for its reply."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(f"process ended: {self.last_words()}") from None
        return self.receive(timeout)

    def last_words(self) -> str:
        """The last line that the process wrote to standard error."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "without a word"

    def stop(self) -> None:
        """End this worker."""
        self.process.kill()
        self.process.wait()


def compile_case(worker: CaseProcess, settings: Settings) -> dict[str, Any]:
    """Wait for the worker's imports, then have it make its first calls."""
    try:
        worker.receive(settings.compile_timeout)
        return worker.ask("compile", settings.compile_timeout)
    except WorkerFailed as failure:
        return {"error": f"compile: {failure}"}


def time_case(worker: CaseProcess, compiled: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Have a compiled worker check and time, and end it."""
    result = {"case": worker.case} | compiled
    if "error" not in compiled:
        try:
            result |= worker.ask("time", settings.time_timeout)
        except WorkerFailed as failure:
            result["error"] = f"timing: {failure}"
    worker.stop()
    return result


def run(cases: list[str], settings: Settings, workers: int) -> list[dict[str, Any]]:
    """Results of all cases, in order. At most ``workers`` of them compile at the same time."""
    folder = Path(tempfile.mkdtemp(prefix="flexhop-benchmarks-"))
    started: list[CaseProcess] = []

    def start_and_compile(case: str) -> tuple[CaseProcess, dict[str, Any]]:
        worker = CaseProcess(case, settings, folder)
        started.append(worker)
        return worker, compile_case(worker, settings)

    try:
        with ThreadPoolExecutor(workers) as pool:
            compiled = list(pool.map(start_and_compile, cases))
        return [report_progress(time_case(w, c, settings)) for w, c in compiled]
    finally:
        for worker in started:
            worker.stop()
        shutil.rmtree(folder, ignore_errors=True)


def report_progress(result: dict[str, Any]) -> dict[str, Any]:
    """Say on standard error how a case went, and pass its result on."""
    failed = {"case": result["error"]} if "error" in result else result.get("failed", {})
    words = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
    print(f"{result['case']}: {words or 'ok'}", file=sys.stderr, flush=True)
    return result
