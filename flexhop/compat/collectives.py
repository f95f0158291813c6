"""Process groups by name, collectives that are waited for where they are read, and their stores.

All names below exist with these signatures on torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

IS_AVAILABLE = dist.is_available()

if IS_AVAILABLE:
    from torch._C._distributed_c10d import _register_work, _resolve_process_group
    from torch.distributed.distributed_c10d import _get_process_group_store

    # The functions around these operators have changed their names: 2.13 warns of the old ones.
    _functional = torch.ops._c10d_functional


def wait(started: Tensor) -> Tensor:
    """The tensor, once the collective that writes it has ended (on the GPU: in stream order)."""
    return _functional.wait_tensor(started)


def size_of(group: str) -> int:
    """Number of ranks of a group."""
    return _resolve_process_group(group).size()


def rank_in(group: str) -> int:
    """This process's rank in a group."""
    return _resolve_process_group(group).rank()


def start_all_to_all(
    output: Tensor, message: Tensor, into: Sequence[int], out: Sequence[int], group: str
) -> Tensor:
    """Begin an exchange of uneven parts along dimension 0; `wait(output)` ends it.

    Args:
        output: its first sum(into) rows are written.
        message: a contiguous tensor that nobody else writes to before the wait. Inductor reuses
            the operands of an operator as soon as its call returns, so it must not be one.
        into, out: rows from and to each rank.
        group: name of the process group.
    """
    process_group = _resolve_process_group(group)
    work = dist.all_to_all_single(
        output[: sum(into)], message, list(into), list(out), group=process_group, async_op=True
    )
    _register_work(output, work)
    return output


def start_all_gather(output: Tensor, message: Tensor, group: str) -> Tensor:
    """Begin to gather `message` of all ranks along dimension 0; otherwise as start_all_to_all."""
    process_group = _resolve_process_group(group)
    # 2.13 calls it all_gather_single, and warns of the name that 2.11 and 2.12 know.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(output, message, group=process_group, async_op=True)
    _register_work(output, work)
    return output


def sum_over(tensor: Tensor, group: str) -> Tensor:
    """The sum of a tensor over all ranks of a group; traceable, without a gradient of its own."""
    return wait(_functional.all_reduce(tensor.contiguous(), "sum", group))


def gather_over(tensor: Tensor, group: str, ranks: int) -> Tensor:
    """Tensors of all ranks of a group, one behind the other along dimension 0; traceable."""
    return wait(_functional.all_gather_into_tensor(tensor.contiguous(), ranks, group))


def from_first(tensor: Tensor, group: str) -> Tensor:
    """The tensor of rank 0; traceable."""
    return wait(_functional.broadcast(tensor.contiguous(), 0, group))


def exchange_texts(text: str, key: str, group: str) -> tuple[list[str], list[int]]:
    """Every rank's text, by the group's store: no collective, and no device, is involved.

    Args:
        text: of this rank.
        key: of this exchange; the same on all ranks, and used once.
        group: name of the process group, whose timeout holds.

    Returns:
        The texts by rank; and the ranks that did not come within the timeout, which have none.
    """
    process_group = _resolve_process_group(group)
    store = _get_process_group_store(process_group)
    names = [f"flexhop/{key}/{rank}" for rank in range(process_group.size())]
    store.set(names[process_group.rank()], text)
    try:
        store.wait(names, timeout_of(group))
    except dist.DistStoreError:
        missing = [rank for rank, name in enumerate(names) if not store.check([name])]
        if missing:
            return [], missing
    return [store.get(name).decode() for name in names], []


def timeout_of(group: str) -> timedelta:
    """How long a group's collectives may take."""
    process_group = _resolve_process_group(group)
    backend = process_group._get_backend(process_group._device_types[0])
    return backend.options._timeout


def swap_over(tensor: Tensor, group: str) -> Tensor:
    """Row r of dimension 0 goes to rank r, whose row comes back; traceable, without gradient."""
    each = [1] * tensor.size(0)
    return wait(_functional.all_to_all_single(tensor.contiguous(), each, each, group))
