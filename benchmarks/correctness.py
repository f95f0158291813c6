"""Is the answer right? One batch and one key head of a case against float64, before any timing.

A kernel is accepted when its largest error is at most twice the in-tree kernel's largest error on
the same rows, plus what rounding the exact answer to the working precision costs. Where in-tree
has no answer (backward on a CPU), plain PyTorch at the same precision stands in.
"""

from dataclasses import dataclass

import torch

from benchmarks.cases import Case, Mod, make_mask_mod, make_score_mod

ROWS = 1024  # queries per chunk of the reference; bounds its memory to ROWS x length doubles
NAMES = ("out", "dq", "dk", "dv")

# tanh.approx.f32 is off by up to 2^-11 relative, which the exact softcap that in-tree runs is not.
SLACK = {"softcap_approx": 8.0}


@dataclass(frozen=True)
class Slice:
    """The last batch and last key head of a problem, with the query heads that share that head."""

    query: torch.Tensor  # [G, S, D]
    key: torch.Tensor  # [S, D]
    value: torch.Tensor  # [S, Dv]
    grad_out: torch.Tensor  # [G, S, Dv]


def take_slice(tensors: tuple[torch.Tensor, ...], group: int, dtype: torch.dtype) -> Slice:
    """Cut query, key, value and grad_out to what the reference computes, in its precision."""
    query, key, value, grad_out = (tensor.detach()[-1].to(dtype) for tensor in tensors)
    return Slice(query[-group:], key[-1], value[-1], grad_out[-group:])


def attend_rows(
    case: Case, part: Slice, rows: slice, mods: tuple[Mod | None, Mod | None]
) -> torch.Tensor:
    """Attention by definition for a chunk of queries: [G, rows, Dv]."""
    score_mod, mask_mod = mods
    device, group = part.key.device, part.query.shape[0]
    b = torch.full((), case.batch - 1, device=device)
    h = torch.arange(case.q_heads - group, case.q_heads, device=device)[:, None, None]
    q_idx = torch.arange(rows.start, rows.stop, device=device)[None, :, None]
    kv_idx = torch.arange(case.length, device=device)[None, None, :]
    scores = part.query[:, rows] @ part.key.T / case.head_dim**0.5
    if score_mod is not None:
        scores = score_mod(scores, b, h, q_idx, kv_idx)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(b, h, q_idx, kv_idx), float("-inf"))
    return torch.softmax(scores, dim=-1).to(part.value.dtype) @ part.value


def reference(
    case: Case,
    tensors: tuple[torch.Tensor, ...],
    with_grads: bool,
    dtype: torch.dtype = torch.float64,
) -> dict[str, torch.Tensor]:
    """``out`` (and ``dq``, ``dk``, ``dv``) of the slice by definition, chunk of rows by chunk.

    In float64 these are the exact answers.
    """
    device = tensors[0].device
    mods = make_score_mod(case, device), make_mask_mod(case, device)
    part = take_slice(tensors, case.q_heads // case.kv_heads, dtype)
    leaves = [t.requires_grad_(with_grads) for t in (part.query, part.key, part.value)]
    sums = [torch.zeros_like(leaf) for leaf in leaves]
    outs: list[torch.Tensor] = []
    for start in range(0, case.length, ROWS):
        rows = slice(start, min(start + ROWS, case.length))
        out = attend_rows(case, part, rows, mods)
        outs.append(out.detach())
        if with_grads:
            grads = torch.autograd.grad(out, leaves, part.grad_out[:, rows])
            sums = [total + grad for total, grad in zip(sums, grads, strict=True)]
    found = {"out": torch.cat(outs, dim=1)}
    return found | (dict(zip(NAMES[1:], sums, strict=True)) if with_grads else {})


def cut(case: Case, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The slice of a kernel's full-size results that the reference knows."""
    group = case.q_heads // case.kv_heads
    last = {name: tensor.detach()[-1].double() for name, tensor in results.items()}
    return {n: t[-group:] if n in ("out", "dq") else t[-1] for n, t in last.items()}


def largest_errors(
    exact: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Largest absolute error of each result; a NaN counts as infinitely wrong."""
    return {
        name: float((tensor - exact[name]).abs().nan_to_num(nan=float("inf")).max())
        for name, tensor in found.items()
    }


def rounding_error(exact: torch.Tensor, dtype: torch.dtype) -> float:
    """Largest change that one rounding to ``dtype`` makes to the exact answer, doubled."""
    return 2 * float((exact.to(dtype).double() - exact).abs().max())


def misses(
    case: Case,
    errors: dict[str, float],
    peer_errors: dict[str, float],
    rounding: dict[str, float],
) -> list[str]:
    """What exceeds the budget, in words; empty when everything is within it."""
    slack = SLACK.get(case.score, 1.0)
    budgets = {name: slack * (2 * peer_errors[name] + rounding[name]) for name in errors}
    return [
        f"{name}: error {errors[name]:.3g} > budget {budgets[name]:.3g}"
        for name in errors
        if not errors[name] <= budgets[name]
    ]
