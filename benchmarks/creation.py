"""How long block masks take to make, and whether they are those of PyTorch.

    python -m benchmarks.creation 8192 131072 [--compare] [--compiled 'causal;documents']
    python -m benchmarks.creation 8192 --operators --device cpu --compare

`first` is the median of several calls, each of which is the first for its mask: nothing is
remembered of an equal one. `must` is its aim in milliseconds. `--operators` needs no GPU. It
counts the operators of a call that would launch kernels, for the first call and for later ones,
and takes the process time of both, with one thread. Without it, times are medians with lists
included, until the device has finished. Memory is the growth of its peak, of which `lists` is the
part that the mask keeps.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as intree

import flexhop
from flexhop import masks, mods
from flexhop.block_mask import remembered
from flexhop.compat.mods.stand_in import Watch

LARGEST_COMPARED = 1 << 14  # PyTorch holds the whole mask eagerly
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
Q_LISTS = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


# Milliseconds that an eager call may take, by length and name; "" is any other name.
MUST = {
    1 << 14: {"causal": 3, "window": 3, "documents": 3},
    1 << 17: {"causal": 5, "window": 5, "documents": 8, "documents, causal": 8, "": 40},
    1 << 20: {"causal": 500, "window": 500},
}


class Case(NamedTuple):
    """A mask_mod, and the batches and heads that it looks at."""

    mask_mod: Callable[..., Tensor]
    batch: int = 1
    heads: int = 1


def document_ids(length: int, mean: int, seed: int, device: torch.device) -> Tensor:
    """[length] int32: which document each token is of; lengths are exponentially distributed."""
    generator = torch.Generator().manual_seed(seed)
    gaps = torch.empty(4 * length // mean + 64).exponential_(1 / mean, generator=generator)
    ends = (gaps.ceil().long() + 1).cumsum(0)
    ids = torch.searchsorted(ends, torch.arange(length), right=True)
    return ids.to(torch.int32).to(device)


def make_cases(length: int, device: torch.device) -> dict[str, Case]:
    """Masks by name, for sequences of a length."""
    ids = document_ids(length, 1024, 1, device)
    by_batch = torch.stack([document_ids(length, 1500, n, device) for n in range(3)])
    generator = torch.Generator().manual_seed(2)
    flags = (torch.rand(length, generator=generator) > 0.999).to(device)
    windows = torch.tensor(
        [128, 1000, length // 16, length // 4], dtype=torch.int32, device=device
    )
    lengths = torch.tensor([length // 3, length, length // 2], device=device)
    side = math.isqrt(length)
    image = (torch.arange(length, device=device) // 700) % 3
    start = torch.arange(length, device=device) // 700
    half = length // 2
    blocks = length // 64

    def bigbird(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row, column = q // 64, k // 64
        return (column == 0) | ((row - column).abs() <= 1) | (column % 16 == 0)

    def hashed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row, column = q // 64, k // 64
        near = ((row - column).abs() <= 1) | (row == 0) | (column == 0)
        return near | ((row * 7919 + column * 104729) % blocks < 3)

    def diffusion(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        noisy = torch.where(k < half, q // 32 == k // 32, q // 32 > (k - half) // 32)
        clean = (k >= half) & ((q - half) // 32 >= (k - half) // 32)
        return torch.where(q < half, noisy, clean)

    return {
        "causal": Case(masks.causal),
        "window": Case(masks.sliding_window(1024)),
        "window, by not and or": Case(lambda b, h, q, k: ~((q < k) | (q - k > 1024))),
        "window by head": Case(lambda b, h, q, k: (q - k).abs() <= windows[h], 1, 4),
        "prefix": Case(masks.prefix_lm(length // 3)),
        "padding": Case(masks.padding(lengths), 3),
        "documents": Case(masks.document(ids)),
        "documents, causal": Case(masks.packed_causal(ids)),
        "documents by batch": Case(masks.packed_causal(by_batch), 3),
        "sinks and window": Case(
            mods.or_masks(masks.sliding_window(1024), lambda b, h, q, k: (k < 4) & (q >= k))
        ),
        "global tokens": Case(lambda b, h, q, k: ((q - k).abs() <= 64) | flags[q] | flags[k]),
        "images in text": Case(
            lambda b, h, q, k: (q >= k) | ((start[q] == start[k]) & (image[q] > 0))
        ),
        "block diffusion": Case(diffusion),
        "1-D neighbourhood": Case(
            lambda b, h, q, k: (
                (k - torch.clamp(q - 64, 0, length - 129)).clamp(0, 128)
                == k - torch.clamp(q - 64, 0, length - 129)
            )
        ),
        "2-D neighbourhood": Case(masks.natten_2d(side, length // side, 13, 13)),
        "dilated causal": Case(lambda b, h, q, k: (q >= k) & ((q - k) % 4 == 0)),
        "BigBird": Case(bigbird),
        "BigBird, hashed": Case(hashed),
        "float distances": Case(
            lambda b, h, q, k: (q - k) * 0.01 < (h + 1).float().sqrt() * 3.7, 1, 4
        ),
    }


def create(case: Case, length: int, device: torch.device, module: Any = flexhop) -> Any:
    """The block mask of a case."""
    sizes = (case.batch, case.heads, length, length)
    return module.create_block_mask(case.mask_mod, *sizes, device=str(device))


def must(name: str, length: int) -> str:
    """What a case may take, for a row."""
    known = MUST.get(length, {})
    limit = known.get(name, known.get(""))
    return f"  must {limit:3d} ms" if limit else " " * 13


def first_call(make: Callable[[], Any], device: torch.device, clock: Callable[[], float]) -> float:
    """Median milliseconds of a call for a mask that equals none before."""
    times: list[float] = []
    for _ in range(7):
        remembered.forget()
        wait(device)
        start = clock()
        make()
        wait(device)
        times.append(clock() - start)
    return statistics.median(times[2:]) * 1e3


def wait(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(make: Callable[[], Any], device: torch.device, calls: int) -> tuple[float, float, Any]:
    """Median seconds of a call, peak memory of one in MiB, and what it gives."""
    result = make()
    wait(device)
    times: list[float] = []
    before, peak = 0, 0.0
    for _ in range(calls):
        result = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        start = time.perf_counter()
        result = make()
        wait(device)
        times.append(time.perf_counter() - start)
        if device.type == "cuda":
            peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    return statistics.median(times), peak, result


def is_equal(mask: Any, other: Any, names: tuple[str, ...] = LISTS) -> bool:
    """Whether two masks have the same lists, live entries and dead ones."""
    pairs = [(getattr(mask, name), getattr(other, name)) for name in names]
    return all(a is None and b is None if a is None else torch.equal(a, b) for a, b in pairs)


def waits(case: Case, length: int, device: torch.device) -> bool:
    """Whether the host waits for the device."""
    if device.type != "cuda":
        return False
    torch.cuda.synchronize(device)
    mode = torch.cuda.get_sync_debug_mode()
    from flexhop.block_mask import coverage

    asked = coverage.may_wait  # pyright: ignore[reportPrivateUsage]
    coverage.may_wait = lambda _: True  # pyright: ignore[reportPrivateUsage]
    torch.cuda.set_sync_debug_mode("error")
    try:
        create(case, length, device)
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        coverage.may_wait = asked  # pyright: ignore[reportPrivateUsage]
    return False


def report(name: str, case: Case, length: int, options: Any) -> None:
    """Print one row."""
    device = torch.device(options.device)
    calls = 5 if length <= 1 << 17 else 2
    make = functools.partial(create, case, length, device)
    first = first_call(make, device, time.perf_counter)
    seconds, peak, mask = timed(make, device, calls)
    kept = sum(getattr(mask, n).nbytes for n in (*LISTS, *Q_LISTS) if getattr(mask, n) is not None)
    row = f"{name:22s}{length:9d}{first:10.2f} ms{must(name, length)}{seconds * 1e3:10.2f} ms"
    row += f"{peak:9.0f} MiB{kept / 2**20:9.0f} MiB"
    if length <= 1 << 17:
        row += "  waits" if waits(case, length, device) else "       "
    if options.compare and length <= LARGEST_COMPARED:
        theirs, memory, other = timed(lambda: create(case, length, device, intree), device, 1)
        same = is_equal(mask, other, (*LISTS, *Q_LISTS))
        row += f"  PyTorch {theirs * 1e3:8.1f} ms {memory:7.0f} MiB  equal {same}"
    print(row, flush=True)


def operators(make: Callable[[], Any]) -> int:
    """How many operators a call runs, without views and allocations."""
    names: list[str] = []

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        aliases = [r.alias_info for r in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view and "empty" not in str(func):
            names.append(str(func))
        return func(*args, **kwargs)

    with Watch(run).watching():
        make()
    return len(names)


def report_operators(name: str, case: Case, length: int, options: Any) -> None:
    """Print how many operators a mask takes, and the process times of a first and a later call."""
    device = torch.device(options.device)
    row = f"{name:22s}{length:9d}"
    is_compared = options.compare and length <= LARGEST_COMPARED
    for module in (flexhop, intree) if is_compared else (flexhop,):
        make = functools.partial(create, case, length, device, module)
        remembered.forget()
        first, again = operators(make), operators(make)
        times: list[float] = []
        for _ in range(5 if module is flexhop else 2):
            start = time.process_time()
            make()
            times.append(time.process_time() - start)
        later = statistics.median(times) * 1e3
        row += f"  {module.__name__.split('.')[0]}: {first:4d} {again:4d}"
        if module is flexhop:
            new = first_call(make, device, time.process_time)
            row += f"  first {new:8.2f} ms{must(name, length)}  later"
        row += f" {later:8.2f} ms"
    print(row, flush=True)


def report_compiled(name: str, case: Case, length: int, device: torch.device) -> None:
    """Print how long the compiled function takes, first and then."""
    torch.compiler.reset()
    make = torch.compile(flexhop.create_block_mask)
    start = time.perf_counter()
    sizes = (case.batch, case.heads, length, length)
    first = make(case.mask_mod, *sizes, device=str(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    first_time = time.perf_counter() - start
    seconds, peak, _ = timed(lambda: make(case.mask_mod, *sizes, device=str(device)), device, 5)
    same = is_equal(first, create(case, length, device), (*LISTS, *Q_LISTS))
    text = f"compiled: first {first_time:6.2f} s, then {seconds * 1e3:8.3f} ms, {peak:6.0f} MiB"
    print(f"{name:22s}{length:9d}  {text}  equal to eager {same}", flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lengths", type=int, nargs="+")
    parser.add_argument("--only", default="", help="names, separated by semicolons")
    parser.add_argument("--compare", action="store_true", help="with PyTorch, up to 16,384")
    parser.add_argument("--operators", action="store_true", help="count them; needs no GPU")
    parser.add_argument("--compiled", default="", help="names, separated by semicolons")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.operators:
        torch.set_num_threads(1)  # waiting threads would count
    else:
        head = f"{'mask':22s}{'length':>9s}{'first':>13s}{'':13s}{'later':>13s}"
        print(f"{head}{'peak':>13s}{'lists':>13s}")
    for length in options.lengths:
        cases = make_cases(length, torch.device(options.device))
        for name, case in cases.items():
            if not options.only or name in options.only.split(";"):
                (report_operators if options.operators else report)(name, case, length, options)
        for name in filter(None, options.compiled.split(";")):
            report_compiled(name, cases[name], length, torch.device(options.device))


if __name__ == "__main__":
    with torch.no_grad():
        main()
