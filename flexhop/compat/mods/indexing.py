"""Index captured tensors with 0-d tensors: traceable, and without a host synchronisation.

`table[h, q_idx - kv_idx]` inside a mod indexes with 0-d tensors, which plain `Tensor.__getitem__`
turns into `.item()`. `IndexMode` rewrites such reads to `aten.index`, which tracing, vmap and
autograd all support; a graph that is run again already contains it. Slices, `...` and `None` may
be mixed in. `torch.take` and `nn.Embedding` (without `max_norm`) are such reads, too.
`torch.isin`, `bucketize`, `searchsorted` and `one_hot` of one number become reads and comparisons.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexhop.compat.mods.places import is_close, is_in, place_among
from flexhop.compat.operators import vmapped

aten = torch.ops.aten
WHOLE = slice(None)


def _is_index_tensor(item: object) -> bool:
    return isinstance(item, Tensor) and not item.is_floating_point() and not item.is_complex()


def _is_place(item: object) -> bool:
    return _is_index_tensor(item) and isinstance(item, Tensor) and item.dim() == 0


def _is_plain_embedding(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether F.embedding(place, table, padding_idx, max_norm, ...) only reads a row."""
    if len(args) < 2 or not _is_place(args[0]):
        return False
    return _of_embedding(args, options).get("max_norm") is None


