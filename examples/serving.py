"""Serve a small Llama-shaped model: a contiguous KV cache, and a paged one in changing batches.

    python examples/serving.py            # eager on a CPU, compiled kernels on a GPU

Weights are random, so the text means nothing; what counts is that four ways of generating it
give the same tokens: without a cache (the whole sequence again at every step), with one cache
tensor per sequence, and with pages that requests of different lengths share while they come and
go, which kernels find by a page table or by a converted block mask, as with PyTorch's interface.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import flexhop
from flexhop.errors import EagerWarning
from flexhop.masks import causal

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 211, 128, 2, 6, 2, 32
PAGE = 16
LONGEST = 128

# Keys and values of some positions in, output of attention out: (layer, query, key, value).
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """One transformer layer with grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.project = nn.Linear(WIDTH, rows, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))

    def forward(self, hidden: Tensor, position: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """hidden: [B, S, WIDTH]; position: [B, S], where each token stands in its sequence."""
        heads = self.project(self.norms[0](hidden)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        query, key, value = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        mixed = attend(rotate(query, position), rotate(key, position), value)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(-2))
        return hidden + self.down(nn.functional.silu(self.up(self.norms[1](hidden))))


class Model(nn.Module):
    """Tokens to the most likely next token of each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """[B, S] tokens at [B, S] positions: [B, S] next tokens."""
        hidden = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, position, lambda *qkv, n=number: attend(n, *qkv))
        return self.head(self.norm(hidden)).argmax(-1)


def rotate(heads: Tensor, position: Tensor) -> Tensor:
    """Rotary embedding of [B, H, S, D] (Su et al. 2021, arXiv 2104.09864)."""
    frequency = 10000.0 ** -torch.linspace(0, 1, HEAD_DIM // 2, device=heads.device)
    angle = position[:, None, :, None] * frequency
    first, second = heads.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Request(NamedTuple):
    """A prompt, and how many tokens to add to it."""

    prompt: list[int]
    answer: int


class Server:
    """What the ways of generating share: the model, and flex_attention, compiled or not."""

    def __init__(self, model: Model, device: str) -> None:
        self.model, self.device = model, device
        compiled: Any = torch.compile(flexhop.flex_attention, dynamic=True)
        self.flex: Callable[..., Tensor] = compiled if device == "cuda" else flexhop.flex_attention

    def tensor(self, values: list[list[int]]) -> Tensor:
        """Integers on the device."""
        return torch.tensor(values, device=self.device)

    def mask(self, mask_mod: Callable[..., Tensor], queries: int, batch: int = 1):
        """A block mask over a whole cache, with pages as blocks of keys."""
        return flexhop.create_block_mask(
            mask_mod, batch, None, queries, LONGEST, self.device, BLOCK_SIZE=(128, PAGE)
        )


def without_cache(server: Server, request: Request) -> list[int]:
    """All positions again at every step."""
    tokens = list(request.prompt)
    for _ in range(request.answer):
        length = len(tokens)
        mask = flexhop.create_block_mask(causal, None, None, length, length, server.device)

        def attend(_: int, query: Tensor, key: Tensor, value: Tensor, mask: Any = mask) -> Tensor:
            return server.flex(query, key, value, block_mask=mask, enable_gqa=True)

        position = torch.arange(length, device=server.device)[None]
        tokens.append(int(server.model(server.tensor([tokens]), position, attend)[0, -1]))
    return tokens[len(request.prompt) :]


def contiguous(server: Server, request: Request) -> list[int]:
    """One cache of LONGEST positions: the prompt at once, then one token at a time."""
    caches = [
        torch.zeros(2, 1, KV_HEADS, LONGEST, HEAD_DIM, device=server.device) for _ in range(LAYERS)
    ]

    def run(tokens: list[int], start: int) -> int:
        position = start + torch.arange(len(tokens), device=server.device)[None]
        offset = torch.tensor(start, device=server.device)  # a tensor: no step compiles anew
        mask = server.mask(lambda b, h, q, kv: q + offset >= kv, len(tokens))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            caches[layer][:, :, :, position[0]] = torch.stack([key, value])
            return server.flex(query, *caches[layer], block_mask=mask, enable_gqa=True)

        return int(server.model(server.tensor([tokens]), position, attend)[0, -1])

    found = [run(request.prompt, 0)]
    while len(found) < request.answer:
        found.append(run(found[-1:], len(request.prompt) + len(found) - 1))
    return found


class PagedServer:
    """Requests of different lengths share pages; one is admitted as soon as another leaves."""

    def __init__(self, server: Server, pages: int, slots: int, *, converts: bool = False) -> None:
        self.server, self.converts = server, converts
        self.paged = flexhop.PagedAttention(pages, PAGE, slots, server.device)
        size = (1, KV_HEADS, pages * PAGE, HEAD_DIM)
        self.caches = [
            [torch.zeros(size, device=server.device) for _ in range(2)] for _ in range(LAYERS)
        ]
        self.active: dict[int, tuple[int, Request, list[int]]] = {}  # by slot
        self.most = 0  # requests at once, for the report

    def serve(self, requests: list[Request]) -> list[list[int]]:
        """The tokens of every request."""
        waiting = list(enumerate(requests))
        results: dict[int, list[int]] = {}
        while waiting or self.active:
            while waiting and (slot := self._admit(waiting[0][1])) is not None:
                number, request = waiting.pop(0)
                first = self._run([slot], [request.prompt], [0])
                self.active[slot] = (number, request, first)
            self.most = max(self.most, len(self.active))
            self._leave(results)
            self._step()
        return [results[number] for number in range(len(requests))]

    def _admit(self, request: Request) -> int | None:
        """A slot with pages for the whole request, or None if it has to wait."""
        slots = range(len(self.paged.capacity))
        slot = next((s for s in slots if s not in self.active), None)
        if slot is None:
            return None
        try:
            self.paged.reserve(slot, len(request.prompt) + request.answer)
        except flexhop.errors.PagesExhaustedError:
            return None
        return slot

    def _leave(self, results: dict[int, list[int]]) -> None:
        for slot, (number, request, found) in list(self.active.items()):
            if len(found) == request.answer:
                results[number] = found
                del self.active[slot]
                self.paged.erase(slot)

    def _step(self) -> None:
        """One token for every active request."""
        slots = list(self.active)
        if not slots:
            return
        starts = [len(self.active[s][1].prompt) + len(self.active[s][2]) - 1 for s in slots]
        last = [self.active[s][2][-1:] for s in slots]
        for slot, token in zip(slots, self._run(slots, last, starts), strict=True):
            self.active[slot][2].append(token)

    def _run(self, slots: list[int], tokens: list[list[int]], starts: list[int]) -> list[int]:
        """Equally many tokens of some sequences, behind `starts` earlier ones: the next tokens."""
        device, queries = self.server.device, len(tokens[0])
        sequence = torch.tensor(slots, device=device)
        start = torch.tensor(starts, device=device)
        position = start[:, None] + torch.arange(queries, device=device)
        mask = self.server.mask(lambda b, h, q, kv: q + start[b] >= kv, queries, len(slots))
        keywords: dict[str, Any] = {"block_mask": mask, "enable_gqa": True}
        if self.converts:
            keywords["block_mask"] = self.paged.convert_logical_block_mask(
                mask, sequence, start + queries
            )
        else:
            table = self.paged.table(start + queries, sequence)
            # As wide as the mask; no sequence is longer.
            keywords["page_table"] = table._replace(pages=table.pages[:, : LONGEST // PAGE])

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.paged.assign(sequence, position, key, value, *self.caches[layer])
            return self.server.flex(query, *self.caches[layer], **keywords)

        return self.server.model(self.server.tensor(tokens), position, attend)[:, -1].tolist()


def make_requests(count: int) -> list[Request]:
    """Prompts of 3 to 40 tokens, answers of 5 to 14."""
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int, size: int = 1) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    return [Request(draw(0, VOCABULARY, draw(3, 41)[0]), draw(5, 15)[0]) for _ in range(count)]


@torch.no_grad()
def main() -> None:
    """Generate in all four ways and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=6)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", EagerWarning)  # this is a debugging run where there is no GPU
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    server = Server(Model().to(device), device)
    requests = make_requests(arguments.requests)
    pool = PagedServer(server, pages=12, slots=4)
    converting = PagedServer(server, pages=12, slots=4, converts=True)
    ways = {
        "without a cache": [without_cache(server, request) for request in requests],
        "contiguous cache": [contiguous(server, request) for request in requests],
        "paged, in batches": pool.serve(requests),
        "with converted masks": converting.serve(requests),
    }
    for name, tokens in ways.items():
        print(f"{name:20} {sum(map(len, tokens))} tokens, first answer {tokens[0]}")
    print(f"up to {pool.most} requests shared {pool.paged.n_pages} pages of {PAGE} tokens")
    first, *others = ways.values()
    if any(other != first for other in others):
        raise SystemExit("the ways of generating disagree")
    print("all tokens are the same")


if __name__ == "__main__":
    main()
