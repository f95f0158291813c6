"""torch.vmap of the operators: fold the mapped dimension into the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexhop.compat.compilation import is_marked, keeping, mark
from flexhop.errors import VmapError
from flexhop.ops.args import BackwardArgs, DerivativeArgs
from flexhop.ops.derivatives.program import KEY, VALUE, capture_position
from flexhop.ops.derivatives.reference import signature_of
from flexhop.ops.graphs.subgraphs import trace_joint

Unfold = Callable[[Sequence[Tensor]], list[tuple[Tensor, bool]]]


def into_batch(
    tensors: Sequence[Tensor], is_mapped: Sequence[Any], count: int, batch: int
) -> tuple[Tensor, ...]:
    """Fold tensors of one batch size, such as key and value, which keep one batch size.

    [count, batch or 1, ...] or [batch or 1, ...] -> [count * batch, ...]; [1, ...] if all of them
    are shared.
    """
    if not any(is_mapped) and all(t.size(0) == 1 for t in tensors):
        return tuple(tensors)
    pairs = zip(tensors, is_mapped, strict=True)
    return tuple(each_batch(tensor, bool(flag), count, batch) for tensor, flag in pairs)


def each_batch(tensor: Tensor, is_mapped: bool, count: int, batch: int) -> Tensor:
    """[count, batch or 1, ...] or [batch or 1, ...] -> [count * batch, ...]."""
    each = tensor if is_mapped else tensor.expand(count, *tensor.shape)
    return each.expand(count, batch, *each.shape[2:]).flatten(0, 1)


def batch_captures(batch: Any) -> tuple[Any, ...]:
    """What mods capture besides, last: the number of batches, if it is a symbol.

    The graph of a mod knows no symbols but those of its inputs.
    """
    return (batch,) if isinstance(batch, torch.SymInt) else ()


def unfolded_mod(mod: Any, leading: int, batch: Any, is_mapped: tuple[Any, ...]) -> Any:
    """A mod that sees the batch index and its entries of mapped captures as before folding.

    It has the captures of `batch_captures` besides.
    """
    known = None if batch_captures(batch) else batch
    key = (unfolded_mod, leading, known, is_mapped)
    return keeping(key, mod, lambda: _unfolded(mod, leading, known, is_mapped))


def _unfolded(mod: Any, leading: int, known: int | None, is_mapped: tuple[Any, ...]) -> Any:
    def unfolded(*inputs: Any) -> Tensor:
        score, (b, *index), captures = (
            inputs[:leading], inputs[leading : leading + 4], inputs[leading + 4 :]
        )  # fmt: skip
        *captures, batch = (*captures, known) if known is not None else captures
        own = (c[b // batch] if m is True else c for c, m in zip(captures, is_mapped, strict=True))
        return mod(*score, b % batch, *index, *own)

    return mark(unfolded) if is_marked(mod) else unfolded


class _Fold:
    """One mapped dimension of a call whose results differ along it."""

    def __init__(self, count: int, batch: int, kv_batch: int) -> None:
        self.count, self.batch, self.kv_batch = count, batch, kv_batch

    def each(self, tensor: Tensor, is_mapped: bool) -> Tensor:
        """[count, ...], with or without the dimension before."""
        return tensor if is_mapped else tensor.expand(self.count, *tensor.shape)

    def rows(self, tensor: Tensor, is_mapped: bool) -> Tensor:
        """[count * batch, ...], also of shared values."""
        return each_batch(tensor, is_mapped, self.count, self.batch)

    def unfold(self, result: Tensor, name: str) -> Tensor:
        """Unfold a result that is like the value of that name: [count, ...]."""
        if capture_position(name) is not None:
            return result
        result = result.unflatten(0, (self.count, self.batch))
        is_shared = name in (KEY, VALUE) and self.kv_batch == 1 and self.batch != 1
        return result.sum(1, keepdim=True) if is_shared else result


def _fold_of(count: int, args: Any, is_mapped: Any) -> _Fold:
    if args.dropout_seed:
        raise VmapError(argument="the dropout of flex_attention")
    sizes = (t.size(1 if flag else 0) for t, flag in zip(args[:2], is_mapped[:2], strict=True))
    return _Fold(count, *sizes)


def fold_derivative(count: int, mapped: Any, operands: Any) -> tuple[DerivativeArgs, Unfold]:
    """A derivative; see hop.register_vmap."""
    args, is_mapped = DerivativeArgs(*operands), DerivativeArgs(*mapped)
    fold, names = _fold_of(count, args, is_mapped), signature_of(args)
    first = 3 + len(args.score_captures)
    differentiated = {*names.outputs, *names.inputs[first:]}
    flags = tuple(
        flag is True or name in differentiated
        for flag, name in zip(is_mapped.score_captures, names.inputs[3:first], strict=True)
    )
    captures = tuple(
        fold.each(c, m is True) if flag else c
        for c, m, flag in zip(args.score_captures, is_mapped.score_captures, flags, strict=True)
    )
    captures = (*captures, *batch_captures(fold.batch))
    directions = tuple(
        (fold.rows if capture_position(name) is None else fold.each)(tensor, bool(flag))
        for tensor, flag, name in zip(
            args.directions, is_mapped.directions, names.inputs[first:], strict=True
        )
    )
    folded = args._replace(
        **_common(fold, args, is_mapped, flags), directions=directions, score_captures=captures
    )

    def unfold(results: Sequence[Tensor]) -> list[tuple[Tensor, bool]]:
        pairs = zip(results, names.outputs, strict=True)
        return [(fold.unfold(result, name), True) for result, name in pairs]

    return folded, unfold


def _common(fold: _Fold, args: Any, is_mapped: Any, flags: tuple[bool, ...]) -> dict[str, Any]:
    """Operands that both operators share."""
    query, key, value = map(fold.rows, args[:3], map(bool, is_mapped[:3]))
    return {
        "query": query,
        "key": key,
        "value": value,
        "blocks": into_batch(args.blocks, is_mapped.blocks, fold.count, fold.batch),
        "score_mod": unfolded_mod(args.score_mod, 1, fold.batch, flags),
        "mask_mod": unfolded_mod(args.mask_mod, 0, fold.batch, is_mapped.mask_captures),
        "mask_captures": (*args.mask_captures, *batch_captures(fold.batch)),
    }


def fold_backward(count: int, mapped: Any, operands: Any) -> tuple[BackwardArgs, Unfold]:
    """The backward pass, whose joint graph is traced again; see hop.register_vmap."""
    args, is_mapped = BackwardArgs(*operands), BackwardArgs(*mapped)
    fold, wanted = _fold_of(count, args, is_mapped), set(args.sites[::2])
    flags = tuple(flag is True or i in wanted for i, flag in enumerate(is_mapped.score_captures))
    captures = tuple(
        fold.each(c, m is True) if flag else c
        for c, m, flag in zip(args.score_captures, is_mapped.score_captures, flags, strict=True)
    )
    captures = (*captures, *batch_captures(fold.batch))
    common = _common(fold, args, is_mapped, flags)
    needs = tuple(i in wanted for i in range(len(captures)))
    joint = trace_joint(common["score_mod"], common["query"], captures, needs)
    rows = {
        name: fold.rows(getattr(args, name), bool(getattr(is_mapped, name)))
        for name in ("out", "lse", "grad_out", "grad_lse")
        if getattr(args, name) is not None
    }
    common |= rows | {"score_mod": joint.score_mod, "score_captures": joint.captures}
    folded = args._replace(**common, joint=joint.joint, sites=joint.sites)

    def unfold(results: Sequence[Tensor]) -> list[tuple[Tensor, bool]]:
        *grads, captured = results
        names = ("query", KEY, VALUE)
        dense = [fold.unfold(grad, name) for grad, name in zip(grads, names, strict=True)]
        return [(tensor, True) for tensor in (*dense, *captured)]

    return folded, unfold
