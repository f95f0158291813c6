"""The model, the caches and the plain ways of generating of examples/serving.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as in_tree

import flexhop

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 211, 128, 2, 6, 2, 32
PAGE, BLOCK, LONGEST, WINDOW = 16, 64, 256, 40

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


def has_window(layer: int) -> bool:
    """Whether a layer sees the last WINDOW tokens only."""
    return layer % 2 == 0


def visible(start: Tensor, is_window: bool) -> Callable[..., Tensor]:
    """A mask_mod: query q of batch b is token start[b] + q of its sequence."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        position = start[b] + q_idx
        keep = kv_idx <= position
        return keep & (kv_idx > position - WINDOW) if is_window else keep

    return mask_mod


# PyTorch counts recompilations by function, up to eight. Each way of generating compiles up to six
# times (two kinds of masks, one query or several), so each has its own function.
def attend_without_cache(*operands: Any, **choices: Any) -> Any:
    """flexhop.flex_attention."""
    return flexhop.flex_attention(*operands, **choices)


def attend_dense(*operands: Any, **choices: Any) -> Any:
    """flexhop.flex_attention."""
    return flexhop.flex_attention(*operands, **choices)


def attend_pages(*operands: Any, **choices: Any) -> Any:
    """flexhop.flex_attention."""
    return flexhop.flex_attention(*operands, **choices)


class Request(NamedTuple):
    """A prompt, how many tokens to add to it, and the step of the server at which it comes."""

    prompt: list[int]
    answer: int
    arrives: int = 0


@dataclass
class Settings:
    """What all ways of generating share."""

    model: Model
    device: str
    dtype: torch.dtype  # of the cache
    is_compiled: bool

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Tensor]:
        """flexhop's or PyTorch's flex_attention, compiled if kernels are wanted."""
        return torch.compile(function, dynamic=True) if self.is_compiled else function

    def stored(self, value: Tensor) -> Tensor:
        """What comes back from a cache."""
        return value.to(self.dtype).to(value.dtype)

    def masks(self, start: Tensor, queries: int, keys: int) -> list[Any]:
        """A block mask for layers that see all, and one for those with a window."""
        sizes = start.size(0), None, queries, keys, self.device
        return [
            flexhop.create_block_mask(visible(start, is_window), *sizes, BLOCK_SIZE=(128, BLOCK))
            for is_window in (False, True)
        ]


def without_cache(settings: Settings, request: Request) -> list[int]:
    """All positions again at every step."""
    flex, device = settings.kernel(attend_without_cache), settings.device
    tokens = list(request.prompt)
    for _ in range(request.answer):
        masks = settings.masks(torch.zeros(1, device=device).int(), len(tokens), len(tokens))

        def attend(
            layer: int, query: Tensor, key: Tensor, value: Tensor, masks: Any = masks
        ) -> Tensor:
            key, value = settings.stored(key), settings.stored(value)
            mask = masks[has_window(layer)]
            return flex(query, key, value, block_mask=mask, enable_gqa=True)

        position = torch.arange(len(tokens), device=device)[None]
        found = settings.model(torch.tensor([tokens], device=device), position, attend)
        tokens.append(int(found[0, -1]))
    return tokens[len(request.prompt) :]


def dense(settings: Settings, request: Request) -> list[int]:
    """One cache of LONGEST positions: the prompt at once, then one token at a time."""
    flex, device = settings.kernel(attend_dense), settings.device
    size = (2, 1, KV_HEADS, LONGEST, HEAD_DIM)
    caches = [torch.zeros(size, device=device) for _ in range(LAYERS)]

    def run(tokens: list[int], start: int) -> int:
        position = start + torch.arange(len(tokens), device=device)[None]
        masks = settings.masks(position[:, 0], len(tokens), LONGEST)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            caches[layer][:, :, :, position[0]] = settings.stored(torch.stack([key, value]))
            mask = masks[has_window(layer)]
            return flex(query, *caches[layer], block_mask=mask, enable_gqa=True)

        return int(settings.model(torch.tensor([tokens], device=device), position, attend)[0, -1])

    found = [run(request.prompt, 0)]
    while len(found) < request.answer:
        found.append(run(found[-1:], len(request.prompt) + len(found) - 1))
    return found


class Cache(Protocol):
    """Keys and values of all sequences, and how attention reads them."""

    in_graphs: bool  # whether a step can be captured once and run again

    def admit(self, slot: int, tokens: int) -> bool:
        """Find room for a sequence; False if there is none now."""
        ...

    def release(self, slot: int) -> None:
        """Give the room of a sequence back."""
        ...

    def reading(self, sequence: Tensor, position: Tensor) -> Attend:
        """Attention for new tokens at [B, S] positions of [B] sequences, which it also stores."""
        ...


