"""tanh as a single GPU instruction, if a score_mod asks for it."""

from __future__ import annotations

import sys

import torch
from torch import Tensor


@torch.library.custom_op("flexhop::tanh_approx", mutates_args=())
def _tanh_approx(x: Tensor) -> Tensor:
    return torch.tanh(x)


@_tanh_approx.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@_tanh_approx.register_vmap
def _(info: object, in_dims: tuple[int | None, ...], x: Tensor) -> tuple[Tensor, int | None]:
    return _tanh_approx(x), in_dims[0]


def _save_output(ctx: object, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)  # type: ignore[attr-defined]


def _backward(ctx: object, grad: Tensor) -> Tensor:
    (output,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return grad * (1 - output * output)


_tanh_approx.register_autograd(_backward, setup_context=_save_output)


@torch.library.custom_op("flexhop::scaled_tanh", mutates_args=())
def scaled_tanh(x: Tensor, inner: float, outer: float) -> Tensor:
    """outer * tanh(inner * x): what lowering makes of soft caps in forward kernels."""
    return outer * torch.tanh(inner * x)


def tanh_approx(x: Tensor) -> Tensor:
    """Hyperbolic tangent with the precision of the GPU's `tanh.approx.f32`.

    In a compiled kernel it is one instruction instead of about twenty, with a relative error up to
    2**-11. Elsewhere it is torch.tanh. Its derivative uses the approximated value.

    Args:
        x: a float32 tensor of any shape, such as a score.

    Returns:
        A float32 tensor of the same shape.

    Source: PTX ISA, tanh.approx.f32.
    """
    if torch.compiler.is_dynamo_compiling() or _is_traced():
        return torch.ops.flexhop.tanh_approx(x)
    # Eager calls are differentiable in every mode; a custom operator would give a tangent of 0.
    return torch.tanh(x)


def _is_traced() -> bool:
    """Whether make_fx is tracing, as `explain` does to read a mod."""
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracer is not None and tracer.get_proxy_mode() is not None
