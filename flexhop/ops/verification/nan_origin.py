"""Which operand the first NaN of a call's results came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexhop.ops.args import BackwardArgs, CachedArgs
from flexhop.ops.eager import over_elements
from flexhop.ops.verification.sampled import Part, Sample, score_rows, take_part

_LARGEST = torch.finfo(torch.float32).max


def find_origin(args: Any, results: Mapping[str, Tensor]) -> str:
    """The first NaN and its source, in words; empty if no result is NaN.

    Args:
        args: of the forward or of the backward operator, with real tensors.
        results: by name, as for `checking.check_results`.
    """
    for name, result in results.items():
        found = _first(result.isnan())
        if found is not None:
            at = found if name.startswith("grad_capture") else found[:3]
            source = _of_gradient(args, name, at) if "grad" in name else _of_row(args, at)
            return f"the first NaN, {name}{list(at)}, comes from {source}"
    return ""


def _first(marks: Tensor) -> tuple[int, ...] | None:
    """The position of the first mark."""
    if not marks.numel() or not marks.any():
        return None
    return tuple(map(int, marks.nonzero()[0]))


def _of_gradient(args: BackwardArgs, name: str, at: tuple[int, ...]) -> str:
    """The source of a NaN in a gradient."""
    for saved in (args.out, args.lse):
        row = _first(saved.isnan())
        if row is not None:
            return _of_row(args, row[:3])
    for given, tensor in (("grad_out", args.grad_out), ("grad_lse", args.grad_lse)):
        row = None if tensor is None else _first(~tensor.isfinite())
        if row is not None:
            return f"{given}{list(row[:3])}: the gradient that the call received"
    if name == "grad_query":
        part, _, head = _row(args, at)
        scores = score_rows(part, torch.tensor(at[2:], device=part.key.device))
        elements = (scores.raw, torch.ones_like(scores.raw))
        outputs = _joint(part, elements, scores.places)
        key = _first((~outputs.isfinite() & scores.visible)[0, head, 0])
        if key is not None:
            return f"the derivative of score_mod at [b, h, q_idx, kv_idx] = {[*at, *key]}"
    return "the derivative of score_mod, a sum that overflows, or the kernel"


def _joint(part: Part, elements: tuple[Tensor, Tensor], index: tuple[Tensor, ...]) -> Tensor:
    args: Any = part.args
    return over_elements(args.joint, 1, elements, index, args.score_captures)[0]


def _row(args: Any, at: tuple[int, ...]) -> tuple[Part, tuple[int, int], int]:
    """The operands of a query; its batch and head of key; its head in the part."""
    batch, head, _ = at
    group = args.query.size(1) // args.key.size(1)
    device = args.query.device
    batches, heads = (torch.tensor([i], device=device) for i in (batch, head // group))
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    part = take_part(args, Sample(batches, heads, nothing, nothing), wide=True)
    is_shared = args.key.size(0) == 1 and not getattr(args, "pages", ())
    return part, (0 if is_shared else batch, head // group), head % group


def _of_row(args: Any, at: tuple[int, ...]) -> str:
    """The source of a NaN in the results of one query, [b, h, q_idx]."""
    if not args.query[at].isfinite().all():
        return f"query{list(at)}"
    part, (batch, kv_head), head = _row(args, at)
    scores = score_rows(part, torch.tensor(at[2:], device=args.query.device))
    raw, modified, visible = (t[0, head, 0] for t in scores[:3])
    is_cached = isinstance(args, CachedArgs)
    key = _first(visible & ~raw.isfinite())
    if key is not None:
        return f"key{[batch, kv_head, *key]}" + (", as k_mod decodes it" if is_cached else "")
    key = _first(visible & ~(modified.abs() <= _LARGEST) & ~modified.isneginf())
    if key is not None:
        place = f"score_mod at [b, h, q_idx, kv_idx] = {[*at, *key]}"
        return f"{place}, which gives {float(modified[key])}{_captured(args)}"
    is_bad = ~part.value[0, head].isfinite().all(-1)
    seen, hidden = _first(is_bad & visible), _first(is_bad)
    rows = hidden if seen is None else seen
    if rows is not None:
        return f"value{[batch, kv_head, *rows]}" + (", as v_mod decodes it" if is_cached else "")
    return "the kernel: the reference has numbers here"


def _captured(args: Any) -> str:
    """Which captured tensors of the score_mod hold a NaN or an infinity."""
    bad = [
        str(n)
        for n, value in enumerate(args.score_captures)
        if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all()
    ]
    return f"; captured tensors that are not finite: {', '.join(bad)}" if bad else ""
