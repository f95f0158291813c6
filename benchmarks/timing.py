"""Device time of forward and backward calls, in interleaved rounds."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

FLUSH_BYTES = 512 << 20  # ten times an H200's L2
# Zeroing also hides the launch of what follows: six times take 0.7 ms of an H200, and a backward
# pass up to 0.55 ms of its host.
ZEROINGS = 6
ROUND_SECONDS = 0.06
MAX_CALLS = 30
MIN_CALLS = 4

Step = Callable[[], None]


class Stopwatch:
    """Times calls on one device: CUDA events on a GPU, the wall clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        """Allocate the buffer that is zeroed between calls to empty the cache."""
        self.on_gpu = device.type == "cuda"
        size = FLUSH_BYTES if self.on_gpu else 0
        self.flush = torch.empty(size, dtype=torch.uint8, device=device)

    def round(self, prepare: Step, measured: Step, calls: int) -> float:
        """Median milliseconds of ``measured`` over some calls; ``prepare`` is not counted."""
        return (
            self._gpu(prepare, measured, calls) if self.on_gpu else _wall(prepare, measured, calls)
        )

    def _gpu(self, prepare: Step, measured: Step, calls: int) -> float:
        pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for _ in range(calls):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            prepare()
            for _ in range(ZEROINGS):
                self.flush.zero_()
            before.record()
            measured()
            after.record()
            pairs.append((before, after))
        torch.cuda.synchronize()
        return statistics.median(before.elapsed_time(after) for before, after in pairs)


def _wall(prepare: Step, measured: Step, calls: int) -> float:
    times: list[float] = []
    for _ in range(calls):
        prepare()
        start = time.perf_counter()
        measured()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def calls_per_round(milliseconds: float) -> int:
    """How many calls fill one round, within limits."""
    wanted = int(1e3 * ROUND_SECONDS / max(milliseconds, 1e-3))
    return min(MAX_CALLS, max(MIN_CALLS, wanted))


def interleaved(
    stopwatch: Stopwatch, steps: dict[str, tuple[Step, Step]], rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each implementation by round: A B C, A B C, ... after a short warm-up."""
    calls = {
        name: calls_per_round(stopwatch.round(prepare, measured, 2))
        for name, (prepare, measured) in steps.items()
    }
    measures = {
        name: functools.partial(stopwatch.round, prepare, measured, calls[name])
        for name, (prepare, measured) in steps.items()
    }
    return in_rounds(measures, rounds)


def in_rounds(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each measures in every round: A B C, A B C, ..."""
    times: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            times[name].append(measure())
    return times


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median over the rounds of each."""
    return {name: statistics.median(values) for name, values in times.items()}


def fastest(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The shortest round of each: if other processes use the device, now and then, meanwhile."""
    return {name: min(values) for name, values in times.items()}
