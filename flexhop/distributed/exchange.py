"""Send units of keys and values to the ranks that need them, and their gradients back.

Collectives are custom operators of fixed shapes. How many units go where is data (a tensor on the
CPU), so a compiled graph is the same for every packing of documents. A collective starts where it
is called and is awaited where its result is read. The owner of a unit adds its gradients in fp32
and in a fixed order.

An exchange has two differentiable steps. `send_keys` starts all groups; `receive_keys` assembles
one buffer of keys. In the backward pass, `receive_keys` sends gradients without waiting; the
backward step of `send_keys`, which comes last, awaits them.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexhop.compat import collectives
from flexhop.distributed.routes import NOWHERE, Route
from flexhop.ops.eager import accumulate_dtype

# Bytes that this process received from other ranks, by operation, in eager and compiled calls.
RECEIVED: collections.Counter[str] = collections.Counter()


def _count(operation: str, units: Sequence[int], message: Tensor, group: str) -> None:
    me = collectives.rank_in(group)
    each = message.stride(0) * message.element_size()
    RECEIVED[operation] += each * sum(n for rank, n in enumerate(units) if rank != me)


def _pack(key: Tensor, value: Tensor, places: Tensor, unit: int) -> Tensor:
    """Units of [B, H, N, D] and [B, H, N, E] as [n, B, H, unit, D + E], a new tensor.

    Places that are NOWHERE become zeros.
    """
    dtype = key.dtype
    if _has_words(key) and _has_words(value):
        key, value = key.view(torch.int64), value.view(torch.int64)
    width = key.size(3)
    batch, heads = key.shape[:2]
    packed = key.new_empty(len(places), batch, heads, unit, width + value.size(3))
    for tensor, part in ((key, packed[..., :width]), (value, packed[..., width:])):
        part.copy_(_units(tensor, unit).index_select(0, places.clamp(min=0)))
    packed.masked_fill_((places == NOWHERE).view(-1, 1, 1, 1, 1), 0)
    return packed.view(dtype)


def _has_words(tensor: Tensor) -> bool:
    """Whether rows consist of whole words of 8 bytes: kernels then copy four bf16 at a time."""
    each = 8 // tensor.element_size()
    steps = (tensor.size(-1), tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and all(step % each == 0 for step in steps)


def _units(tensor: Tensor, unit: int) -> Tensor:
    """[B, H, N, D] as [N / unit, B, H, unit, D], a view; zero-padded beyond the end."""
    missing = -tensor.size(2) % unit
    if missing:
        tensor = torch.nn.functional.pad(tensor, (0, 0, 0, missing))
    return tensor.unflatten(2, (-1, unit)).permute(2, 0, 1, 3, 4)


@torch.library.custom_op("flexhop::start_cast", mutates_args=())
def _start_cast(
    key: Tensor, value: Tensor, send: Tensor, counts: Tensor, unit: int, received: int, group: str
) -> Tensor:
    """Start sending own units to the ranks that need them: [received, B, H, unit, D + E]."""
    out, into = counts.tolist()
    message = _pack(key, value, send[: sum(out)], unit)
    arriving = message.new_zeros(received, *message.shape[1:])
    _count("cast", into, arriving, group)
    return collectives.start_all_to_all(arriving, message, into, out, group)


@_start_cast.register_fake
def _(
    key: Tensor, value: Tensor, send: Tensor, counts: Tensor, unit: int, received: int, group: str
) -> Tensor:
    width = key.size(3) + value.size(3)
    return key.new_empty(received, key.size(0), key.size(1), unit, width)


@torch.library.custom_op("flexhop::start_gather", mutates_args=())
def _start_gather(key: Tensor, value: Tensor, unit: int, received: int, group: str) -> Tensor:
    """Start sending all own units to all ranks; see _start_cast."""
    own = key.size(2) // unit
    message = _pack(key, value, torch.arange(own, device=key.device), unit)
    arriving = message.new_empty(received, *message.shape[1:])
    _count("gather", [own] * collectives.size_of(group), arriving, group)
    return collectives.start_all_gather(arriving, message, group)


@_start_gather.register_fake
def _(key: Tensor, value: Tensor, unit: int, received: int, group: str) -> Tensor:
    width = key.size(3) + value.size(3)
    return key.new_empty(received, key.size(0), key.size(1), unit, width)


@torch.library.custom_op("flexhop::start_return", mutates_args=())
def _start_return(
    grad_key: Tensor, grad_value: Tensor, places: Tensor, counts: Tensor, unit: int, sent: int,
    group: str,
) -> Tensor:  # fmt: skip
    """Start sending gradients of received units to their owners: [sent, B, H, unit, D + E]."""
    out, into = counts.tolist()
    message = _pack(grad_key, grad_value, places[: sum(into)], unit)
    returning = message.new_zeros(sent, *message.shape[1:])
    _count("return", out, returning, group)
    return collectives.start_all_to_all(returning, message, out, into, group)


@_start_return.register_fake
def _(
    grad_key: Tensor, grad_value: Tensor, places: Tensor, counts: Tensor, unit: int, sent: int,
    group: str,
) -> Tensor:  # fmt: skip
    width = grad_key.size(3) + grad_value.size(3)
    return grad_key.new_empty(sent, grad_key.size(0), grad_key.size(1), unit, width)


class _Send(torch.autograd.Function):
    """Start the exchange of each group of heads.

    Returns key and value, and for each group the arriving buffer and a stand-in for the sent
    units, whose gradient is what comes back.
    """

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, send: Tensor, counts: Tensor, returned: Tensor,
        unit: int, received: int, sent: int, groups: int, is_gather: bool, group: str,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.save_for_backward(returned)
        ctx.unit, ctx.width = unit, key.size(3)
        results = [key.view_as(key), value.view_as(value)]
        arriving = []
        for k, v in zip(key.chunk(groups, 1), value.chunk(groups, 1), strict=True):
            if is_gather:
                started = _start_gather(k, v, unit, received, group)
            else:
                started = _start_cast(k, v, send, counts, unit, received, group)
            width = key.size(3) + value.size(3)
            stand_in = key.new_zeros(()).expand(sent, key.size(0), k.size(1), unit, width)
            arriving.append(started)
            results += [started, stand_in]
        ctx.mark_non_differentiable(*arriving)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, grad_key: Tensor, grad_value: Tensor, *rest: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch: *grad_outputs
        (returned,) = ctx.saved_tensors
        parts = [_add_up(collectives.wait(back), returned) for back in rest[1::2]]
        total = torch.cat(parts, 2).permute(1, 2, 0, 3, 4).flatten(2, 3)  # [B, H, M, D + E]
        dtype = total.dtype
        whole_key = (grad_key.to(dtype) + total[..., : ctx.width]).to(grad_key.dtype)
        whole_value = (grad_value.to(dtype) + total[..., ctx.width :]).to(grad_value.dtype)
        return whole_key, whole_value, *[None] * 9


def _add_up(back: Tensor, returned: Tensor) -> Tensor:
    """[T, ...] gradients as they came back -> [own, ...] their sums, by destination in turn."""
    dtype = accumulate_dtype(back.dtype)
    shape = (returned.size(0), *back.shape[1:])
    total = torch.zeros(shape, dtype=dtype, device=back.device)
    for turn in range(returned.size(1)):
        places = returned[:, turn]
        part = back.index_select(0, places.clamp(min=0)).to(dtype)
        total = total + torch.where((places == NOWHERE).view(-1, 1, 1, 1, 1), 0.0, part)
    return total


class _Receive(torch.autograd.Function):
    """Assemble a buffer of keys from own and received units."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, stand_in: Tensor, arriving: Tensor, order: Tensor,
        own_back: Tensor, received_back: Tensor, counts: Tensor, unit: int, length: int,
        group: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(own_back, received_back, counts)
        ctx.unit, ctx.group, ctx.sent, ctx.own = unit, group, stand_in.size(0), key.size(2)
        there = collectives.wait(arriving)
        width = key.size(3)
        if own_back.size(0):
            keys = torch.cat((_units(key, unit), there[..., :width]))
            values = torch.cat((_units(value, unit), there[..., width:]))
        else:
            keys, values = there[..., :width], there[..., width:]
        return _in_order(keys, order, length), _in_order(values, order, length)

    @staticmethod
    def backward(ctx: Any, grad_key: Tensor, grad_value: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch: *grad_outputs
        own_back, received_back, counts = ctx.saved_tensors
        back = _start_return(
            grad_key, grad_value, received_back, counts, ctx.unit, ctx.sent, ctx.group
        )
        own = (None, None)
        if own_back.size(0):
            own = tuple(
                _in_order(_units(grad, ctx.unit), own_back, ctx.own)
                for grad in (grad_key, grad_value)
            )
        return (*own, back, *[None] * 8)


def _in_order(units: Tensor, order: Tensor, length: int) -> Tensor:
    """[n, B, H, unit, D] -> [B, H, length, D], units ordered by `order`; NOWHERE becomes zeros."""
    picked = units.index_select(0, order.clamp(min=0))
    picked = torch.where((order == NOWHERE).view(-1, 1, 1, 1, 1), 0.0, picked)
    return picked.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]


