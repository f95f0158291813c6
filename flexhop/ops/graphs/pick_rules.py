"""How elements of a computed tensor follow from elements of its operands; see picks.py.

A rule writes elements of an operator's result. It returns None if that takes all of its operand.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx

aten = torch.ops.aten
Picks = tuple[Any, ...]  # for each dimension: a node of a 0-d index, a number, or None for all


class Picker(Protocol):
    """Writes nodes: `_Picker` of picks.py."""

    def __call__(self, source: fx.Node, picks: Sequence[Any]) -> fx.Node:
        """The elements of a tensor."""
        ...

    def call(self, target: Any, *args: Any, **options: Any) -> fx.Node:
        """A new node."""
        ...


Rule = Callable[[Picker, fx.Node, Picks], "fx.Node | None"]


def picked(node: fx.Node) -> tuple[fx.Node | None, Picks]:
    """The tensor that a node reads elements of, and which; None for other nodes."""
    if node.target is aten.select.int or _is_unbound(node):
        source, dim, place = _taken(node)
        shape = source.meta["val"].shape
        if not isinstance(place, int):
            return None, ()
        dim %= len(shape)
        return source, tuple(place if d == dim else None for d in range(len(shape)))
    if node.target is aten.index.Tensor:
        source, indices = cast("tuple[fx.Node, Sequence[fx.Node | None]]", node.args)
        if all(index is None or _is_place(index) for index in indices):
            rest = source.meta["val"].dim() - len(indices)
            return source, (*map(_plain, indices), *[None] * rest)
    return None, ()


def _is_unbound(node: fx.Node) -> bool:
    """Whether a node is one of the results of `x.unbind(dim)`."""
    of = node.args[0] if node.target is operator.getitem else None
    return isinstance(of, fx.Node) and of.target is aten.unbind.int


def _taken(node: fx.Node) -> tuple[fx.Node, int, Any]:
    """Source, dimension and place of a node that takes one part of a tensor."""
    if node.target is aten.select.int:
        return cast("tuple[fx.Node, int, Any]", node.args)
    unbound, place = cast("tuple[fx.Node, Any]", node.args)
    source, *dims = cast("tuple[fx.Node, Any]", unbound.args)
    return source, dims[0] if dims else 0, place


def _plain(index: fx.Node | None) -> Any:
    """An index, as a number if it is one."""
    if index is None or index.target is not aten.full.default or index.args[0]:
        return index
    return index.args[1] if type(index.args[1]) is int else index


def _is_place(index: fx.Node) -> bool:
    value = index.meta["val"]
    return value.dim() == 0 and value.dtype != torch.bool


def elementwise(pick: Picker, node: fx.Node, picks: Picks) -> fx.Node | None:
    """Functions of elements, with operands that are broadcast."""
    if not _promotes_alike(node):
        return None

    def own(operand: fx.Node) -> fx.Node:
        value = operand.meta.get("val")
        if not isinstance(value, Tensor) or not value.dim():
            return operand
        return pick(operand, _of_broadcast(picks, value.shape))

    args, options = fx.map_arg(node.args, own), dict(fx.map_arg(node.kwargs, own))
    options.pop("memory_format", None)
    return pick.call(node.target, *cast("Any", args), **options)


def _promotes_alike(node: fx.Node) -> bool:
    """Whether an operator computes with elements in the dtype in which it computes with rows.

    A row decides over a number of its kind: float16 for a row of float16 and a float32.
    """
    values = [n.meta.get("val") for n in node.all_input_nodes]
    dtypes = {value.dtype for value in values if isinstance(value, Tensor)} - {torch.bool}
    floats = {dtype for dtype in dtypes if dtype.is_floating_point}
    return len(floats or dtypes) <= 1


def _unsqueezed(pick: Picker, node: fx.Node, picks: Picks) -> fx.Node:
    source, dim = cast("tuple[fx.Node, int]", node.args)
    dim %= len(picks)
    found = pick(source, picks[:dim] + picks[dim + 1 :])
    if picks[dim] is not None:
        return found
    return pick.call(aten.unsqueeze.default, found, sum(p is None for p in picks[:dim]))


def _permuted(order: Callable[[fx.Node], Sequence[int]]) -> Rule:
    """Of an operator whose dimension d is dimension order[d] of its operand."""

    def rule(pick: Picker, node: fx.Node, picks: Picks) -> fx.Node:
        source = cast("fx.Node", node.args[0])
        dims = [dim % len(picks) for dim in order(node)]
        own = [picks[dims.index(d)] for d in range(len(dims))]
        found = pick(source, own)
        left = [d for d in dims if own[d] is None]
        if left == sorted(left):
            return found
        return pick.call(aten.permute.default, found, [sorted(left).index(d) for d in left])

    return rule


def _swapped(node: fx.Node) -> Sequence[int]:
    count = node.meta["val"].dim()
    order = list(range(count))
    first, second = cast("tuple[int, int]", node.args[1:3] if len(node.args) > 1 else (0, 1))
    if count > 1:
        order[first], order[second] = order[second], order[first]
    return order


def _expanded(pick: Picker, node: fx.Node, picks: Picks) -> fx.Node:
    source = cast("fx.Node", node.args[0])
    sizes = node.meta["val"].shape
    found = pick(source, _of_broadcast(picks, source.meta["val"].shape))
    left = [size for size, p in zip(sizes, picks, strict=True) if p is None]
    return pick.call(aten.expand.default, found, left) if left else found


def _of_broadcast(picks: Picks, shape: Sequence[int]) -> Picks:
    """The picks of an operand whose dimensions of one element stand for all."""
    last = picks[len(picks) - len(shape) :]
    return tuple(0 if p is not None and n == 1 else p for p, n in zip(last, shape, strict=True))


def _viewed(pick: Picker, node: fx.Node, picks: Picks) -> fx.Node | None:
    """Views that keep the dimensions that are picked."""
    source = cast("fx.Node", node.args[0])
    before, after = source.meta["val"].shape, node.meta["val"].shape
    own: list[Any] = [None] * len(before)
    for dim, chosen in enumerate(picks):
        if chosen is None or after[dim] == 1:
            continue
        place = _kept(before, after, dim)
        if place is None:
            return None
        own[place] = chosen
    # Of dimensions of one element, it does not matter which are kept.
    found = pick(source, own)
    left = [size for size, p in zip(after, picks, strict=True) if p is None]
    if list(found.meta["val"].shape) == left:
        return found
    return pick.call(aten.reshape.default, found, left)


def _kept(before: Sequence[int], after: Sequence[int], dim: int) -> int | None:
    """The dimension of a tensor that is dimension `dim` of a view."""
    elements = torch.Size(after[:dim]).numel()
    for place, size in enumerate(before):
        if torch.Size(before[:place]).numel() == elements and size == after[dim]:
            return place
    return None


def _selected(pick: Picker, node: fx.Node, picks: Picks) -> fx.Node | None:
    source, own = picked(node)
    if source is None:
        return None
    rest = iter(picks)
    return pick(source, [next(rest) if p is None else p for p in own])


def _indexed(pick: Picker, node: fx.Node, picks: Picks) -> fx.Node | None:
    """A read of leading dimensions: of one element, or of several of which one is read."""
    source, indices = cast("tuple[fx.Node, Sequence[fx.Node | None]]", node.args)
    if any(index is None or index.meta["val"].dtype == torch.bool for index in indices):
        return None
    places = cast("Sequence[fx.Node]", indices)
    width = max(index.meta["val"].dim() for index in places)
    if any(p is None for p in picks[:width]):
        return None
    own = []
    for index in places:
        own.append(pick(index, _of_broadcast(picks[:width], index.meta["val"].shape)))
    return pick(source, (*own, *picks[width:]))


def _product(pick: Picker, node: fx.Node, picks: Picks) -> fx.Node:
    """Of matrices, batches of them, and vectors."""
    left, right = cast("tuple[fx.Node, fx.Node]", node.args[:2])
    return _product_of(pick, left, right, picks, node.meta["val"].dtype)


def _product_of(
    pick: Picker, left: fx.Node, right: fx.Node, picks: Picks, dtype: torch.dtype
) -> fx.Node:
    """left [*batch, m, k] times right [*batch, k, n] or [k]; in fp32 if operands have 16 bits."""
    rank = right.meta["val"].dim()
    batch = max(rank - 2, 0)
    row, column = picks[batch], picks[-1] if rank > 1 else 0
    first = pick(left, (*picks[: batch + 1], None))
    second = pick(right, (*picks[:batch], None, column)) if rank > 1 else right
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    if wide != dtype:
        first, second = (pick.call(aten._to_copy.default, n, dtype=wide) for n in (first, second))
    if column is None:
        first = pick.call(aten.unsqueeze.default, first, -1)
    if row is None:
        second = pick.call(aten.unsqueeze.default, second, -2 if column is not None else -3)
    terms = pick.call(aten.mul.Tensor, first, second)
    options = {} if wide.is_floating_point else {"dtype": wide}  # sums of integers have int64
    summed = [-1 if column is not None else -2]
    total = pick.call(aten.sum.dim_IntList, terms, summed, **options)
    return total if wide == dtype else pick.call(aten._to_copy.default, total, dtype=dtype)


def _added_product(pick: Picker, node: fx.Node, picks: Picks) -> fx.Node | None:
    start, left, right = cast("tuple[fx.Node, fx.Node, fx.Node]", node.args[:3])
    dtype = node.meta["val"].dtype
    if any(n.meta["val"].dtype != dtype for n in (start, left, right)):
        return None
    product = _product_of(pick, left, right, picks, dtype)
    added = pick(start, _of_broadcast(picks, start.meta["val"].shape))
    beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))
    if beta != 1:
        added = pick.call(aten.mul.Tensor, added, beta)
    return pick.call(aten.add.Tensor, added, product, alpha=alpha)


def _reduced(pick: Picker, node: fx.Node, picks: Picks) -> fx.Node | None:
    """Operators that reduce dimensions to one number, of which others are picked."""
    source = cast("fx.Node", node.args[0])
    given = _arguments(node)
    dims, keeps = given.get("dim"), bool(given.get("keepdim", False))
    count = source.meta["val"].dim()
    if dims is None or dims == []:
        return None
    reduced = sorted(d % count for d in (dims if isinstance(dims, (list, tuple)) else [dims]))
    dropped = [keeps and picks[d] is not None for d in reduced]
    if len(set(dropped)) > 1:
        return None
    rest = iter(picks)
    asked = [next(rest) if keeps or d not in reduced else None for d in range(count)]
    own = [None if d in reduced else p for d, p in enumerate(asked)]
    left = [d for d in range(count) if own[d] is None]
    places = [left.index(d) for d in reduced]
    changed = {"dim": places if isinstance(dims, (list, tuple)) else places[0]}
    if keeps and all(dropped):
        changed["keepdim"] = False
    args, options = _changed(node, changed)
    return pick.call(node.target, pick(source, own), *args[1:], **options)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by name."""
    return dict(zip(_names(node), node.args, strict=False)) | node.kwargs


