"""How much work a case is: unmasked area, and the floating-point operations it needs."""

import torch

from benchmarks.cases import Case, Mod

CHUNK_ELEMENTS = 1 << 24  # mask elements evaluated at once; bounds the memory of counting


def count_visible(mask_mod: Mod, length: int, device: torch.device | str) -> int:
    """Unmasked elements of one [length, length] mask, counted exactly in chunks of rows."""
    kv_idx = torch.arange(length, device=device)[None, :]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    rows = max(1, CHUNK_ELEMENTS // length)
    total = 0
    for start in range(0, length, rows):
        q_idx = torch.arange(start, min(start + rows, length), device=device)[:, None]
        total += int(mask_mod(zero, zero, q_idx, kv_idx).expand(-1, length).sum())
    return total


def unmasked_area(case: Case, mask_mod: Mod | None, device: torch.device | str) -> int:
    """Unmasked elements over all batches and query heads (the masks here are equal for all)."""
    per_head = case.length**2 if mask_mod is None else count_visible(mask_mod, case.length, device)
    return case.batch * case.q_heads * per_head


def forward_flops(area: int, qk_dim: int, v_dim: int) -> int:
    """QK^T and PV: two operations per multiply-add."""
    return 2 * area * (qk_dim + v_dim)


def backward_flops(area: int, qk_dim: int, v_dim: int) -> int:
    """Scores again, dQ and dK over qk_dim; dP and dV over v_dim."""
    return 2 * area * (3 * qk_dim + 2 * v_dim)


def flops(direction: str, area: int, head_dim: int, value_dim: int | None = None) -> int:
    """Operations of one direction, ``fwd`` or ``bwd``; value_dim: None if it is head_dim."""
    count = forward_flops if direction == "fwd" else backward_flops
    return count(area, head_dim, head_dim if value_dim is None else value_dim)
