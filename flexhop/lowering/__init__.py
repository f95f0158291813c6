"""Lowering: choose a kernel and its constants for the shapes at hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from flexhop.block_mask.unknown import unknown_blocks
from flexhop.compat.graphs import views
from flexhop.compat.graphs.retry import raised_by_graph
from flexhop.compat.kernels import inductor, tanh
from flexhop.lowering import fallback
from flexhop.lowering.backward import lower_attention_backward
from flexhop.lowering.cached import lower_cached_attention
from flexhop.lowering.certify import certifying
from flexhop.lowering.derivative import lower_attention_derivative
from flexhop.lowering.dialect import dialects
from flexhop.lowering.forward import lower_attention
from flexhop.lowering.mods.packed_distances import lower_bounded
from flexhop.lowering.open_blocks import lower_unknown_blocks
from flexhop.mods.bounded import BOUNDED
from flexhop.ops.args import AttentionArgs, BackwardArgs, CachedArgs
from flexhop.ops.backward import attention_backward
from flexhop.ops.cached import cached_attention
from flexhop.ops.derivatives.operator import attention_derivative
from flexhop.ops.forward import attention
from flexhop.options.progress import PROGRESS


def register() -> None:
    """Register the operators' lowerings with Inductor; importing this package imports Inductor."""
    views.hold_strides()
    fallback.install()
    tanh.register_tanh_approx(torch.ops.flexhop.tanh_approx.default)
    tanh.register_scaled_tanh(torch.ops.flexhop.scaled_tanh.default)
    inductor.register_lowering(BOUNDED, type_promotion_kind=None)(lower_bounded)
    for operator, lower in (
        (attention, certifying(AttentionArgs, lower_attention)),
        (cached_attention, certifying(CachedArgs, lower_cached_attention)),
        (attention_backward, certifying(BackwardArgs, lower_attention_backward)),
        (attention_derivative, lower_attention_derivative),
        (unknown_blocks, lower_unknown_blocks),
    ):
        inductor.register_lowering(operator, type_promotion_kind=None)(
            raised_by_graph(_reported(lower))
        )


def _reported(lower: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering that reports its stage if the compilation takes long."""

    @functools.wraps(lower)
    def reported(*operands: Any) -> Any:
        PROGRESS.enter("choosing kernels of attention")
        try:
            return lower(*operands)
        finally:
            PROGRESS.enter("compiling kernels")

    return reported


def expect_kernels() -> None:
    """Let the GPU's dialects prepare to compile; called while graphs are traced."""
    if not torch.cuda.is_initialized():
        return
    capability = torch.cuda.get_device_capability()
    for dialect in dialects():
        if dialect.architectures is None or capability in dialect.architectures:
            dialect.expect()
