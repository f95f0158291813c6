"""Captured tensors that every rank of a mesh has, and whose gradients are summed over it.

Compiled calls sum the gradients that the backward operator returns (ops/forward.py). Eager calls
are differentiated by autograd, so here captured tensors are replaced while a mod runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexhop.compat import collectives, dtensors
from flexhop.compat.hop import pytree
from flexhop.compat.indexing import IndexMode
from flexhop.ops.examples import score_examples


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, groups: str) -> Tensor:
        ctx.groups = groups
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch: *grad_outputs
        return sum_over_all(grad, ctx.groups), None


def sum_gradient(tensor: Tensor, groups: str) -> Tensor:
    """The tensor, which all ranks have; its gradient is the sum of theirs.

    Args:
        tensor: the same on all ranks.
        groups: names of process groups, with commas between them; sums over one after the other.
    """
    return _SumGradient.apply(tensor, groups) if groups else tensor


def sum_over_all(tensor: Tensor, groups: str) -> Tensor:
    """The sum of a tensor over the ranks of several groups."""
    for group in groups.split(","):
        tensor = collectives.sum_over(tensor, group)
    return tensor


def shared_seed(seed: Tensor, groups: str) -> Tensor:
    """The seed of the first rank, on all ranks of some groups."""
    for group in groups.split(","):
        seed = collectives.from_first(seed, group)
    return seed


def with_summed_gradients(
    score_mod: Callable[..., Tensor], query: Tensor, groups: str
) -> Callable[..., Tensor]:
    """A score_mod of eager calls whose captured tensors have their gradients summed.

    Captured is whatever needs a gradient and does not come from the mod's own inputs, be it held
    by a closure, a module, an object or a global name.

    Args:
        score_mod: (score, b, h, q_idx, kv_idx) -> score.
        query: of the call.
        groups: as for sum_gradient.
    """
    finder = _Finder()
    inputs = score_examples(query.device, query.dtype)
    with IndexMode(), finder:
        score_mod(*inputs)
    replaced = {id(t): (t, sum_gradient(t, groups)) for t in finder.found}
    if not replaced:
        return score_mod
    mode = _Replace(replaced)

    def summed(*inputs: Tensor) -> Tensor:
        with mode:
            return score_mod(*inputs)

    return summed


def with_local_captures(mod: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Any:
    """A mod of eager calls whose captured DTensors are whole tensors of the rank.

    A DTensor and a plain index cannot meet. Their gradients are those of replicated tensors, so
    whoever needs a sum over ranks takes it as of any other captured tensor.

    Args:
        mod: a score_mod or a mask_mod.
        inputs: examples of what it is called with.
    """
    mode = _Localize()
    with IndexMode(), mode:
        mod(*inputs)
    if not mode.local:
        return mod

    def localized(*inputs: Tensor) -> Tensor:
        with mode:
            return mod(*inputs)

    return localized


class _Localize(TorchFunctionMode):
    """Puts whole local tensors in the place of DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.local: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with the operands replaced."""
        if not any(map(dtensors.is_dtensor, _tensors((args, kwargs)))):
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(Tensor, self._other, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _other(self, tensor: Tensor) -> Tensor:
        if not dtensors.is_dtensor(tensor):
            return tensor
        if id(tensor) not in self.local:
            self.local[id(tensor)] = (tensor, dtensors.whole_part(tensor))
        return self.local[id(tensor)][1]


class _Finder(TorchFunctionMode):
    """Remembers tensors that need a gradient and that no call under the mode made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        self.made: list[Tensor] = []  # kept, so that no other object gets their ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the operands of a call, then at its results."""
        known = {id(t) for t in (*self.found, *self.made)}
        for tensor in _tensors((args, kwargs)):
            if tensor.requires_grad and id(tensor) not in known:
                self.found.append(tensor)
        result = func(*args, **(kwargs or {}))
        self.made += _tensors(result)
        return result


class _Replace(TorchFunctionMode):
    """Puts other tensors in the place of some, by identity."""

    def __init__(self, replaced: dict[int, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.replaced = replaced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with the operands replaced."""

        def other(tensor: Tensor) -> Tensor:
            return self.replaced[id(tensor)][1] if id(tensor) in self.replaced else tensor

        args, kwargs = pytree.tree_map_only(Tensor, other, (args, kwargs or {}))
        return func(*args, **kwargs)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