def _of_embedding(args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The options of F.embedding by name."""
    return {**dict(zip(("padding_idx", "max_norm"), args[2:], strict=False)), **options}


def _embedded(place: Tensor, table: Tensor, padding: int | None) -> Tensor:
    """A row of a table, without a gradient for the row `padding`."""
    row = _read(table, [place])
    if padding is None:
        return row
    padding = padding + table.size(0) if padding < 0 else padding
    return torch.where(place == padding, row.detach(), row)


def _is_int(item: object) -> bool:
    return isinstance(item, (int, torch.SymInt)) and not isinstance(item, bool)


def _is_view(item: object) -> bool:
    """Whether an item of an index keeps or adds a dimension."""
    return item is None or item is Ellipsis or isinstance(item, slice)


def _is_rewritten(items: tuple[Any, ...]) -> bool:
    """Whether an index contains a tensor, and otherwise only items that `_read` supports."""
    tensors = [item for item in items if _is_index_tensor(item)]
    others = [item for item in items if not _is_index_tensor(item)]
    if any(_is_view(item) for item in others) and any(item.dim() > 0 for item in tensors):
        return False  # PyTorch defines where the dimensions of several index tensors go
    return len(tensors) > 0 and all(_is_int(item) or _is_view(item) for item in others)


def _spell_out(items: tuple[Any, ...], rank: int) -> list[Any]:
    """`items` with the slices that `...` stands for."""
    named = sum(item is not None and item is not Ellipsis for item in items)
    spelled: list[Any] = []
    for item in items:
        spelled += [WHOLE] * (rank - named) if item is Ellipsis else [item]
    return spelled


def _read(tensor: Tensor, items: list[Any]) -> Tensor:
    """tensor[items] for integer tensors, ints, slices and None.

    Slices and their order depend only on the captured tensor and come before the read: the indexed
    dimensions move to the front, so every read is one of leading dimensions.
    """
    device = next(item.device for item in items if isinstance(item, Tensor))
    of_dims = [item for item in items if item is not None]
    indexed = [dim for dim, item in enumerate(of_dims) if not isinstance(item, slice)]
    for dim, item in enumerate(of_dims):
        if isinstance(item, slice) and item != WHOLE:
            tensor = tensor[(*[WHOLE] * dim, item)]
    if indexed != list(range(len(indexed))):
        tensor = tensor.movedim(indexed, list(range(len(indexed))))
    indices = [
        torch.full((), item, dtype=torch.int32, device=device) if _is_int(item) else item
        for item in (of_dims[dim] for dim in indexed)
    ]
    read = vmapped.index(tensor, indices)
    for axis, item in enumerate(item for item in items if _is_view(item)):
        if item is None:
            read = read.unsqueeze(axis)
    return read


def is_placed(tensor: Tensor, items: tuple[Any, ...]) -> bool:
    """Whether `tensor[items] = value` writes where 0-d tensors say; see `put`."""
    if len(items) == 1 and isinstance(items[0], Tensor) and items[0].dtype == torch.bool:
        return items[0].shape == tensor.shape
    return any(map(_is_place, items)) and all(_is_place(i) or _is_int(i) for i in items)


def put(tensor: Tensor, items: tuple[Any, ...], value: Any) -> Tensor:
    """A copy of `tensor` with a value at `items`, for which `is_placed` holds."""
    at: Any = items[0]
    if not (isinstance(at, Tensor) and at.dtype == torch.bool):
        at = torch.ones((), dtype=torch.bool, device=tensor.device)
        for dim, item in enumerate(items):
            size = tensor.size(dim)
            place = torch.where(item < 0, item + size, item) if isinstance(item, Tensor) else (
                item % size
            )  # fmt: skip
            at = at & vmapped.is_at(place, size, tensor, dim)
    return torch.where(at, value, tensor)


# Functions of two operands, one of which may be a number; operators as Dynamo calls them. By name,
# because Dynamo of 2.13 does not find functions written in Python in a set.
_PAIRS = frozenset([
    "add", "sub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow", "lt",
    "le", "gt", "ge", "eq", "ne", "bitwise_and", "bitwise_or", "bitwise_xor", "__eq__", "__and__",
    "__or__", "__xor__", "__floordiv__", "__rfloordiv__", "__rdiv__", "__rmod__", "__rsub__",
    "__rpow__",
])  # fmt: skip


def _without_numbers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands of a two-operand function, with a number replaced by a tensor.

    2.11 to 2.15: the batching rules of a tensor and a number that is a symbol (a captured int or
    float, under dynamic shapes) fail if dtypes are promoted. Dynamo cannot say which numbers are
    symbols. Sums become tensors without a guard on the number; other functions of numbers do not.
    """
    first, second = args
    if isinstance(first, Tensor) and not isinstance(second, Tensor):
        return first, _as_tensor(second, first)
    if isinstance(second, Tensor) and not isinstance(first, Tensor):
        return _as_tensor(first, second), second
    return args


def _as_tensor(number: Any, beside: Tensor) -> Any:
    """A number as a tensor in the dtype that it has beside another one."""
    dtype = beside.dtype
    if isinstance(number, bool):
        return number
    if isinstance(number, float) and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    elif dtype == torch.bool:
        dtype = torch.int64
    return torch.zeros((), dtype=dtype, device=beside.device) + number


_LOG_SIGMOIDS = (
    aten.log_sigmoid_forward.default, aten.log_sigmoid.default,
    torch.nn.functional.logsigmoid,
)  # fmt: skip


def _without_symbol(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A call with a symbol for an operand, with a tensor instead if the function has two operands.

    Not an overload for numbers, such as aten.remainder.Scalar.
    """
    function = getattr(func, "overloadpacket", func)
    return (function, _without_numbers(args)) if function.__name__ in _PAIRS else (func, args)


def _rewritten(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The result of a read or write at one place, or of `out=`; or None."""
    if func is torch.Tensor.__getitem__:
        tensor, items = args
        items = items if isinstance(items, tuple) else (items,)
        if tensor.dim() == 0 and items in ((), (Ellipsis,)):
            return tensor
        if _is_rewritten(items):
            return _read(tensor, _spell_out(items, tensor.dim()))
    elif func is torch.Tensor.__setitem__:
        tensor, items, value = args
        items = items if isinstance(items, tuple) else (items,)
        if is_placed(tensor, items):
            return tensor.copy_(put(tensor, items, value))
    elif options.get("out") is not None and isinstance(options["out"], Tensor):
        # 2.11 to 2.15: refused if a gradient is needed.
        found = func(*args, **{name: v for name, v in options.items() if name != "out"})
        return options["out"].copy_(found)
    elif (func is torch.isclose or func is torch.Tensor.isclose) and _are_signed(args):
        return is_close(*args, **options)
    elif func is torch.isin or func is torch.bucketize or func is torch.searchsorted:
        return _placed(func, args, options)
    else:
        return _read_by_name(func, args, options)
    return None


def _read_by_name(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What functions with names read at one place; None for other functions."""
    if func is torch.nn.functional.embedding and _is_plain_embedding(args, options):
        return _embedded(args[0], args[1], _of_embedding(args, options).get("padding_idx"))
    if func is torch.unravel_index:
        return _unravelled(*_three(args, options, "indices", "shape"))
    if (func is torch.take or func is torch.Tensor.take) and _is_place(args[1]):
        return _read(args[0].reshape(-1), [args[1]])
    if func is torch.index_select or func is torch.Tensor.index_select:
        return _selected(*_three(args, options, "input", "dim", "index"))
    if func is torch.gather or func is torch.Tensor.gather:
        table, dim, place = _three(args, options, "input", "dim", "index")
        return _from_row(table, dim, place)
    if func is torch.take_along_dim or func is torch.Tensor.take_along_dim:
        table, place, *_ = _three(args, options, "input", "indices")
        return _from_row(table, 0, place)
    if func is torch.nn.functional.one_hot and _is_place(args[0]):
        number, classes = args[0], args[1] if len(args) > 1 else options.get("num_classes", -1)
        if classes >= 0:  # its own check of the number has no batching rule
            return (torch.arange(classes, device=number.device) == number).to(torch.int64)
    return None


def _unravelled(place: Tensor, shape: Any) -> Any:
    """torch.unravel_index, whose own rule puts the sizes into a constant tensor; None if it
    refuses the operands."""
    sizes = [shape] if _is_int(shape) else list(shape)
    if not _is_index_tensor(place) or place.dtype == torch.bool:
        return None
    if not all(_is_int(size) and size > 0 for size in sizes):
        return None
    found, rest = [], place.long()
    for size in reversed(sizes):
        found.append(rest % size)
        rest = rest // size
    return tuple(reversed(found))


def _are_signed(args: tuple[Any, ...]) -> bool:
    """Whether two numbers can be subtracted."""
    return len(args) >= 2 and all(isinstance(a, Tensor) and a.dtype.is_signed for a in args[:2])


def _placed(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor | None:
    """Where a number stands among others; None if more is asked than of one number."""
    if func is torch.isin:
        number, others = _named(args, options, "elements", "test_elements")
        is_one = isinstance(number, Tensor) and number.dim() == 0
        return is_in(number, others, invert=options.get("invert", False)) if is_one else None
    if func is torch.bucketize:
        number, others = _named(args, options, "input", "boundaries")
    else:
        others, number = _named(args, options, "sorted_sequence", "input")
    is_one = isinstance(number, Tensor) and number.dim() == 0 and others.dim() == 1
    if not is_one or options.get("sorter") is not None:
        return None
    right = options.get("right", False) or options.get("side") == "right"
    place = place_among(others, number, right=right)
    return place.to(torch.int32) if options.get("out_int32", False) else place


def _selected(table: Tensor, dim: int, place: Tensor) -> Tensor | None:
    """torch.index_select of one entry, or None of several entries."""
    if not _is_index_tensor(place) or place.numel() != 1:
        return None
    items = [WHOLE] * (dim % table.dim()) + [place.reshape(())]
    read = _read(table, _spell_out((*items, ...), table.dim()))
    return read.unsqueeze(dim % table.dim()) if place.dim() else read


def _from_row(row: Tensor, dim: int, places: Tensor) -> Tensor | None:
    """gather or take_along_dim from a row; None of a matrix."""
    if row.dim() != 1:
        return None
    found = _selected(row, dim, places)
    is_several = found is None and _is_index_tensor(places) and places.dim() == 1
    return vmapped.index(row, [places]) if is_several else found


def _three(args: tuple[Any, ...], options: dict[str, Any], *names: str) -> tuple[Any, ...]:
    """Arguments of a function, given by position or by name."""
    return (*args, *(options[name] for name in names[len(args) :]))


def _named(args: tuple[Any, ...], options: dict[str, Any], *names: str) -> tuple[Any, Any]:
    """The first two arguments of a function, given by position or by name."""
    first = args[0] if args else options[names[0]]
    return first, args[1] if len(args) > 1 else options[names[1]]


_FILLS = (
    torch.index_fill, torch.Tensor.index_fill, aten.index_fill.int_Tensor,
    aten.index_fill.int_Scalar,
)  # fmt: skip
_LOSSES = (
    torch.nn.functional.mse_loss, torch.nn.functional.smooth_l1_loss,
    torch.nn.functional.huber_loss,
)  # fmt: skip
# Functions without a batching rule, or whose rule fails, or whose derivative no kernel computes:
# most are of a few numbers put together.
_WITHOUT_RULES = {
    torch.special.log_ndtr: vmapped.log_ndtr,
    aten.special_log_ndtr.default: vmapped.log_ndtr,
    torch.nn.functional.kl_div: vmapped.kl_div,
    **dict.fromkeys((torch.ldexp, torch.Tensor.ldexp, aten.ldexp.Tensor), vmapped.ldexp),
    **dict.fromkeys((torch.cdist, aten.cdist.default, aten._cdist_forward.default), vmapped.cdist),
    torch.column_stack: vmapped.column_stack,
    **dict.fromkeys(_FILLS, vmapped.index_fill),
    **{function: functools.partial(vmapped.loss, function) for function in _LOSSES},
    **dict.fromkeys((torch.trace, torch.Tensor.trace, aten.trace.default), vmapped.trace),
    aten.cat.default: vmapped.concatenate,
    aten.copy.default: vmapped.copy,
    aten.index_put_.default: vmapped.put,
    aten.index_put.default: vmapped.put,
    aten.select_scatter.default: vmapped.select_scatter,
    aten.slice_scatter.default: vmapped.slice_scatter,
    torch.select_scatter: vmapped.select_scatter,
    torch.Tensor.select_scatter: vmapped.select_scatter,
    torch.ops.prims.rev.default: vmapped.flip,
    **dict.fromkeys(
        (torch.prod, torch.Tensor.prod, aten.prod.default, aten.prod.dim_int),
        vmapped.product,
    ),
}


_OF_ONE_DTYPE = frozenset({
    aten.lerp.Tensor, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default,
    aten.addmm.default, aten.addmv.default, aten.baddbmm.default,
})  # fmt: skip


def of_one_dtype(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Operands of an operator, in the widest of their dtypes if it takes no two of floats.

    Derivatives and tables take captured tensors in a wider one than a graph was traced with.
    """
    if func not in _OF_ONE_DTYPE:
        return args
    dtypes = {a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()}
    if len(dtypes) < 2:
        return args
    wide = functools.reduce(torch.promote_types, dtypes)
    return [a.to(wide) if isinstance(a, Tensor) and a.dtype in dtypes else a for a in args]


class IndexMode(TorchFunctionMode):
    """Rewrite `tensor[i, j, ...]` with 0-d integer tensors among the indices to `aten.index`.

    Under vmap, also in an already rewritten graph, use a read that the batching rule supports. The
    same holds for conversions in such a graph, for short tensors, and for log_sigmoid.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Intercept reads of tables; everything else passes."""
        found = _rewritten(func, args, kwargs or {})
        if found is not None:
            return found
        if func is aten.index.Tensor and all(map(_is_index_tensor, args[1])):
            return vmapped.index(*args)
        if func is torch.ops.prims.convert_element_type.default:
            return vmapped.convert(*args)
        if torch.compiler.is_dynamo_compiling():
            if func.__name__ in _PAIRS:
                args = _without_numbers(args)
        elif func in _WITHOUT_RULES:
            return _WITHOUT_RULES[func](*args, **(kwargs or {}))
        elif len(args) == 2 and vmapped.is_batched_with_symbol(*args):
            func, args = _without_symbol(func, args)
        elif func in _LOG_SIGMOIDS:
            both = vmapped.log_sigmoid(*args, **(kwargs or {}))
            return both if func is aten.log_sigmoid_forward.default else both[0]
        return func(*of_one_dtype(func, args), **(kwargs or {}))
