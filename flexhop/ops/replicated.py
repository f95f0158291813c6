"""What entry points know of flexhop.distributed: its active context, and replicated tensors.

The room that fills the slot of the context is above this one. Gradients of replicated captured
tensors are summed over a mesh: compiled calls sum those that the backward operator returns
(ops/forward.py); in eager calls autograd differentiates, so captured tensors are replaced while a
mod runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexhop.compat import collectives, dtensors
from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.operators.hop import pytree
from flexhop.ops.args import AttentionArgs, score_examples
from flexhop.ops.call import Call


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, groups: str) -> Tensor:
        ctx.groups = groups
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch: *grad_outputs
        return sum_over_all(grad, ctx.groups), None


def sum_gradient(tensor: Tensor, groups: str) -> Tensor:
    """A replicated tensor, whose gradient is summed over all ranks.

    Args:
        tensor: the same on all ranks.
        groups: comma-separated names of process groups; sums over one after the other.
    """
    return _SumGradient.apply(tensor, groups) if groups else tensor


def sum_over_all(tensor: Tensor, groups: str) -> Tensor:
    """The sum of a tensor over the ranks of several groups."""
    for group in groups.split(","):
        tensor = collectives.sum_over(tensor, group)
    return tensor


def shared_seed(seed: Tensor, groups: str) -> Tensor:
    """The first rank's seed, on all ranks of some groups."""
    for group in groups.split(","):
        seed = collectives.from_first(seed, group)
    return seed


def with_summed_gradients(
    score_mod: Callable[..., Tensor], query: Tensor, groups: str
) -> Callable[..., Tensor]:
    """A score_mod for eager calls whose captured tensors have their gradients summed.

    A captured tensor is one that needs a gradient and does not come from the mod's own inputs. A
    closure, a module, an object or a global may hold it.

    Args:
        score_mod: (score, b, h, q_idx, kv_idx) -> score.
        query: the call's query.
        groups: see sum_gradient.
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
    """A mod for eager calls whose captured DTensors become the rank's whole local tensors.

    A DTensor cannot be indexed with a plain tensor. Their gradients are those of replicated
    tensors; callers sum them over ranks like those of any captured tensor.

    Args:
        mod: a score_mod or a mask_mod.
        inputs: example arguments.
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
    """Replaces DTensors by whole local tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.local: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with replaced operands."""
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
    """Collects tensors that need a gradient and that no call under the mode created."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        self.made: list[Tensor] = []  # kept alive, so that ids stay unique

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Inspect a call's operands, then its results."""
        known = {id(t) for t in (*self.found, *self.made)}
        for tensor in _tensors((args, kwargs)):
            if tensor.requires_grad and id(tensor) not in known:
                self.found.append(tensor)
        result = func(*args, **(kwargs or {}))
        self.made += _tensors(result)
        return result


class _Replace(TorchFunctionMode):
    """Replaces some tensors, by identity."""

    def __init__(self, replaced: dict[int, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.replaced = replaced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with replaced operands."""

        def other(tensor: Tensor) -> Tensor:
            return self.replaced[id(tensor)][1] if id(tensor) in self.replaced else tensor

        args, kwargs = pytree.tree_map_only(Tensor, other, (args, kwargs or {}))
        return func(*args, **kwargs)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


VIEW = "flexhop_view"  # attribute of masks and offsets for which an active context has a view


class Context(Protocol):
    """The interface of a context to the entry points."""

    def run(
        self, args: AttentionArgs, call: Call, block_mask: Any, wants_lse: bool
    ) -> tuple[Tensor, Any, Tensor]:
        """Attention of one rank's queries to all keys; lse only if it is used."""
        ...

    def packed(self, packing: Any, mask_mod: Any) -> tuple[Any, Any]:
        """Row tables and a mask for packed sequences of the whole batch."""
        ...

    def sum_gradient(self, tensor: Tensor) -> Tensor:
        """The tensor, with its gradient summed over the mesh."""
        ...

    def seed(self, dropout: Any, query: Tensor) -> tuple[Tensor, ...]:
        """The dropout operand, the same on all ranks; () without dropout."""
        ...


class Slot:
    """Holds the active context, if there is one.

    attend_dtensors: how entry points handle DTensors; set by the plugin.
    """

    current: Context | None = None
    attend_dtensors: Callable[..., Any]


SLOT = Slot()


def view_of(block_mask: Any) -> Any:
    """The active context's view of a mask, or None.

    FSDP rebuilds the arguments of a layer, including masks, but keeps their tensors. The view is
    therefore also stored on one of them.
    """
    found = getattr(block_mask, VIEW, None)
    return (
        found
        if found is not None
        else getattr(getattr(block_mask, "kv_num_blocks", None), VIEW, None)
    )
