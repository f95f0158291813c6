"""Attention sinks: one extra logit per head, which takes part in the softmax but has no value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flexhop import errors
from flexhop.errors.base import shape_text
from flexhop.ops.call import Mistake, note_mistake


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and lse as if every query of head h had one more score, sinks[h], with value 0.

    This is exact, because the sink only enters the softmax denominator: with lse' = log(exp(lse) +
    exp(sink)), out' = out · exp(lse - lse'). The gradients of all three follow, because lse is
    differentiable. A sink of -inf changes nothing. For a query that sees no key, out is 0 and lse
    is sinks[h].

    Args:
        out: [B, Hq, M, Dv]. lse: [B, Hq, M], natural logarithm.
        sinks: [Hq], any floating-point dtype.

    Source: Xiao et al. 2023 (arXiv 2309.17453), section 3.3; as learned logits: gpt-oss.
    """
    sink = sinks.to(lse.dtype)[None, :, None]
    has_keys, has_sink = lse > -torch.inf, sink > -torch.inf
    # Exclude -inf from differentiation, because inf - inf would be NaN.
    finite_lse, finite_sink = torch.where(has_keys, lse, 0.0), torch.where(has_sink, sink, 0.0)
    # The second derivative of torch.logaddexp overflows if they are further apart than 88. Of the
    # formulas for each side, one has no cancellation: neither in values nor in derivatives.
    distance = finite_lse - finite_sink
    is_above = distance > 0
    both = torch.where(
        is_above, finite_lse + softplus(-distance), finite_sink + softplus(distance)
    )
    total = torch.where(has_keys & has_sink, both, torch.where(has_keys, lse, sink))
    kept = torch.where(is_above, 1 - torch.sigmoid(-distance), torch.sigmoid(distance))
    share = torch.where(has_keys & has_sink, kept, 1.0)
    scaled = (out.to(lse.dtype) * _ordered(share[..., None], out)).to(out.dtype)
    return scaled, total


def _ordered(share: Tensor, out: Tensor) -> Tensor:
    """share, stored in the order of dimensions of out, whatever that is.

    Otherwise its product with out differs in layout from the product's tangent. Forward mode would
    copy the tangent, which PyTorch cannot do with dynamic shapes. Strides may be unknown, so they
    are not compared: `where` takes the order of its condition, for tangents as well.
    """
    condition = torch.zeros_like(out[..., :1], dtype=torch.bool)
    return torch.where(condition, share, share)


def sinks_mistake(sinks: Any, query: Tensor) -> Mistake | None:
    """What is wrong with sinks, or None."""
    wanted = f"a floating-point tensor of shape [{query.size(1)}] on {query.device}"
    if isinstance(sinks, Tensor):
        fits = sinks.dim() == 1 and sinks.size(0) == query.size(1)
        if fits and sinks.is_floating_point() and sinks.device == query.device:
            return None
        found = f"{sinks.dtype} of shape {shape_text(sinks.shape)} on {sinks.device}"
    else:
        found = type(sinks).__name__
    return note_mistake(errors.OptionValueError, name="sinks", value=found, allowed=wanted)
