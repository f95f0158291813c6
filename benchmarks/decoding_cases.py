"""The rows of ``python -m benchmarks.decoding``: short queries over many keys, and their mods."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

Sight = Literal["all", "causal", "window", "document", "kinds", "sinks", "chosen", "tree"]
Score = Literal["none", "alibi", "softcap", "key-bias", "gates", "table"]
FIRST = 4  # keys that "sinks" always sees
CHOICE = 64  # keys of a block of "chosen"
KINDS = 4  # of keys


@dataclass(frozen=True)
class Step:
    """``queries`` queries at the end of ``keys`` keys; ``sees`` and ``score`` are mods.

    ``page`` and ``stored`` are of a cache, see benchmarks/caches.py; its peer is flexhop with
    contiguous keys. ``latent`` values are the first columns of the keys.
    """

    name: str
    batch: int
    q_heads: int
    kv_heads: int
    keys: int
    queries: int = 1
    head_dim: int = 128
    sees: Sight = "all"
    score: Score = "none"
    page: int = 0
    stored: Literal["", "int8", "float8_e4m3fn", "float8_e5m2"] = ""
    latent: int = 0

    @property
    def columns(self) -> int:
        """Of a key and its value that are read."""
        return self.head_dim if self.latent else 2 * self.head_dim

    @property
    def is_cached(self) -> bool:
        """Whether keys are read from pages or converted."""
        return self.page > 0 or self.stored != ""

    @property
    def shape(self) -> str:
        """``(B,Hq,Hkv,M,N,D)``, as the tables print it."""
        sizes = (self.batch, self.q_heads, self.kv_heads, self.queries, self.keys, self.head_dim)
        return "(" + ",".join(map(str, sizes)) + ")"

    @property
    def is_dense(self) -> bool:
        """Whether SDPA computes the same thing without a mask tensor."""
        return self.sees == "all" and self.score == "none" and not self.is_cached

    def shrunk(self) -> "Step":
        """The same problem small enough for a CPU."""
        group = self.q_heads // self.kv_heads
        page = min(self.page, 64)
        small = replace(self, batch=1, q_heads=group, kv_heads=1, keys=256, page=page)
        return replace(small, head_dim=32, latent=self.latent and 16)


STEPS: tuple[Step, ...] = (
    Step("batch-32", 32, 32, 8, 8 << 10),
    Step("batch-8", 8, 32, 8, 32 << 10),
    Step("no-group", 16, 16, 16, 8 << 10),
    Step("one-128k", 1, 32, 8, 128 << 10),
    Step("one-4k", 1, 32, 8, 4 << 10),
    Step("one-32k", 1, 32, 8, 32 << 10),
    Step("batch-8-16k", 8, 32, 8, 16 << 10),
    Step("group-7", 8, 56, 8, 16 << 10),
    Step("group-3", 8, 24, 8, 16 << 10),
    Step("queries-4", 8, 32, 8, 16 << 10, queries=4),
    Step("queries-16", 8, 32, 8, 16 << 10, queries=16),
    Step("head-64", 32, 32, 8, 16 << 10, head_dim=64),
    Step("head-256", 16, 16, 4, 16 << 10, head_dim=256),
    Step("one-key-head-64", 16, 64, 1, 16 << 10),
    Step("latent-576-512", 64, 128, 1, 8 << 10, head_dim=576, latent=512),
    Step("latent-16-heads", 128, 16, 1, 8 << 10, head_dim=576, latent=512),
    Step("alibi", 8, 32, 8, 32 << 10, score="alibi"),
    Step("softcap", 8, 32, 8, 32 << 10, score="softcap"),
    Step("causal", 8, 32, 8, 32 << 10, sees="causal"),
    Step("window-16k", 8, 32, 8, 32 << 10, sees="window"),
    Step("document-16k", 8, 32, 8, 32 << 10, sees="document"),
    Step("one-window-64k", 1, 32, 8, 128 << 10, sees="window"),
    Step("one-document-64k", 1, 32, 8, 128 << 10, sees="document"),
    Step("one-64k", 1, 32, 8, 64 << 10),
    *(Step(f"page-{n}", 8, 32, 8, 32 << 10, page=n) for n in (16, 64, 128, 256)),
    Step("batch-32-page-16", 32, 32, 8, 8 << 10, page=16),
    Step("one-page-16", 1, 32, 8, 128 << 10, page=16),
    Step("one-page-64", 1, 32, 8, 128 << 10, page=64),
    Step("int8", 8, 32, 8, 32 << 10, stored="int8"),
    Step("e4m3", 8, 32, 8, 32 << 10, stored="float8_e4m3fn"),
    Step("e5m2", 8, 32, 8, 32 << 10, stored="float8_e5m2"),
    Step("e4m3-page-16", 8, 32, 8, 32 << 10, page=16, stored="float8_e4m3fn"),
    Step("int8-page-16", 8, 32, 8, 32 << 10, page=16, stored="int8"),
    Step("e4m3-page-128", 8, 32, 8, 32 << 10, page=128, stored="float8_e4m3fn"),
    *(Step(name, 8, 32, 8, 16 << 10, score=name) for name in ("key-bias", "gates", "table")),
    *(Step(name, 8, 32, 8, 16 << 10, sees=name) for name in ("kinds", "sinks", "chosen")),
    Step("tree-32", 8, 32, 8, 16 << 10, queries=32, sees="tree"),
    *(Step(f"gates-page-{n}", 8, 32, 8, 16 << 10, score="gates", page=n) for n in (16, 128)),
    Step("table-page-16", 8, 32, 8, 16 << 10, score="table", page=16),
    Step("kinds-page-16", 8, 32, 8, 16 << 10, sees="kinds", page=16),
    *(Step(f"chosen-page-{n}", 8, 32, 8, 16 << 10, sees="chosen", page=n) for n in (16, 128)),
    Step("tree-32-page-16", 8, 32, 8, 16 << 10, queries=32, sees="tree", page=16),
    Step("key-bias-e4m3", 8, 32, 8, 16 << 10, score="key-bias", stored="float8_e4m3fn"),
    *(
        Step(
            f"chunk-page-16-{score}", 8, 32, 8, 16 << 10, 512, sees="causal", score=score, page=16
        )
        for score in ("none", "gates", "table")
    ),
)


def make_mask(module: Any, step: Step, device: torch.device) -> Any:
    """The mask of a step, made by flexhop or by PyTorch's flex_attention; None if it sees all."""
    mask_mod = make_mask_mod(step, device)
    batch = step.batch if step.sees in ("kinds", "chosen", "tree") else None
    heads = step.q_heads if step.sees == "chosen" else None
    sizes = (batch, heads, step.queries, step.keys)
    return mask_mod and module.create_block_mask(mask_mod, *sizes, device=str(device))


