"""The rows of ``python -m benchmarks.varlen``: packed sequences, and mods of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Pack:
    """``tokens`` tokens cut into sequences, causal.

    cut: "mean" draws lengths with this mean from an exponential distribution, "equal" takes all
    alike, "skewed" is one sequence of three quarters of the tokens, then others like "mean".
    """

    name: str
    tokens: int
    mean: int
    cut: Literal["mean", "equal", "skewed"] = "mean"
    heads: int = 16
    head_dim: int = 128
    mod: str = ""  # one of MODS

    def shrunk(self) -> "Pack":
        """The same problem small enough for a CPU."""
        mean = max(4, min(self.mean, 64))
        return replace(self, tokens=256 // mean * mean, mean=mean, heads=2, head_dim=32)


PACKS: tuple[Pack, ...] = (
    Pack("mean-1k", 16 << 10, 1 << 10),
    Pack("mean-1k-64k", 64 << 10, 1 << 10),
    Pack("mean-256", 64 << 10, 256),
    Pack("equal-1k", 16 << 10, 1 << 10, "equal"),
    Pack("equal-4k", 64 << 10, 4 << 10, "equal"),
    Pack("short-10k", 320 << 10, 32, heads=4),
    Pack("skewed-16k", 16 << 10, 128, "skewed"),
    Pack("kinds-16k", 16 << 10, 2 << 10, mod="kinds"),
    Pack("key-bias-16k", 16 << 10, 2 << 10, mod="key-bias"),
    Pack("gates-16k", 16 << 10, 2 << 10, mod="gates"),
    Pack("buckets-16k", 16 << 10, 2 << 10, mod="buckets"),
    Pack("waves-16k", 16 << 10, 2 << 10, mod="waves"),
    Pack("windows-200k", 49 << 12, 49, "equal", heads=6, head_dim=32, mod="windows"),
    Pack("patches-16k", 16 << 10, 1 << 10, mod="patches"),
)


@dataclass(frozen=True)
class Mod:
    """A mod of sequences, which reads a table [S, H, longest].

    words: from the table to arguments of flex_attention. is_learned: the table has a gradient.
    """

    words: Callable[[torch.Tensor], dict[str, Any]]
    is_learned: bool = False


def _buckets(weights: torch.Tensor) -> dict[str, Any]:
    """T5's bias: 16 distances as they are, then 16 buckets that grow."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        far = (q - k).abs()
        beyond = 16 + (torch.log(far.clamp(min=1) / 16) / math.log(8) * 16).to(torch.int32)
        return s + weights[0, h, torch.where(far < 16, far, beyond.clamp(max=31))]

    return {"score_mod": mod}


def _waves(weights: torch.Tensor) -> dict[str, Any]:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + weights[0, h, 0] * torch.sin((q - k) * weights[0, h, 1])

    return {"score_mod": mod}


def _windows(weights: torch.Tensor) -> dict[str, Any]:
    """Swin's bias, of windows of 7 rows and 7 columns."""
    flat = weights[:4].transpose(0, 1).flatten(1)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + flat[h, (q // 7 - k // 7 + 6) * 13 + q % 7 - k % 7 + 6]

    return {"score_mod": mod}


def _patches(weights: torch.Tensor) -> dict[str, Any]:
    """A slope over the distance in space, of images that are 32 patches wide."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        rows, columns = q // 32 - k // 32, q % 32 - k % 32
        return s - weights[0, h, 0].abs() * torch.sqrt((rows**2 + columns**2).float())

    return {"score_mod": mod}


MODS = {
    "windows": Mod(_windows),
    "patches": Mod(_patches),
    "buckets": Mod(_buckets),
    "waves": Mod(_waves),
    "kinds": Mod(lambda t: {"mask_mod": lambda b, h, q, k: (t[b, 0, k] > 0) | (q == k)}),
    "key-bias": Mod(lambda t: {"score_mod": lambda s, b, h, q, k: s + t[b, h, k]}),
    "gates": Mod(
        lambda t: {"score_mod": lambda s, b, h, q, k: s + t[b, h, q] - t[b, h, k]},
        is_learned=True,
    ),
}


def words_of(pack: Pack, *table: torch.Tensor) -> dict[str, Any]:
    """Arguments of flex_attention for the mod of a row; its table, if it has a mod."""
    return MODS[pack.mod].words(*table) if pack.mod else {}


def lengths(pack: Pack) -> list[int]:
    """Lengths of the sequences; they add up to the tokens."""
    if pack.cut == "equal":
        return [pack.mean] * (pack.tokens // pack.mean)
    found = [pack.tokens * 3 // 4] if pack.cut == "skewed" else []
    generator = torch.Generator().manual_seed(1)
    while sum(found) < pack.tokens:
        drawn = torch.empty(1).exponential_(1 / pack.mean, generator=generator)
        found.append(max(1, int(drawn.item())))
    found[-1] -= sum(found) - pack.tokens
    return found


def offsets(pack: Pack, device: torch.device) -> torch.Tensor:
    """[S + 1] int32: where the sequences begin, and the end."""
    return torch.tensor([0, *lengths(pack)]).cumsum(0).to(device, torch.int32)