class Pages:
    """flexhop's pages: kernels look them up, and masks speak of positions in the sequence."""

    def __init__(self, settings: Settings, pages: int, slots: int) -> None:
        self.settings, self.in_graphs = settings, settings.device == "cuda"
        # One sequence more: slots that nobody uses write their tokens there.
        self.paged = flexhop.PagedAttention(pages + 1, PAGE, slots + 1, settings.device)
        self.paged.reserve(slots, 1)
        size = (2, 1, KV_HEADS, (pages + 1) * PAGE, HEAD_DIM)
        self.caches = [
            torch.zeros(size, device=settings.device).to(settings.dtype) for _ in range(LAYERS)
        ]
        self.flex = settings.kernel(attend_pages)

    def admit(self, slot: int, tokens: int) -> bool:
        """Reserve pages for the whole sequence."""
        try:
            self.paged.reserve(slot, tokens)
        except flexhop.errors.PagesExhaustedError:
            return False
        return True

    def release(self, slot: int) -> None:
        """Free the pages."""
        self.paged.erase(slot)

    def reading(self, sequence: Tensor, position: Tensor) -> Attend:
        """By a page table as wide as the masks; no sequence is longer."""
        table = self.paged.table(position[:, -1] + 1, sequence)
        table = table._replace(pages=table.pages[:, : LONGEST // PAGE])
        if position.size(1) == 1:
            masks = [None, self._last_tokens(position[:, 0])]  # lengths say where a sequence ends
        else:
            masks = self.settings.masks(position[:, 0], position.size(1), LONGEST)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache, mask = self.caches[layer], masks[has_window(layer)]
            self.paged.assign(sequence, position, key, value, *cache)
            return self.flex(query, *cache, block_mask=mask, page_table=table, enable_gqa=True)

        return attend

    def _last_tokens(self, position: Tensor) -> flexhop.BlockMask:
        """The mask of one query with a window, from its position: a few small operations."""
        first, last = (position - WINDOW + 1).clamp(min=0) // BLOCK, position // BLOCK
        columns = torch.arange(LONGEST // BLOCK, device=position.device)
        listed = (first[:, None] + columns).clamp(max=LONGEST // BLOCK - 1)
        return flexhop.BlockMask.from_kv_blocks(
            (last - first + 1).int()[:, None, None], listed.int()[:, None, None],
            BLOCK_SIZE=(128, BLOCK), mask_mod=visible(position, True),
            seq_lengths=(1, LONGEST), compute_q_blocks=False,
        )  # fmt: skip


class InTreePages:
    """PyTorch's pages: masks and scores are converted to the order of the pages.

    Its kernels on a GPU need blocks of 64 keys or more, and its pages are blocks: the same room is
    divided into larger pages.
    """

    in_graphs = False

    def __init__(self, settings: Settings, pages: int, slots: int) -> None:
        self.settings = settings
        module: Any = importlib.import_module("torch.nn.attention.experimental._paged_attention")
        pages = pages * PAGE // BLOCK
        self.paged = module.PagedAttention(pages + 1, BLOCK, slots + 1, settings.device)
        size = (2, 1, KV_HEADS, (pages + 1) * BLOCK, HEAD_DIM)
        self.caches = [torch.zeros(size, device=settings.device) for _ in range(LAYERS)]
        self.flex = settings.kernel(in_tree.flex_attention)
        self.rows = self.paged.physical_to_logical
        self._reserve(slots, 1)

    def _reserve(self, slot: int, tokens: int) -> None:
        self.paged.physical_to_logical = self.rows
        self.paged.reserve(*(torch.tensor(n, device=self.settings.device) for n in (slot, tokens)))

    def admit(self, slot: int, tokens: int) -> bool:
        """Reserve pages, if there are enough: its error is an assertion."""
        if len(self.paged.empty_pages) * BLOCK < tokens:
            return False
        self._reserve(slot, tokens)
        return True

    def release(self, slot: int) -> None:
        """Free the pages."""
        self.paged.physical_to_logical = self.rows
        self.paged.erase(torch.tensor([slot], device=self.settings.device))
        self.rows[slot] = -1  # PyTorch 2.11 to 2.13 forgets that

    def reading(self, sequence: Tensor, position: Tensor) -> Attend:
        """By masks of the whole cache, converted for every step."""
        queries, lengths = position.size(1), position[:, -1] + 1
        # Its mods take the number of a batch for that of a sequence: give it the rows of these.
        self.paged.physical_to_logical = self.rows[sequence]
        masks = []
        for mask in self.settings.masks(position[:, 0], queries, LONGEST):
            tensors = mask.kv_num_blocks, mask.kv_indices
            full = mask.full_kv_num_blocks, mask.full_kv_indices
            theirs = in_tree.BlockMask.from_kv_blocks(
                *tensors, *full, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod,
                seq_lengths=mask.seq_lengths,
            )  # fmt: skip
            masks.append(self.paged.convert_logical_block_mask(theirs, sequence))
        score_mod = self.paged.get_score_mod(lambda s, b, h, q, kv: s, lengths)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache, mask = self.caches[layer], masks[has_window(layer)]
            pair = self.settings.stored(key), self.settings.stored(value)
            self.paged.assign(sequence, position, *pair, *cache)
            return self.flex(query, *cache, score_mod, mask, enable_gqa=True)

        return attend
