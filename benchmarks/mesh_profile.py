"""Times of a row of calls on one rank, and where they go."""

import collections
import itertools
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

Spans = list[tuple[float, float]]
PROFILED = 3  # rows; the first starts with an idle GPU and is not counted
LONGEST = 6  # kernels that are named


def steady(
    row: Callable[[], None],
    rounds: int,
    seconds: float,
    device: torch.device,
    agreed: Callable[[Any], Any],
) -> dict[str, Any]:
    """Milliseconds of a row when others run before it: of the device, and of the host alone.

    Rows follow each other without waiting. The first one, which starts with an idle device, is
    not counted.

    Args:
        row: one row of calls.
        rounds: most rows that are counted; at least two are.
        seconds: about how long this may take.
        device: where rows run.
        agreed: makes a number the same on all ranks that run rows together.
    """
    start = time.perf_counter()
    row()
    synchronize(device)
    took = time.perf_counter() - start
    rounds = agreed(max(2, min(rounds, int(seconds / took))))
    clock = _Clock(device)
    host: list[float] = []
    for _ in range(rounds + 1):
        clock.mark()
        before = time.perf_counter()
        row()
        host.append(1e3 * (time.perf_counter() - before))
    clock.mark()
    state = gpu_state(device)  # while the rows run
    times = clock.between()[1:]
    middle = statistics.median(times)
    return {"row": middle, "host": statistics.median(host[1:]), "rows": times, "state": state}


def gpu_state(device: torch.device) -> str:
    """The GPU's clock, power and temperature at this moment: GPUs of one host differ."""
    if device.type != "cuda":
        return ""
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
    command = ["nvidia-smi", "-i", name, query, "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip()


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Clock:
    """Events on a GPU, the wall clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Note the time at which the device comes here."""
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def between(self) -> list[float]:
        """Milliseconds between the marks."""
        synchronize(self.device)
        pairs = itertools.pairwise(self.marks)
        if self.device.type != "cuda":
            return [1e3 * (after - before) for before, after in pairs]
        return [before.elapsed_time(after) for before, after in pairs]


def profiled(row: Callable[[], None], layers: int, trace: Path | None) -> dict[str, Any]:
    """Milliseconds per layer that the GPU computes, communicates and idles.

    "hidden" is communication while a kernel computes.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            row()
        torch.cuda.synchronize()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(trace))
    events = [
        event for event in found.events() or ()
        if event.device_type == DeviceType.CUDA and not event.name.startswith("nccl:")
    ]  # fmt: skip
    events.sort(key=lambda event: event.time_range.start)
    counted = events[len(events) // PROFILED :]  # rows have equally many
    scale = 1e-3 / ((PROFILED - 1) * layers)
    kernels: collections.Counter[str] = collections.Counter()
    for event in counted:
        kernels[event.name[:60]] += event.time_range.elapsed_us()
    return summary([(e.name, e.time_range.start, e.time_range.end) for e in counted], scale) | {
        "kernels": {name: scale * us for name, us in kernels.most_common(LONGEST)}
    }


def summary(kernels: list[tuple[str, float, float]], scale: float) -> dict[str, float]:
    """Where the time between the first kernel's start and the last one's end goes.

    Args:
        kernels: name, start and end of each.
        scale: what a unit of time counts.
    """
    moving = [(start, end) for name, start, end in kernels if "nccl" in name.lower()]
    computing = [(start, end) for name, start, end in kernels if "nccl" not in name.lower()]
    every = moving + computing
    whole = max(end for _, end in every) - min(start for start, _ in every)
    busy, alone, sent = covered(every), covered(computing), covered(moving)
    return {
        "span": scale * whole, "computing": scale * alone, "moving": scale * sent,
        "hidden": scale * (alone + sent - busy), "idle": scale * (whole - busy),
    }  # fmt: skip


def covered(spans: Spans) -> float:
    """Length of the union of some spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
