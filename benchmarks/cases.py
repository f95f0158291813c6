"""The problems that are measured: shapes, mods, and which peers can do the same work."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import unusual

Mod = Callable[..., torch.Tensor]

WINDOW = 1024
PREFIX = 1024
DOCUMENT_MEAN = 1024
SOFTCAP = 20.0
KEPT_BLOCKS = 0.1  # of all, at random, besides those on the diagonal


@dataclass(frozen=True)
class Case:
    """One problem: ``batch`` sequences of ``length`` queries and as many keys.

    ``pattern`` and ``score`` name mods of this file, or of ``benchmarks/unusual.py``.
    """

    name: str
    batch: int
    q_heads: int
    kv_heads: int
    length: int
    head_dim: int
    pattern: str = "full"
    score: str = "none"
    value_dim: int = 0  # 0: as head_dim
    block: int = 128  # queries, and keys, of a block of the mask

    @property
    def v_dim(self) -> int:
        """Columns of values."""
        return self.value_dim or self.head_dim

    @property
    def shape(self) -> str:
        """``(B,Hq,Hkv,S,D)``, as the tables print it; with Dv if it differs."""
        sizes = [self.batch, self.q_heads, self.kv_heads, self.length, self.head_dim]
        if self.value_dim:
            sizes.append(self.value_dim)
        return "(" + ",".join(map(str, sizes)) + ")"

    @property
    def is_dense(self) -> bool:
        """Whether SDPA computes the same thing without a mask tensor."""
        return self.pattern in ("full", "causal") and self.score == "none"

    def shrunk(self) -> "Case":
        """The same problem small enough for a CPU to run within seconds."""
        group = self.q_heads // self.kv_heads
        return replace(
            self,
            batch=1,
            q_heads=2 * group,
            kv_heads=2,
            length=256,
            head_dim=32,
            value_dim=self.value_dim and 16,
        )


CASES: tuple[Case, ...] = (
    Case("full-4k-d128", 4, 16, 16, 4096, 128),
    Case("full-8k-d64", 4, 16, 16, 8192, 64),
    Case("causal-2k-d128", 16, 16, 16, 2048, 128, "causal"),
    Case("causal-8k-d128", 4, 16, 16, 8192, 128, "causal"),
    Case("causal-16k-d128", 2, 16, 16, 16384, 128, "causal"),
    Case("causal-8k-d64", 4, 16, 16, 8192, 64, "causal"),
    Case("causal-8k-d256", 2, 16, 16, 8192, 256, "causal"),
    Case("causal-8k-gqa", 4, 32, 8, 8192, 128, "causal"),
    Case("softcap-8k", 4, 16, 16, 8192, 128, "causal", "softcap"),
    Case("softcap-approx-8k", 4, 16, 16, 8192, 128, "causal", "softcap_approx"),
    Case("sliding-16k", 2, 16, 16, 16384, 128, "sliding"),
    Case("document-16k", 2, 16, 16, 16384, 128, "document"),
    Case("prefix-8k", 4, 16, 16, 8192, 128, "prefix"),
    Case("alibi-8k", 4, 16, 16, 8192, 128, "causal", "alibi"),
    Case("rel-bias-4k", 4, 16, 16, 4096, 128, "full", "rel_bias"),
)

UNUSUAL: tuple[Case, ...] = tuple(Case(*row) for row in unusual.ROWS)
# Widths as models have them, short sequences, small blocks.
SHAPES: tuple[Case, ...] = (
    Case("full-4k-d80", 4, 16, 16, 4096, 80),
    Case("full-4k-d96", 4, 16, 16, 4096, 96),
    Case("causal-8k-d192", 2, 16, 16, 8192, 192, "causal"),
    Case("causal-8k-d192-128", 2, 16, 16, 8192, 192, "causal", value_dim=128),
    Case("causal-512-d128", 64, 16, 16, 512, 128, "causal"),
    Case("causal-256-d128", 128, 16, 16, 256, 128, "causal"),
    Case("full-1k-d64", 32, 16, 16, 1024, 64),
    Case("images-197-d64", 128, 12, 12, 197, 64),
    Case("windows-64-d128", 512, 8, 8, 64, 128),
    Case("windows-49-d32", 2048, 4, 4, 49, 32, "full", "learned_pairs"),
    Case("blocks-128-16k", 2, 16, 16, 16384, 128, "random_blocks"),
    Case("blocks-64-16k", 2, 16, 16, 16384, 128, "random_blocks", block=64),
    Case("blocks-32-16k", 2, 16, 16, 16384, 128, "random_blocks", block=32),
    Case("blocks-16-16k", 2, 16, 16, 16384, 128, "random_blocks", block=16),
    Case("blocks-64-16k-gqa", 2, 16, 4, 16384, 128, "random_blocks", block=64),
    Case("blocks-32-16k-gqa", 2, 16, 4, 16384, 128, "random_blocks", block=32),
    Case("blocks-16-16k-gqa", 2, 16, 2, 16384, 128, "random_blocks", block=16),
)
SUITES = {"usual": CASES, "unusual": UNUSUAL, "shapes": SHAPES}
QUICK = ("causal-2k-d128", "causal-8k-d256", "document-16k", "rel-bias-4k")


def document_ids(
    length: int, device: torch.device | str, mean: int = DOCUMENT_MEAN
) -> torch.Tensor:
    """[length] int32: the document of each token; lengths are exponential with the given mean."""
    generator = torch.Generator().manual_seed(1)
    gaps = torch.empty(4 * length // mean + 16).exponential_(1 / mean, generator=generator)
    ends = gaps.ceil().long().cumsum(0)
    ids = torch.searchsorted(ends, torch.arange(length), right=True)
    return ids.to(torch.int32).to(device)


def make_mask_mod(case: Case, device: torch.device | str) -> Mod | None:
    """The case's mask_mod, or None for full attention."""
    if case.pattern in unusual.MASKS:
        return unusual.MASKS[case.pattern](case, device)
    documents = document_ids(case.length, device, min(DOCUMENT_MEAN, case.length // 4))
    window, prefix = min(WINDOW, case.length // 4), min(PREFIX, case.length // 4)

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    def sliding(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return documents[q_idx] == documents[kv_idx]

    def prefix_lm(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) | (kv_idx < prefix)

    blocks = -(-case.length // case.block)
    generator = torch.Generator().manual_seed(3)
    kept = torch.rand(blocks, blocks, generator=generator) < KEPT_BLOCKS
    kept = (kept | torch.eye(blocks, dtype=torch.bool)).to(device)

    def random_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kept[q_idx // case.block, kv_idx // case.block]

    table = {
        "causal": causal,
        "sliding": sliding,
        "document": document,
        "prefix": prefix_lm,
        "random_blocks": random_blocks,
    }
    return table.get(case.pattern)


def make_score_mod(case: Case, device: torch.device | str) -> Mod | None:
    """The case's score_mod as everybody writes it, or None for plain scores.

    ``softcap_approx`` has the exact tanh here: it is what in-tree runs and what the answer is
    compared with; only flexhop is given the approximate one (``benchmarks/implementations.py``).
    What a mod learns hangs on it as ``learned``.
    """
    if case.score in unusual.SCORES:
        return unusual.SCORES[case.score](case, device)
    heads, length = case.q_heads, case.length
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device=device) / heads)
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(heads, 2 * length - 1, generator=generator).to(device)

    def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    def rel_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h, q_idx - kv_idx + length - 1]

    table = {"softcap": softcap, "softcap_approx": softcap, "alibi": alibi, "rel_bias": rel_bias}
    return table.get(case.score)
