"""Operators under `torch.vmap`: indexing, conversions, and some whose rules fail."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch._refs
from torch import Tensor
from torch._C import _functorch
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_LARGEST = 1 << 22  # elements of a table that is read in fp32
_converted = ContextVar[dict[int, tuple[Tensor, Tensor]] | None]("_converted", default=None)
_FEW = 16  # numbers whose product is written out
_ORIGIN = "_flexhop_read_from"  # attribute of a row: the tensor and indices that it was read with


def index(tensor: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """`aten.index` of leading dimensions, under any number of vmaps.

    2.11 to 2.15: with fake tensors, an unbatched index must not follow a batched one, or the
    batching rule fails an assertion. Unbatched indices go first, with their dimension.

    Args:
        tensor: has at least one dimension per index.
        indices: one per leading dimension; 0-d if some are batched and some are not.
    """
    # Dynamo knows neither function; it sees no nested batch here.
    is_scalar = all(item.dim() == 0 for item in indices)
    if is_scalar and not torch.compiler.is_dynamo_compiling():
        return _read_again(tensor, indices)
    return _read(tensor, indices)


def _sums_in_16_bits(tensor: Tensor) -> bool:
    """Whether autograd would add up the gradients of many reads of an entry in 16 bits.

    After a few hundred of them, such a sum does not grow any more. Traced functions have sums of
    their own. A large table would take much memory, and few scores read each of its entries.
    """
    is_short = tensor.dtype in (torch.bfloat16, torch.float16)
    if not (is_short and tensor.requires_grad and torch.is_grad_enabled()):
        return False
    return tensor.numel() <= _LARGEST and not _is_traced(tensor)


@contextlib.contextmanager
def in_32_bits_once() -> Iterator[None]:
    """A region in which such a tensor is converted once.

    Its gradient is then one sum in 32 bits, instead of one in 16 bits of those of each read.
    """
    token = _converted.set({})
    try:
        yield
    finally:
        _converted.reset(token)


def _in_32_bits(tensor: Tensor) -> Tensor:
    known = _converted.get()
    if known is None:
        return tensor.float()
    if id(tensor) not in known:
        known[id(tensor)] = tensor, tensor.float()  # the tensor lives as long as its number counts
    return known[id(tensor)][1]


def _is_traced(tensor: Tensor) -> bool:
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return get_proxy_mode() is not None or isinstance(tensor, (FakeTensor, FunctionalTensor))


def _read_again(tensor: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """`index` by 0-d indices. A row that was read before is read with it, `table[b][i]` at once.

    Its own rule for batched rows does not support symbolic sizes.
    """
    source, before = getattr(tensor, _ORIGIN, (tensor, ()))
    place = (*before, *indices)
    if is_batchedtensor(source) or (len(place) > 1 and _are_fake(place)):
        return _select(source, place)
    if _sums_in_16_bits(source):
        read = _read(_in_32_bits(source), place).to(source.dtype)
    else:
        read = _read(source, place)
    if read.dim() > 0:
        setattr(read, _ORIGIN, (source, place))
    return read


def _read(tensor: Tensor, indices: Sequence[Tensor]) -> Tensor:
    batched = [is_batchedtensor(item) for item in indices]
    if any(batched) and not all(batched) and all(item.dim() == 0 for item in indices):
        order = sorted(range(len(indices)), key=batched.__getitem__)
        tensor = tensor.movedim(order, list(range(len(order))))
        indices = [indices[number] for number in order]
    return torch.ops.aten.index.Tensor(tensor, list(indices))


def _are_fake(indices: Sequence[Tensor]) -> bool:
    """Whether indices are batched and fake underneath."""
    if not any(map(is_batchedtensor, indices)):
        return False
    below = [get_unwrapped(item) if is_batchedtensor(item) else item for item in indices]
    return _are_fake(below) or any(isinstance(item, FakeTensor) for item in below)


def _select(tensor: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """The same for a tensor that is itself batched, such as a row that was read before.

    One flat index, because that is a gather, whose rule works on fake tensors.
    """
    count = len(indices)
    sizes = tensor.shape[:count]
    place = torch.zeros_like(indices[0], dtype=torch.int64)
    for item, size in zip(indices, sizes, strict=True):
        place = place * size + item + (item < 0) * size
    rows = tensor.flatten(0, count - 1) if count > 1 else tensor
    if _has_symbols(rows) or _has_symbols(place):
        return torch.ops.aten.index.Tensor(rows, [place])
    return rows.index_select(0, place.reshape(1)).squeeze(0)


def _has_symbols(tensor: Tensor) -> bool:
    """Whether a tensor has symbolic sizes, perhaps in a dimension that a vmap hides."""
    while is_batchedtensor(tensor):
        tensor = get_unwrapped(tensor)
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def is_mapped(value: Any) -> bool:
    """Whether a value is a tensor that a vmap around maps, perhaps inside other transforms."""
    while isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
        if is_batchedtensor(value):
            return True
        value = get_unwrapped(value)
    return False


def is_batched_with_symbol(first: Any, second: Any) -> bool:
    """Whether one operand is a batched 0-d tensor and the other a symbolic int.

    2.11 to 2.15: the batching rules of two operands convert such a number to the tensor's dtype,
    and the conversion of a symbol fails with fake tensors.
    """
    if isinstance(first, torch.SymInt):
        first, second = second, first
    is_pair = isinstance(second, torch.SymInt) and isinstance(first, Tensor)
    return is_pair and first.dim() == 0 and is_mapped(first)


def convert(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`prims.convert_element_type` under any number of vmaps, for which it has no batching rule.

    PyTorch (2.11 to 2.15) would compute element by element, and warn.
    """
    if is_batchedtensor(tensor):
        return tensor.to(dtype)
    return torch.ops.prims.convert_element_type.default(tensor, dtype)


