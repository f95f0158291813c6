"""Process groups by name, collectives that are awaited where they are read, and their stores.

Ranks check that they make the same call before they exchange anything: they compare texts through
their group's store. A rank that is missing or differs causes an error rather than a hang.

All names below exist with these signatures on torch 2.11 to 2.15.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from flexhop.errors import RankDisagreementError

IS_AVAILABLE = dist.is_available()
_known: set[tuple[str, str, str]] = set()
_comparisons: collections.Counter[str] = collections.Counter()

if IS_AVAILABLE:
    from torch._C._distributed_c10d import _register_work, _resolve_process_group
    from torch.distributed.distributed_c10d import _get_process_group_store

    # The functions around these operators were renamed: 2.13 warns of the old names.
    _functional = torch.ops._c10d_functional


def wait(started: Tensor) -> Tensor:
    """Wait for the collective that writes a tensor (on the GPU: in stream order)."""
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
    """Start an exchange of uneven parts along dimension 0; `wait(output)` completes it.

    Args:
        output: its first sum(into) rows are written.
        message: a contiguous tensor that is not written to before the wait. Inductor reuses an
            operator's operands as soon as its call returns, so it must not be one.
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
    """Start gathering `message` from all ranks along dimension 0; see start_all_to_all."""
    process_group = _resolve_process_group(group)
    # 2.13 calls it all_gather_single, and warns about the name that 2.11 and 2.12 use.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(output, message, group=process_group, async_op=True)
    _register_work(output, work)
    return output


def sum_over(tensor: Tensor, group: str) -> Tensor:
    """The sum of a tensor over all ranks of a group; traceable, without a gradient of its own."""
    return wait(_functional.all_reduce(tensor.contiguous(), "sum", group))


def gather_over(tensor: Tensor, group: str, ranks: int) -> Tensor:
    """Concatenate the tensors of all ranks of a group along dimension 0; traceable."""
    return wait(_functional.all_gather_into_tensor(tensor.contiguous(), ranks, group))


def from_first(tensor: Tensor, group: str) -> Tensor:
    """The tensor of rank 0; traceable."""
    return wait(_functional.broadcast(tensor.contiguous(), 0, group))


def exchange_texts(text: str, key: str, group: str) -> tuple[list[str], list[int]]:
    """Exchange texts through the group's store, without a collective or a device.

    Args:
        text: this rank's text.
        key: key of this exchange; the same on all ranks, used once.
        group: name of the process group; its timeout applies.

    Returns:
        The texts by rank, and the ranks that missed the timeout, which have no text.
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
    """Timeout of a group's collectives."""
    process_group = _resolve_process_group(group)
    backend = process_group._get_backend(process_group._device_types[0])
    return backend.options._timeout


def swap_over(tensor: Tensor, group: str) -> Tensor:
    """Send row r of dimension 0 to rank r, and receive its row; traceable, without gradient."""
    each = [1] * tensor.size(0)
    return wait(_functional.all_to_all_single(tensor.contiguous(), each, each, group))


def agree(subject: str, text: str, group: str, hint: str) -> None:
    """Compare a text with the other ranks', once per text.

    Args:
        subject: subject of the text, for the error.
        text: what this rank calls with.
        group: name of the process group; all its ranks call this.
        hint: how to fix a difference.

    Raises:
        RankDisagreementError: another rank's text differs, or does not arrive in time.
    """
    if (group, subject, text) in _known:
        return
    _comparisons[group] += 1
    key = f"{subject}/{_comparisons[group]}"
    texts, missing = exchange_texts(text, key, group)
    if missing:
        raise RankDisagreementError(
            subject=subject, hint=hint,
            found=f"rank {rank_in(group)} has {text}, but ranks {missing} did not "
            f"call within {timeout_of(group)}",
        )  # fmt: skip
    if len(set(texts)) > 1:
        raise RankDisagreementError(subject=subject, found=_by_text(texts), hint=hint)
    _known.add((group, subject, text))


def _by_text(texts: list[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{text} on rank {_words(found)}" for text, found in ranks.items())


def _words(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