def _changed(node: fx.Node, changes: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of an operator, with others for some names."""
    named = zip(_names(node), node.args, strict=False)
    args = [changes.get(name, value) for name, value in named]
    return args, {name: changes.get(name, value) for name, value in node.kwargs.items()}


def _names(node: fx.Node) -> list[str]:
    return [argument.name for argument in cast("Any", node.target)._schema.arguments]


def _along(pick: Picker, node: fx.Node, picks: Picks) -> fx.Node | None:
    """Operators along one dimension, which keep it: softmax, sums so far."""
    source, dim, *more = cast("tuple[fx.Node, int, Any]", node.args)
    dim %= len(picks)
    others = tuple(None if d == dim else p for d, p in enumerate(picks))
    if picks[dim] is not None and not any(p is not None for p in others):
        return None
    place = sum(p is None for p in picks[:dim])
    found = pick.call(node.target, pick(source, others), place, *more, **node.kwargs)
    kept = [None] * found.meta["val"].dim()
    return pick(found, [*kept[:place], picks[dim], *kept[place + 1 :]])


def _stacked(pick: Picker, node: fx.Node, picks: Picks) -> fx.Node | None:
    parts, *rest = cast("tuple[Sequence[fx.Node], Any]", node.args)
    dim = (rest[0] if rest else 0) % len(picks)
    own = picks[:dim] + picks[dim + 1 :]
    if isinstance(picks[dim], int):
        return pick(parts[picks[dim]], own)
    if picks[dim] is not None:
        return None
    found = [pick(part, own) for part in parts]
    return pick.call(aten.stack.default, found, sum(p is None for p in picks[:dim]))


def _concatenated(pick: Picker, node: fx.Node, picks: Picks) -> fx.Node | None:
    parts, *rest = cast("tuple[Sequence[fx.Node], Any]", node.args)
    dim = (rest[0] if rest else 0) % len(picks)
    if any(part.meta["val"].dim() != len(picks) for part in parts):
        return None  # an old rule of PyTorch: empty rows of any shape
    if picks[dim] is None:
        found = [pick(part, picks) for part in parts]
        return pick.call(aten.cat.default, found, sum(p is None for p in picks[:dim]))
    if not isinstance(picks[dim], int):
        return None
    place = picks[dim]
    for part in parts:
        size = part.meta["val"].size(dim)
        if place < size:
            return pick(part, (*picks[:dim], place, *picks[dim + 1 :]))
        place -= size
    return None


_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default,
          aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)  # fmt: skip
_SAME = (aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default,
         aten.lift_fresh_copy.default, torch.ops.prims.convert_element_type.default)  # fmt: skip
_REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default,
               aten.prod.dim_int, aten.any.dim, aten.all.dim, aten.any.dims, aten.all.dims,
               aten.var.correction, aten.logsumexp.default,
               aten.linalg_vector_norm.default)  # fmt: skip
RULES: dict[Any, Rule] = {
    **dict.fromkeys(_SAME, elementwise),
    **dict.fromkeys(_VIEWS, _viewed),
    **dict.fromkeys(_REDUCTIONS, _reduced),
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten.mv.default), _product),
    **dict.fromkeys((aten.addmm.default, aten.baddbmm.default, aten.addmv.default),
                    _added_product),
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default, aten.cumsum.default),
                    _along),
    aten.unsqueeze.default: _unsqueezed,
    aten.permute.default: _permuted(lambda node: cast("Any", node.args[1])),
    aten.transpose.int: _permuted(_swapped),
    aten.t.default: _permuted(_swapped),
    aten.expand.default: _expanded,
    aten.select.int: _selected,
    aten.index.Tensor: _indexed,
    aten.stack.default: _stacked,
    aten.cat.default: _concatenated,
}  # fmt: skip