def make_mask_mod(step: Step, device: torch.device) -> Callable[..., Any] | None:
    """What the queries see of the keys that end with them.

    window, document: the second half. kinds: keys of three kinds of four. sinks: the first keys
    and the last quarter. chosen: a quarter of the blocks of keys, others for each key head. tree:
    what is before the queries, and ancestors of the query.
    """
    before = step.keys - step.queries
    offset = torch.tensor(before, device=device)
    draw = torch.Generator().manual_seed(2)
    if step.sees in ("causal", "window", "document"):
        return _half_mask(step, offset)
    if step.sees == "kinds":
        kinds = torch.randint(KINDS, (step.batch, step.keys), generator=draw).to(device)
        return lambda b, h, q_idx, kv_idx: kinds[b, kv_idx] != 0
    if step.sees == "sinks":
        window = step.keys // 4

        def sinks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            near = (kv_idx < FIRST) | (q_idx + offset - kv_idx < window)
            return (kv_idx <= q_idx + offset) & near

        return sinks
    if step.sees == "chosen":
        blocks, group = step.keys // CHOICE, step.q_heads // step.kv_heads
        order = torch.rand(step.batch, step.kv_heads, blocks, generator=draw).argsort(-1)
        is_chosen = (order < blocks // 4).to(device)
        return lambda b, h, q_idx, kv_idx: is_chosen[b, h // group, kv_idx // CHOICE]
    if step.sees == "tree":
        shape = (step.batch, step.queries, step.queries)
        ancestors = (torch.rand(shape, generator=draw) < 0.3).tril() | torch.eye(
            step.queries, dtype=torch.bool
        )
        ancestors = ancestors.to(device)

        def tree(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            place = (kv_idx - offset).clamp(0, step.queries - 1)
            return (kv_idx < offset) | ancestors[b, q_idx, place]

        return tree
    return None


def _half_mask(step: Step, offset: torch.Tensor) -> Callable[..., Any]:
    """What "causal", "window" and "document" see."""
    half = step.keys // 2
    ids = (torch.arange(step.keys, device=offset.device) >= half).to(torch.int32)

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx <= q_idx + offset

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx + offset) & (q_idx + offset - kv_idx < half)

    def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ids[q_idx + offset] == ids[kv_idx]

    return {"causal": causal, "window": window, "document": document}[step.sees]


def make_score_mod(step: Step, device: torch.device) -> Callable[..., Any] | None:
    """The step's score_mod.

    key-bias: a number for each key and head. gates: of the query less of the key. table: a number
    for each head and distance up to 127.
    """
    offset = torch.tensor(step.keys - step.queries, device=device)
    draw = torch.Generator().manual_seed(3)
    if step.score == "alibi":
        slopes = torch.exp2(-8.0 * torch.arange(1, step.q_heads + 1, device=device) / step.q_heads)
        return lambda s, b, h, q_idx, kv_idx: s + slopes[h] * (kv_idx - q_idx - offset)
    if step.score == "softcap":
        return lambda s, b, h, q_idx, kv_idx: 20.0 * torch.tanh(s / 20.0)
    if step.score in ("key-bias", "gates"):
        biases = torch.randn(step.batch, step.q_heads, step.keys, generator=draw).to(device)
        if step.score == "key-bias":
            return lambda s, b, h, q_idx, kv_idx: s + biases[b, h, kv_idx]
        return lambda s, b, h, q_idx, kv_idx: (
            s + biases[b, h, q_idx + offset] - biases[b, h, kv_idx]
        )
    if step.score == "table":
        table = torch.randn(step.q_heads, 128, generator=draw).to(device)

        def near(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return s + table[h, (q_idx + offset - kv_idx).clamp(0, 127)]

        return near
    return None
