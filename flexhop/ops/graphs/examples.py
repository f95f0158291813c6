"""Example inputs for tracing user functions."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_INDICES = 4  # b, h, q_idx, kv_idx
SCORE_DTYPE = torch.float32


def index_examples(device: torch.device) -> list[Tensor]:
    """Distinct 0-d int32 tensors for b, h, q_idx, kv_idx.

    They are distinct because tracers merge equal objects: `q_idx - kv_idx` became `kv_idx -
    kv_idx`.
    """
    return [torch.zeros((), dtype=torch.int32, device=device) for _ in range(NUM_INDICES)]


def score_examples(device: torch.device, dtype: torch.dtype = SCORE_DTYPE) -> list[Tensor]:
    """Example inputs of a score_mod without its captures."""
    return [torch.zeros((), dtype=dtype, device=device), *index_examples(device)]


def key_examples(device: torch.device, dtype: torch.dtype = SCORE_DTYPE) -> list[Tensor]:
    """Example inputs of a key_mod or value_mod without its captures: a number, b, h, kv_idx."""
    return [torch.zeros((), dtype=dtype, device=device), *index_examples(device)[1:]]


def joint_examples(device: torch.device, dtype: torch.dtype = SCORE_DTYPE) -> list[Tensor]:
    """Example inputs of a joint graph without captures: score, indices, the score's gradient."""
    return [*score_examples(device, dtype), torch.zeros((), dtype=dtype, device=device)]


def score_dtype(query: Tensor) -> torch.dtype:
    """Scores are fp32, and fp64 for fp64 queries."""
    return torch.float64 if query.dtype == torch.float64 else SCORE_DTYPE
