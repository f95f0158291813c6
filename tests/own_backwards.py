"""torch.autograd.Functions that bring their own backward, for mods."""

import torch

__all__ = ["Tanh"]


class Tanh(torch.autograd.Function):
    """Its gradient is half as large again as that of the operator.

    Its forward is several operations: 2.11 counts those on the way among its results.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        half = 0.5 * x
        return (half + half).tanh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        return 1.5 * grad * (1 - result * result)
