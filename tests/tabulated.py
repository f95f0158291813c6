"""Mods that read tables, beside the mods themselves."""

from __future__ import annotations

import torch


def check_gradients(wanted: torch.Tensor, made: torch.Tensor, capture: torch.Tensor) -> None:
    """Compare the gradients of a captured tensor, given the fp64 scores of both mods."""
    weights = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64)
    grads = []
    for scores in (wanted, made):
        grads += torch.autograd.grad(scores, capture, weights.view_as(scores))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-10)
