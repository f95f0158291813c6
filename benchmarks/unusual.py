"""Masks and score_mods that nobody tuned a kernel for, written as people write them.

Each maker takes the problem (sizes of a ``benchmarks.cases.Case``) and a device. What a score_mod
learns hangs on it as ``learned``; its gradient is timed with those of query, key and value.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

Mod = Callable[..., torch.Tensor]


class Sizes(Protocol):
    """What makers need of a problem."""

    @property
    def batch(self) -> int:
        """Sequences."""
        ...

    @property
    def q_heads(self) -> int:
        """Query heads."""
        ...

    @property
    def length(self) -> int:
        """Queries, and keys."""
        ...


# Name, batch, query heads, key heads, length, head size, mask, score_mod.
ROWS: tuple[tuple[Any, ...], ...] = (
    ("natten-4k-d64", 4, 16, 16, 4096, 64, "natten"),
    ("natten-clamped-d128", 4, 16, 16, 4096, 128, "natten_clamped"),
    ("bigbird-16k-d64", 2, 16, 16, 16384, 64, "bigbird"),
    ("dilated-8k-d128", 2, 16, 16, 8192, 128, "dilated"),
    ("dilated-window-8k-d64", 2, 16, 16, 8192, 64, "dilated_window"),
    ("block-table-8k-d128", 2, 16, 16, 8192, 128, "block_table"),
    ("image-text-8k-d128", 2, 16, 16, 8192, 128, "image_text"),
    ("document-16k-unusual", 2, 16, 16, 16384, 128, "document_causal_negated"),
    ("natten-4k-d256", 2, 8, 8, 4096, 256, "natten"),
    ("t5-2k-d64", 4, 12, 12, 2048, 64, "full", "t5"),
    ("distance-2k-d64", 4, 12, 12, 2048, 64, "full", "distance"),
    ("swin-1k-d64", 32, 16, 16, 1024, 64, "full", "swin"),
    ("distance-1k-d64", 32, 16, 16, 1024, 64, "full", "distance"),
    ("swin-49-d64", 8, 16, 16, 3136, 64, "windows_49", "swin_49"),
    ("distance-49-d64", 8, 16, 16, 3136, 64, "windows_49", "distance"),
    ("silu-4k-d128", 4, 16, 16, 4096, 128, "causal", "silu"),
    ("gelu-4k-d128", 4, 16, 16, 4096, 128, "causal", "gelu"),
    ("log-distance-4k-d128", 4, 16, 16, 4096, 128, "causal", "log_distance"),
    ("decay-4k-d128", 4, 16, 16, 4096, 128, "causal", "decay"),
    ("rotary-phase-4k-d128", 4, 16, 16, 4096, 128, "causal", "rotary_phase"),
    ("streaming-8k-d128", 2, 16, 16, 8192, 128, "streaming"),
    ("strided-8k-d128", 2, 16, 16, 8192, 128, "strided"),
    ("video-8k-d64", 2, 8, 8, 8192, 64, "video"),
    ("block-diffusion-4k-d128", 2, 16, 16, 4096, 128, "block_diffusion"),
    ("patches-4k-d64", 4, 16, 16, 4096, 64, "full", "patches"),
    ("patches-4k-d128", 4, 16, 16, 4096, 128, "full", "patches"),
    ("pair-bias-2k-d128", 2, 8, 8, 2048, 128, "full", "pair_bias"),
    ("pairs-768-d32", 32, 8, 8, 768, 32, "full", "learned_pairs"),
    ("pairs-4k-d64", 2, 16, 16, 4096, 64, "full", "learned_pairs"),
    ("pairs-2k-d128", 4, 16, 16, 2048, 128, "full", "learned_pairs"),
    ("own-pairs-1k-d64", 4, 16, 16, 1024, 64, "full", "own_pairs"),
    ("own-pairs-1000-d64", 4, 16, 16, 1000, 64, "full", "own_pairs"),
    ("own-pairs-2k-d128", 4, 16, 16, 2048, 128, "full", "own_pairs"),
    ("key-bias-4k-d128", 4, 16, 16, 4096, 128, "causal", "key_bias"),
    ("forget-gate-4k-d128", 4, 16, 16, 4096, 128, "causal", "forget_gate"),
    ("temperature-4k-d128", 4, 16, 16, 4096, 128, "causal", "temperature"),
)

BUCKETS, FARTHEST = 32, 128  # of T5


def _natten(case: Sizes, device: Any) -> Mod:
    side = math.isqrt(case.length)
    reach = min(13, side // 2) // 2

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q // side - k // side).abs() <= reach) & ((q % side - k % side).abs() <= reach)

    return mask


def _natten_clamped(case: Sizes, device: Any) -> Mod:
    """At the border the window moves inwards, so that all queries see as many keys."""
    side = math.isqrt(case.length)
    reach = min(13, side // 2) // 2

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        row = torch.clamp(q // side, reach, side - 1 - reach)
        column = torch.clamp(q % side, reach, side - 1 - reach)
        return ((row - k // side).abs() <= reach) & ((column - k % side).abs() <= reach)

    return mask


def _bigbird(case: Sizes, device: Any) -> Mod:
    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        q_block, k_block = q // 64, k // 64
        return (k_block == 0) | ((q_block - k_block).abs() <= 1) | (k_block % 16 == 0)

    return mask


def _dilated(case: Sizes, device: Any) -> Mod:
    return lambda b, h, q, k: (q >= k) & ((q - k) % 4 == 0)


def _dilated_window(case: Sizes, device: Any) -> Mod:
    return lambda b, h, q, k: (q - k >= 0) & (q - k < 1536) & ((q - k) % 3 == 0)


def _block_table(case: Sizes, device: Any) -> Mod:
    """A random pattern of blocks of 64, and the diagonal."""
    blocks = -(-case.length // 64)
    generator = torch.Generator().manual_seed(3)
    table = (torch.rand(blocks, blocks, generator=generator) < 0.15) | torch.eye(blocks).bool()
    table = table.to(device)
    return lambda b, h, q, k: table[q // 64, k // 64] & (k <= q)


def _image_text(case: Sizes, device: Any) -> Mod:
    """Causal text with images, whose tokens see all of their image."""
    place = torch.arange(case.length)
    image = torch.where(place % 1500 < 576, place // 1500, -1).to(torch.int32).to(device)
    return lambda b, h, q, k: (q >= k) | ((image[q] >= 0) & (image[q] == image[k]))


def _document_causal_negated(case: Sizes, device: Any) -> Mod:
    generator = torch.Generator().manual_seed(1)
    starts = torch.rand(case.length, generator=generator) < 1 / 1024
    ids = starts.cumsum(0, dtype=torch.int32).to(device)
    return lambda b, h, q, k: ~((ids[q] != ids[k]) | (k > q))


def _windows_49(case: Sizes, device: Any) -> Mod:
    return lambda b, h, q, k: q // 49 == k // 49


def _streaming(case: Sizes, device: Any) -> Mod:
    """A window, and the first four tokens."""
    return lambda b, h, q, k: (q >= k) & ((q - k < 1024) | (k < 4))


def _strided(case: Sizes, device: Any) -> Mod:
    """A window, and every 256th token."""
    return lambda b, h, q, k: (q >= k) & ((q - k < 256) | ((k + 1) % 256 == 0))


def _video(case: Sizes, device: Any) -> Mod:
    """Frames of 32 x 32 patches; each sees 11 x 11 patches of its frame and of those beside it."""

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        frames = (q // 1024 - k // 1024).abs() <= 1
        rows = (q // 32 % 32 - k // 32 % 32).abs() <= 5
        return frames & rows & ((q % 32 - k % 32).abs() <= 5)

    return mask


def _block_diffusion(case: Sizes, device: Any) -> Mod:
    """Noisy blocks of 64 tokens, then clean ones: a noisy block sees itself and those before."""
    half = case.length // 2

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        q_block, k_block = q % half // 64, k % half // 64
        own = (k < half) & (q_block == k_block)
        noisy = (q < half) & (own | ((k >= half) & (q_block > k_block)))
        return noisy | ((q >= half) & (k >= half) & (q_block >= k_block))

    return mask


MASKS: dict[str, Callable[[Sizes, Any], Mod]] = {
    "natten": _natten,
    "natten_clamped": _natten_clamped,
    "bigbird": _bigbird,
    "dilated": _dilated,
    "dilated_window": _dilated_window,
    "block_table": _block_table,
    "image_text": _image_text,
    "document_causal_negated": _document_causal_negated,
    "windows_49": _windows_49,
    "streaming": _streaming,
    "strided": _strided,
    "video": _video,
    "block_diffusion": _block_diffusion,
}


def _learned(device: Any, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(size, generator=generator).to(device, dtype).requires_grad_()


def _with(mod: Any, *learned: torch.Tensor) -> Mod:
    mod.learned = learned
    return mod


def t5_bucket(distance: torch.Tensor) -> torch.Tensor:
    """Bucket of a distance kv_idx - q_idx, both directions: exact up to 8, then logarithmic."""
    half, exact = BUCKETS // 2, BUCKETS // 4
    later = torch.where(distance > 0, half, 0)
    away = distance.abs()
    ratio = torch.log(away.float() / exact + 1e-6) / math.log(FARTHEST / exact)
    far = (exact + (ratio * (half - exact)).to(torch.int64)).clamp(max=half - 1)
    return later + torch.where(away < exact, away, far)


def _t5(case: Sizes, device: Any) -> Mod:
    table = _learned(device, BUCKETS, case.q_heads)
    return _with(lambda s, b, h, q, k: s + table[t5_bucket(k - q), h], table)


def _distance(case: Sizes, device: Any) -> Mod:
    """What T5 and Swin are held against: a plain table by distance."""
    table, length = _learned(device, case.q_heads, 2 * case.length - 1), case.length
    return _with(lambda s, b, h, q, k: s + table[h, q - k + length - 1], table)


def _swin(case: Sizes, device: Any) -> Mod:
    side = math.isqrt(case.length)
    rows = -(-case.length // side)
    table = _learned(device, (2 * rows - 1) * (2 * side - 1), case.q_heads)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        row, column = q // side - k // side + rows - 1, q % side - k % side + side - 1
        return s + table[row * (2 * side - 1) + column, h]

    return _with(score, table)


def _swin_49(case: Sizes, device: Any) -> Mod:
    table = _learned(device, 13, 13, case.q_heads)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        row = torch.clamp(q % 49 // 7 - k % 49 // 7 + 6, 0, 12)
        column = torch.clamp(q % 7 - k % 7 + 6, 0, 12)
        return s + table[row, column, h]

    return _with(score, table)


def _silu(case: Sizes, device: Any) -> Mod:
    return lambda s, b, h, q, k: s * torch.sigmoid(s)


def _gelu(case: Sizes, device: Any) -> Mod:
    return lambda s, b, h, q, k: torch.nn.functional.gelu(s)


def _log_distance(case: Sizes, device: Any) -> Mod:
    slope = torch.exp2(-8.0 * torch.arange(1, case.q_heads + 1, device=device) / case.q_heads)
    return lambda s, b, h, q, k: s - slope[h] * torch.log1p((q - k).abs())


def _decay(case: Sizes, device: Any) -> Mod:
    factor = 1 - torch.exp2(-5.0 - torch.arange(case.q_heads, device=device))
    return lambda s, b, h, q, k: s * factor[h] ** (q - k).abs()


def _rotary_phase(case: Sizes, device: Any) -> Mod:
    theta = 1e-3 ** (torch.arange(case.q_heads, device=device) / case.q_heads)
    return lambda s, b, h, q, k: s * torch.cos(theta[h] * (q - k))


def _patches(case: Sizes, device: Any) -> Mod:
    """A slope per head times the distance of two patches along rows and columns."""
    side = math.isqrt(case.length)
    slope = torch.exp2(-0.5 * torch.arange(1, case.q_heads + 1, device=device))

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s - slope[h] * ((q // side - k // side).abs() + (q % side - k % side).abs())

    return score


def _pair_bias(case: Sizes, device: Any) -> Mod:
    generator = torch.Generator().manual_seed(4)
    bias = torch.randn(case.q_heads, case.length, case.length, generator=generator)
    bias = bias.to(device, torch.bfloat16)
    return lambda s, b, h, q, k: s + bias[h, q, k]


def _learned_pairs(case: Sizes, device: Any) -> Mod:
    bias = _learned(device, case.q_heads, case.length, case.length, dtype=torch.bfloat16)
    return _with(lambda s, b, h, q, k: s + bias[h, q, k], bias)


def _own_pairs(case: Sizes, device: Any) -> Mod:
    sizes = (case.batch, case.q_heads, case.length, case.length)
    bias = _learned(device, *sizes, dtype=torch.bfloat16)
    return _with(lambda s, b, h, q, k: s + bias[b, h, q, k], bias)


def _key_bias(case: Sizes, device: Any) -> Mod:
    bias = _learned(device, case.q_heads, case.length)
    return _with(lambda s, b, h, q, k: s + bias[h, k], bias)


def _forget_gate(case: Sizes, device: Any) -> Mod:
    """Sums of the logarithms of gates; what lies between two tokens is forgotten."""
    gates = torch.nn.functional.logsigmoid(_learned(device, case.q_heads, case.length) + 4)
    sums = gates.cumsum(-1).detach().requires_grad_()
    return _with(lambda s, b, h, q, k: s + sums[h, q] - sums[h, k], sums)


def _temperature(case: Sizes, device: Any) -> Mod:
    factor = (2.0 + torch.arange(case.length, device=device)).log()
    return lambda s, b, h, q, k: s * factor[q]


SCORES: dict[str, Callable[[Sizes, Any], Mod]] = {
    "t5": _t5,
    "distance": _distance,
    "swin": _swin,
    "swin_49": _swin_49,
    "silu": _silu,
    "gelu": _gelu,
    "log_distance": _log_distance,
    "decay": _decay,
    "rotary_phase": _rotary_phase,
    "patches": _patches,
    "pair_bias": _pair_bias,
    "learned_pairs": _learned_pairs,
    "own_pairs": _own_pairs,
    "key_bias": _key_bias,
    "forget_gate": _forget_gate,
    "temperature": _temperature,
}