def send_keys(
    key: Tensor, value: Tensor, route: Route, unit: int, groups: int, group: str
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Start the exchange of a rank's keys and values.

    Args:
        key, value: [B, Hkv, M, D], [B, Hkv, M, Dv], owned by the rank.
        route: which units to send.
        unit: tokens of a unit.
        groups: number of head groups.
        group: name of the process group.

    Returns:
        key and value, whose gradients will hold what others send back; and for each group of
        heads what `receive_keys` takes.
    """
    sent = route.received if route.is_gather else route.send.size(0)
    key, value, *rest = _Send.apply(
        key, value, route.send, route.counts, route.returned, unit, route.received, sent, groups,
        route.is_gather, group,
    )  # fmt: skip
    return key, value, list(zip(rest[1::2], rest[::2], strict=True))


def receive_keys(
    key: Tensor, value: Tensor, way: tuple[Tensor, Tensor], route: Route, unit: int, tokens: int,
    group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Receive the key and value buffers of one group of heads.

    Args:
        key, value: from `send_keys`, of this group of heads.
        way: what `send_keys` returned for this group.
        route, unit, group: see `send_keys`.
        tokens: tokens in the buffers.
    """
    return _Receive.apply(
        key, value, *way, route.order, route.own_back, route.received_back, route.counts, unit,
        tokens, group,
    )  # fmt: skip