def log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """`aten.log_sigmoid_forward` under any number of vmaps: the result, and the backward's buffer.

    On a GPU, the operator's buffer has no elements. PyTorch (2.11 to 2.15) takes its dimension for
    the mapped one, and the next vmap fails. This formula is as exact, and has every derivative.
    """
    if not is_batchedtensor(x):
        return torch.ops.aten.log_sigmoid_forward.default(x)
    # Up to 40, log1p(exp(-x)) is not its own argument in fp64.
    return -torch.nn.functional.softplus(-x, threshold=40), torch.exp(-x.abs())


def log_ndtr(x: Tensor) -> Tensor:
    """`torch.special.log_ndtr` under any number of vmaps, for which it has no batching rule.

    PyTorch (2.11 to 2.15) would compute element by element, and warn. Each branch is computed
    where it is finite, so that neither spoils the gradient of the other.
    """
    if not is_mapped(x):
        return torch.ops.aten.special_log_ndtr.default(x)
    # Not by clamps, whose gradients at the limit are 0 in 2.15.
    below, above = (torch.where(x < 1, *pair) * 0.5**0.5 for pair in ((x, 1.0), (1.0, x)))
    tail = torch.log(torch.special.erfcx(-below) / 2) - below * below
    return torch.where(x < 1, tail, torch.log1p(-torch.erfc(above) / 2))


def ldexp(input: Tensor, other: Tensor) -> Tensor:
    """`torch.ldexp`, whose own derivative is 0 for negative integers (2.11 to 2.15): its power of
    two is an integer."""
    return input * torch.exp2(other.to(torch.promote_types(input.dtype, torch.float32)))


def kl_div(input: Tensor, target: Tensor, *more: Any, **options: Any) -> Tensor:
    """`torch.nn.functional.kl_div` under any number of vmaps; see `log_ndtr`."""
    names = ("size_average", "reduce", "reduction", "log_target")
    options |= dict(zip(names, more, strict=False))
    is_old = any(options.get(name) is not None for name in names[:2])
    if is_old or not (is_mapped(input) or is_mapped(target)):
        return torch.nn.functional.kl_div(input, target, **options)
    reduction, log_target = options.get("reduction", "mean"), options.get("log_target", False)
    if log_target:
        terms = target.exp() * (target - input)
    else:
        terms = torch.xlogy(target, target) - target * input
    if reduction == "none":
        return terms
    if reduction == "batchmean":
        return terms.sum() / input.size(0)
    return terms.mean() if reduction == "mean" else terms.sum()


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    """`torch.cdist` by operators that kernels compute, under any number of vmaps.

    2.11 to 2.15: the batching rule of its derivative asks the points alone for their batches, and
    reads other memory if the gradient has one that they lack.
    """
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


def loss(function: Callable[..., Any], *args: Any, weight: Any = None, **options: Any) -> Tensor:
    """A loss of `torch.nn.functional` under any number of vmaps.

    2.11 to 2.15: the rule for mse_loss, smooth_l1_loss and huber_loss takes no two operands of
    which each has a batch that the other lacks.
    """
    if weight is not None:
        return function(*args, weight=weight, **options)
    return getattr(torch._refs.nn.functional, function.__name__)(*args, **options)


def index_fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """`torch.index_fill` under any number of vmaps, also of the value alone.

    2.11 to 2.15: it is refused or, if other vmaps are about, wrong.
    """
    if input.dim() == 0:
        return torch.ops.aten.index_fill(input, dim, index, value)
    places = torch.arange(input.size(dim), device=input.device)
    is_here = (places.unsqueeze(-1) == (index % input.size(dim)).reshape(1, -1)).any(-1)
    after = input.dim() - 1 - dim % input.dim()
    value = torch.as_tensor(value, device=input.device).to(input.dtype)
    return torch.where(is_here.reshape(-1, *[1] * after), value, input)


