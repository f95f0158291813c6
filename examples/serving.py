"""Serve a small model: continuous batching over a KV cache in pages, in CUDA graphs on a GPU.

    python examples/serving.py           # eager on a CPU, compiled kernels and graphs on a GPU
    python examples/serving.py --fp8     # keys and values stored as float8_e4m3fn

Requests arrive while others run. A prompt is read in chunks, one chunk between two steps of all
requests that generate. Layers take turns: one sees the last WINDOW tokens, the next sees all.
Weights are random, so the text means nothing; what counts is that every way of generating gives
the same tokens, and how fast: without a cache, one request after the other with a dense cache,
pages that flexhop's kernels find by a page table, and PyTorch's paged attention.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from serving_caches import (
    LONGEST,
    PAGE,
    VOCABULARY,
    Cache,
    InTreePages,
    Model,
    Pages,
    Request,
    Settings,
    dense,
    without_cache,
)

from flexhop.errors import EagerWarning

CHUNK = 32  # tokens of a prompt that are read between two steps


@dataclass
class Running:
    """A request in a slot: how much of its prompt is read, and what was generated."""

    number: int
    request: Request
    read: int = 0
    found: list[int] = field(default_factory=list[int])


class Engine:
    """Continuous batching: every step admits, reads one chunk of a prompt, and decodes."""

    def __init__(self, settings: Settings, cache: Cache, slots: int) -> None:
        self.model, self.device, self.cache, self.slots = (
            settings.model,
            settings.device,
            cache,
            slots,
        )
        self.running: dict[int, Running] = {}
        self.most = self.chunks = 0  # for the report
        # What a captured step reads; a slot that nobody uses is the sequence behind the last.
        self.tokens, self.position, self.sequence = (
            torch.zeros(slots, dtype=torch.int64, device=self.device) for _ in range(3)
        )
        self.next = torch.zeros_like(self.tokens)
        self.graph: Any = None

    def serve(self, requests: list[Request]) -> list[list[int]]:
        """The tokens of every request."""
        waiting = deque(sorted(enumerate(requests), key=lambda pair: pair[1].arrives))
        results: dict[int, list[int]] = {}
        step = 0
        while waiting or self.running:
            while waiting and waiting[0][1].arrives <= step and self._admit(*waiting[0]):
                waiting.popleft()
            self.most = max(self.most, len(self.running))
            self._read_a_chunk()
            self._decode()
            for slot, running in list(self.running.items()):
                if len(running.found) >= running.request.answer:
                    results[running.number] = running.found
                    del self.running[slot]
                    self.cache.release(slot)
            step += 1
        return [results[number] for number in range(len(requests))]

    def _admit(self, number: int, request: Request) -> bool:
        slot = next((slot for slot in range(self.slots) if slot not in self.running), None)
        if slot is None or not self.cache.admit(slot, len(request.prompt) + request.answer):
            return False
        self.running[slot] = Running(number, request)
        return True

    def _read_a_chunk(self) -> None:
        """Some tokens of the prompt that waits longest; the last chunk says the first token."""
        reading = [pair for pair in self.running.items() if not pair[1].found]
        if not reading:
            return
        slot, running = reading[0]
        tokens = running.request.prompt[running.read : running.read + CHUNK]
        position = running.read + torch.arange(len(tokens), device=self.device)[None]
        sequence = torch.tensor([slot], device=self.device)
        given = torch.tensor([tokens], device=self.device)
        found = self.model(given, position, self.cache.reading(sequence, position))
        self.chunks += 1
        running.read += len(tokens)
        if running.read == len(running.request.prompt):
            running.found.append(int(found[0, -1]))

    def _decode(self) -> None:
        """One token for every request that generates, in one batch of all slots."""
        live = {
            slot: running
            for slot, running in self.running.items()
            if 0 < len(running.found) < running.request.answer
        }
        if not live:
            return
        rows = [live.get(slot) for slot in range(self.slots)]
        state = [
            (slot, row.read + len(row.found) - 1, row.found[-1]) if row else (self.slots, 0, 0)
            for slot, row in enumerate(rows)
        ]
        for buffer, values in zip(
            (self.sequence, self.position, self.tokens), zip(*state, strict=True), strict=True
        ):
            buffer.copy_(torch.tensor(values))
        self._run_step()
        for slot, token in enumerate(self.next.tolist()):
            if slot in live:
                live[slot].found.append(token)

    def _step(self) -> None:
        position = self.position[:, None]
        attend = self.cache.reading(self.sequence, position)
        self.next.copy_(self.model(self.tokens[:, None], position, attend)[:, -1])

    def _run_step(self) -> None:
        """A step, from its CUDA graph if the cache allows one; its first runs compile kernels."""
        if not self.cache.in_graphs:
            return self._step()
        if self.graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._step()  # writes the same tokens to the same places
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()
        return self.graph.replay()


def make_requests(count: int) -> list[Request]:
    """Prompts of 3 to 90 tokens, answers of 5 to 19; one comes every other step."""
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int, size: int = 1) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    return [
        Request(draw(0, VOCABULARY, draw(3, 91)[0]), draw(5, 20)[0], 2 * number)
        for number in range(count)
    ]


@torch.no_grad()
def main() -> None:
    """Generate in all ways, compare the tokens, and say how fast."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--slots", type=int, default=4, help="requests that run at once")
    parser.add_argument("--pages", type=int, default=16, help=f"of {PAGE} tokens")
    parser.add_argument("--fp8", action="store_true", help="a cache of float8_e4m3fn")
    arguments = parser.parse_args()
    if arguments.pages * PAGE < LONGEST:
        parser.error(f"--pages must be at least {LONGEST // PAGE}, for the longest sequence")
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # A debugging run if there is no GPU. On one, attention that is not compiled is a mistake.
    warnings.simplefilter("ignore" if device == "cpu" else "error", EagerWarning)
    torch.manual_seed(0)
    dtype = torch.float8_e4m3fn if arguments.fp8 else torch.float32
    settings = Settings(Model().to(device), device, dtype, device == "cuda")
    requests = make_requests(arguments.requests)
    room = arguments.pages, arguments.slots
    engines = [
        Engine(settings, kind(settings, *room), arguments.slots) for kind in (Pages, InTreePages)
    ]
    ways: dict[str, Callable[[], list[list[int]]]] = {
        "no cache": lambda: [without_cache(settings, request) for request in requests],
        "dense cache, one by one": lambda: [dense(settings, request) for request in requests],
        "flexhop, pages": lambda: engines[0].serve(requests),
        "PyTorch's PagedAttention": lambda: engines[1].serve(requests),
    }
    expected = report(ways, settings)
    engine = engines[0]
    print(f"up to {engine.most} requests shared {arguments.pages} pages of {PAGE} tokens")
    print(f"{engine.chunks} chunks of prompts, {sum(map(len, expected))} tokens, all the same")


def report(ways: dict[str, Callable[[], list[list[int]]]], settings: Settings) -> list[list[int]]:
    """Run every way, print its tokens per second, and return the tokens of the first."""
    name = torch.cuda.get_device_name() if settings.device == "cuda" else "CPU, not compiled"
    print(f"torch {torch.__version__}, {name}, cache {settings.dtype}")
    expected: list[list[int]] = []
    for way, generate in ways.items():
        if settings.is_compiled:
            generate()  # compiles
        start = time.perf_counter()
        tokens = generate()  # its last token waits for the device
        seconds = time.perf_counter() - start
        expected = expected or tokens
        print(f"{way:26} {sum(map(len, tokens)) / seconds:10.1f} tokens/s")
        if tokens != expected:
            raise SystemExit(f"{way}: other tokens than without a cache")
    return expected


if __name__ == "__main__":
    main()
