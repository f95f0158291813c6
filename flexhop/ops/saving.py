"""What an autograd function of ours keeps between its forward and its derivatives."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexhop.compat.hop import pytree


def save(ctx: Any, values: Any) -> None:
    """Keep tensors by save_for_backward and everything else (ints, SymInts, strings) as is."""
    flat, ctx.spec = pytree.tree_flatten(values)
    ctx.plain = [None if isinstance(value, Tensor) else value for value in flat]
    ctx.positions = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]
    tensors = [flat[i] for i in ctx.positions]
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def restore(ctx: Any) -> Any:
    """What `save` kept."""
    flat = list(ctx.plain)
    for position, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
        flat[position] = tensor
    return pytree.tree_unflatten(flat, ctx.spec)
