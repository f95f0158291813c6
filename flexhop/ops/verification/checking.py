"""Hold a call's results against the reference at samples, and find where a NaN comes from."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexhop.compat.compilation import source_fingerprint
from flexhop.compat.operators.autograd import without_autocast
from flexhop.ops.args import AttentionArgs, BackwardArgs, CachedArgs
from flexhop.ops.verification.nan_origin import find_origin
from flexhop.ops.verification.sampled import (
    Sample,
    captured_gradients,
    key_rows,
    query_rows,
    take_part,
)

__all__ = ["CallCheck", "Verification", "check_results", "mod_texts", "write_call"]

# Error of a row in units of plain PyTorch's, and the roundings allowed on top (numerics.md).
_FACTORS = {torch.float32: 32.0, torch.float64: 32.0}
_LOW_FACTOR = 4.0
_TF32_EPS = 2.0**-10
# Most scores of a call whose captured gradients are checked: they are sums over all scores.
CAPTURED_SCORES = 1 << 24

Args = AttentionArgs | BackwardArgs | CachedArgs
Found = Iterator[tuple[str, Tensor, Tensor, Tensor, tuple[Tensor, ...]]]


@dataclasses.dataclass(frozen=True)
class CallCheck:
    """One attention call.

    Args:
        shape: query's [B, Hq, M, D] and key's [B or 1, Hkv, N, D], in words.
        ratios: for out, lse and the gradients, the largest error of a sampled row divided by its
            budget. Correct is at most 1. Infinite if a NaN or an infinity is misplaced.
        worst: for each, the [batch, head, row] of that error; for a captured tensor, its index.
        origin: if a result is NaN, the operand that the first NaN came from.
        reproducer: file that holds the call, if a ratio exceeds 1.
    """

    shape: str
    ratios: dict[str, float]
    worst: dict[str, tuple[int, ...]]
    origin: str = ""
    reproducer: Path | None = None

    @property
    def ok(self) -> bool:
        """Whether every error is within its budget."""
        return all(ratio <= 1 for ratio in self.ratios.values())

    def __str__(self) -> str:
        parts = [f"{name} {ratio:.2f}" for name, ratio in self.ratios.items()]
        words = f"{'correct' if self.ok else 'WRONG'}: {self.shape}; {', '.join(parts)} of budget"
        if not self.ok:
            name = max(self.ratios, key=self.ratios.__getitem__)
            words += f"; worst: {name}{list(self.worst[name])}; reproducer: {self.reproducer}"
        return words + (f"; {self.origin}" if self.origin else "")


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `flexhop.verify`: one CallCheck per attention call, in order."""

    calls: tuple[CallCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether every call is correct."""
        return all(call.ok for call in self.calls)

    def __str__(self) -> str:
        return "\n".join(map(str, self.calls)) or "The function made no flex_attention call."


@torch.no_grad()
def check_results(args: Args, results: Mapping[str, Tensor], sample: Sample) -> CallCheck:
    """Compare results with the reference.

    Args:
        args: of the forward or of the backward operator, with real tensors.
        results: out, lse and perhaps max_scores; or grad_query, grad_key, grad_value, and
            grad_capture_n for each captured tensor with a gradient.
        sample: where to look.
    """
    ratios: dict[str, float] = {}
    worst: dict[str, tuple[int, ...]] = {}
    with without_autocast(args.query.device.type):
        if isinstance(args, BackwardArgs):
            found = _backward(args, results, sample)
        else:
            found = _forward(args, results, sample)
        for name, actual, gold, plain, places in found:
            ratio, at = _judge(actual, gold, plain, args.query.dtype, axis=len(places))
            ratios[name] = ratio
            worst[name] = tuple(int(p[i]) for p, i in zip(places, at, strict=False)) or at
        origin = find_origin(args, results)
    shape = f"{list(args.query.shape)} x {list(args.key.shape)} {args.query.dtype}"
    return CallCheck(shape, ratios, worst, origin)


def _forward(args: Any, results: Mapping[str, Tensor], sample: Sample) -> Found:
    wide, narrow = (take_part(args, sample, wide=w) for w in (True, False))
    gold, plain = (query_rows(part, sample.rows) for part in (wide, narrow))
    places = (sample.batches, wide.heads, sample.rows)
    for name in gold:
        if name in results and results[name].dim() == gold[name].dim():
            yield name, _at(results[name], places), gold[name], plain[name], places


def _backward(args: BackwardArgs, results: Mapping[str, Tensor], sample: Sample) -> Found:
    wide, narrow = (take_part(args, sample, wide=w) for w in (True, False))
    places = (sample.batches, wide.heads, sample.rows)
    gold, plain = (query_rows(part, sample.rows)["grad_query"] for part in (wide, narrow))
    yield "grad_query", _at(results["grad_query"], places), gold, plain, places
    if args.key.size(0) == 1:  # whose gradient is a sum over all batches
        every = torch.arange(args.query.size(0), device=args.query.device)
        wide, narrow = (
            take_part(args, sample._replace(batches=every), wide=w) for w in (True, False)
        )
    golds, plains = (key_rows(part, sample.keys) for part in (wide, narrow))
    batches = sample.batches if args.key.size(0) > 1 else sample.batches.new_zeros(1)
    places = (batches, sample.kv_heads, sample.keys)
    for name, gold in golds.items():
        yield name, _at(results[name], places), gold, plains[name], places
    batch, heads, rows, _ = args.query.shape
    if batch * heads * rows * args.key.size(2) > CAPTURED_SCORES:
        return
    golds, plains = (captured_gradients(args, wide=w) for w in (True, False))
    for name, gold in golds.items():
        yield name, results[name], gold, plains[name], ()


def _at(tensor: Tensor, places: tuple[Tensor, ...]) -> Tensor:
    for dim, place in enumerate(places):
        tensor = tensor.index_select(dim, place)
    return tensor


def _judge(
    actual: Tensor, gold: Tensor, plain: Tensor, dtype: torch.dtype, axis: int
) -> tuple[float, tuple[int, ...]]:
    """The largest error of a row in units of its budget, and its position.

    axis: how many dimensions name a row; with 0 the whole tensor is one row.
    """
    shape = gold.shape[:axis]
    actual, gold, plain = (t.double().reshape(*shape, -1) for t in (actual, gold, plain))
    same = torch.isclose(actual, gold, rtol=0, atol=0, equal_nan=True)
    misplaced = (~same & ~(actual.isfinite() & gold.isfinite())).any(-1)
    error, usual = (
        torch.where(gold.isfinite() & t.isfinite(), (t - gold).abs(), 0.0).amax(-1)
        for t in (actual, plain)
    )
    size = torch.where(gold.isfinite(), gold.abs(), 0.0).amax(-1)
    eps = 4 * torch.finfo(dtype).eps if dtype in _FACTORS else torch.finfo(dtype).eps
    is_tf32 = dtype == torch.float32 and actual.device.type == "cuda"
    granted = usual + usual.mean() + (_TF32_EPS if is_tf32 else eps) * size
    ratio = error / (_FACTORS.get(dtype, _LOW_FACTOR) * granted + 1e-6)
    ratio = torch.where(misplaced, float("inf"), ratio)
    place = int(ratio.argmax())
    at = torch.unravel_index(torch.tensor(place), ratio.shape)
    return float(ratio.flatten()[place]), tuple(map(int, at))


def write_call(
    args: Args, results: Mapping[str, Tensor], check: CallCheck, folder: Path | None,
    mods: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Write everything that a call needs to a file for torch.load(..., weights_only=False).

    Args:
        args: the call. results: what it returned. check: how wrong that is.
        folder: where to write; a new temporary folder by default.
        mods: text of the mods by name; by default that of the call's graphs.
    """
    folder = folder or Path(tempfile.mkdtemp(prefix="flexhop_verify_"))
    folder.mkdir(parents=True, exist_ok=True)
    path = next(p for n in itertools.count() if not (p := folder / f"call_{n}.pt").exists())
    versions = {"flexhop": source_fingerprint(), "torch": torch.__version__}
    torch.save(
        {
            "operator": type(args).__name__, "operands": args._asdict(), "results": dict(results),
            "ratios": check.ratios, "worst": check.worst, "mods": dict(mods or mod_texts(args)),
            "device": _device_name(args.query), **versions,
        },
        path,
    )  # fmt: skip
    return path


def mod_texts(args: Any) -> dict[str, str]:
    """Text of the graphs of a call's mods, by name."""
    given = args._asdict()
    return {name: getattr(mod, "code", "") for name, mod in given.items() if "_mod" in name}


def _device_name(tensor: Tensor) -> str:
    return torch.cuda.get_device_name(tensor.device) if tensor.is_cuda else str(tensor.device)