def copy(input: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """`aten.copy`, as which all elements are written: without a batching rule in 2.11 to 2.15."""
    return src.to(input.dtype).expand(input.shape)


def column_stack(tensors: Sequence[Tensor]) -> Tensor:
    """`torch.column_stack`, which has no batching rule in 2.11 to 2.15."""
    return torch.cat([t if t.dim() > 1 else t.reshape(-1, 1) for t in tensors], 1)


def trace(input: Tensor) -> Tensor:
    """`torch.trace`, whose batching rule fails for symbolic sizes."""
    return input.diagonal().sum()


def concatenate(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`aten.cat` under any number of vmaps.

    2.11 to 2.15: its batching rule asks for numbers where sizes are symbols. Entries are chosen
    one by one instead; what a mod puts together of scores and positions is short.
    """
    if not _are_batched_with_symbols(tensors):
        return torch.ops.aten.cat.default(list(tensors), dim)
    *parts, joined = (part.unsqueeze(dim) for tensor in tensors for part in tensor.unbind(dim))
    for number, part in enumerate(parts):
        joined = torch.where(is_at(number, len(parts) + 1, joined, dim), part, joined)
    return joined


class LoopedOperator(Exception):
    """An operator that torch.vmap maps by a loop over all elements."""


@contextlib.contextmanager
def without_loops() -> Iterator[None]:
    """A region in which no operator is traced once for each element.

    Raises:
        LoopedOperator: PyTorch has no other rule for one. Its argument is the operator's name.
    """
    before = _functorch._is_vmap_fallback_enabled()
    _functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    except RuntimeError as error:
        name, found, _ = str(error).partition(" hit the vmap fallback")
        if not found:
            raise
        raise LoopedOperator(name) from error
    finally:
        _functorch._set_vmap_fallback_enabled(before)


def put(
    input: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """`aten.index_put` at one place, under any number of vmaps: the gradient of `row[h]`.

    2.11 to 2.15: it writes to a row of zeros, which is not batched, and the vmap refuses.
    """
    asked = [item for item in indices if item is not None]
    is_batched = any(map(is_batchedtensor, (input, values, *asked)))
    if not is_batched or any(item.dim() > 0 for item in asked):
        return torch.ops.aten.index_put.default(input, indices, values, accumulate)
    kept = [d for d in range(input.dim()) if d >= len(indices) or indices[d] is None]
    values = values.expand([input.size(dim) for dim in kept])
    is_here = torch.ones((), dtype=torch.bool, device=input.device)
    for dim, item in enumerate(indices):
        if item is not None:
            length = input.size(dim)
            is_here = is_here & is_at(
                torch.where(item < 0, item + length, item), length, input, dim
            )
            values = values.unsqueeze(dim)
    return torch.where(is_here, input + values if accumulate else values, input)


def select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """`aten.select_scatter` under any number of vmaps; see `concatenate`.

    2.11 to 2.15: under two vmaps, its gradient is summed over all places.
    """
    if not (is_batchedtensor(input) or is_batchedtensor(src)):
        return torch.ops.aten.select_scatter.default(input, src, dim, index)
    length = input.size(dim)
    place = is_at(index % length, length, input, dim)
    return torch.where(place, src.unsqueeze(dim), input)


def slice_scatter(input: Tensor, src: Tensor, dim: int = 0, *ends_and_step: Any) -> Tensor:
    """`aten.slice_scatter` under any number of vmaps; see `concatenate`."""
    if not _are_batched_with_symbols((input, src)):
        return torch.ops.aten.slice_scatter.default(input, src, dim, *ends_and_step)
    start, end, step = (*ends_and_step, *(None, None, 1)[len(ends_and_step) :])
    length = int(input.size(dim))
    ends = (at if at is None else int(at) for at in (start, end))
    for part, place in zip(src.unbind(dim), range(length)[slice(*ends, step)], strict=True):
        input = torch.where(is_at(place, length, input, dim), part.unsqueeze(dim), input)
    return input


def flip(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """`prims.rev` under any number of vmaps, for which 2.15 has no batching rule."""
    if not is_batchedtensor(tensor):
        return torch.ops.prims.rev.default(tensor, dims)
    for dim in dims:
        parts = [part.unsqueeze(dim) for part in tensor.unbind(dim)]
        tensor = concatenate(parts[::-1], dim)
    return tensor


def _are_batched_with_symbols(tensors: Sequence[Tensor]) -> bool:
    return any(is_batchedtensor(tensor) and _has_symbols(tensor) for tensor in tensors)


def product(
    input: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """torch.prod of a few numbers, one by one.

    Its own derivative sorts zeros out by products of all that come before, and after.
    """
    x = input if dtype is None else input.to(dtype)
    x = x.flatten() if dim is None else x
    if x.dim() != 1 or not 0 < x.shape[0] <= _FEW:
        return torch.prod(x) if dim is None else torch.prod(x, dim, keepdim)
    if not (x.is_floating_point() or x.is_complex()):
        x = x.to(torch.int64)  # as torch.prod does
    found = functools.reduce(torch.mul, x.unbind())
    return found.unsqueeze(0) if keepdim else found


def is_at(position: int | Tensor, length: int, like: Tensor, dim: int) -> Tensor:
    """Which entries are at a position of a dimension, to broadcast to `like`."""
    after = like.dim() - 1 - dim % like.dim()
    return (torch.arange(length, device=like.device) == position).reshape(-1, *[1] * after)
