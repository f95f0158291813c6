"""The decision: which kernel, with which constants, for these shapes."""

from __future__ import annotations

import torch

from flexhop.compat import inductor
from flexhop.lowering.backward import lower_attention_backward
from flexhop.lowering.cached import lower_cached_attention
from flexhop.lowering.forward import lower_attention
from flexhop.ops.backward import attention_backward
from flexhop.ops.cached import cached_attention
from flexhop.ops.forward import attention


def register() -> None:
    """Tell Inductor how our operators are lowered; importing this package imports Inductor."""
    inductor.register_tanh_approx(torch.ops.flexhop.tanh_approx.default)
    inductor.register_lowering(attention, type_promotion_kind=None)(lower_attention)
    inductor.register_lowering(cached_attention, type_promotion_kind=None)(lower_cached_attention)
    inductor.register_lowering(attention_backward, type_promotion_kind=None)(
        lower_attention_backward
    )
