"""Attention sinks: one more logit per head, which takes weight and has no value."""

from __future__ import annotations

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and lse as if every query of head h had seen one more score, sinks[h], of value 0.

    Exact, because the sink only enters the sum that the output is divided by:
    with lse' = log(exp(lse) + exp(sink)), out' = out · exp(lse - lse'). Gradients of all three
    follow, since lse is differentiable. A sink of -inf changes nothing; a query that sees no key
    has out 0 and lse sinks[h].

    Args:
        out: [B, Hq, M, Dv]. lse: [B, Hq, M], natural logarithm.
        sinks: [Hq], any floating dtype.

    Source: Xiao et al. 2023 (arXiv 2309.17453), section 3.3; as learned logits: gpt-oss.
    """
    sink = sinks.to(lse.dtype)[None, :, None]
    has_keys, has_sink = lse > -torch.inf, sink > -torch.inf
    # -inf takes no part in what is differentiated, because inf - inf would.
    finite_lse, finite_sink = torch.where(has_keys, lse, 0.0), torch.where(has_sink, sink, 0.0)
    both = torch.logaddexp(finite_lse, finite_sink)
    total = torch.where(has_keys & has_sink, both, torch.where(has_keys, lse, sink))
    share = torch.where(has_keys & has_sink, torch.exp(finite_lse - both), 1.0)
    scaled = (out.to(lse.dtype) * share[..., None]).to(out.dtype)
    return scaled, total
