"""Gradients through entries of a table that no score reads.

A mask hides scores, so some entries may be read by no visible score: their gradient is 0. The
derivative of such an entry may be infinite or NaN, as that of `log(1 + rate * (q - k))` is for
keys behind a query. Their product would be NaN, and a captured tensor adds it to the gradients of
the entries that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Unread:
    """Removes the gradients of one table's entries that no score reads.

    What a trained tensor contributes to an entry is expanded to the shape of the table, so that
    what autograd computes for one entry is apart from the others until `_without_unread`.

    Args:
        shape: of the table.
    """

    def __init__(self, shape: Sequence[Any]) -> None:
        self._shape = tuple(shape)
        self._grads: list[Tensor] = []

    def expand(self, source: Tensor, axes: int) -> Tensor:
        """A source of entries, [*axes of the table, *elements], expanded to the table's shape.

        axes: how many of its dimensions broadcast with those of the table: all of them, or none.
        """
        elements = source.shape[axes:]
        if not axes:
            source = source.view(*(1 for _ in self._shape), *elements)
        source = source.expand(*self._shape, *elements)
        if source.requires_grad:
            source.register_hook(self._without_unread)
        return source

    def note(self, entries: Tensor) -> Tensor:
        """The table itself: its gradient says which entries were read."""
        if entries.requires_grad:
            entries.register_hook(self._note_grad)
        return entries

    def _note_grad(self, grad: Tensor) -> None:
        self._grads.append(grad.detach())
        if grad.requires_grad:  # it is differentiated, too
            grad.register_hook(self._without_unread)

    def _without_unread(self, grad: Tensor) -> Tensor:
        """A gradient [*shape, *elements] without infinities and NaN of unread entries.

        An entry whose gradient is 0 although it is read keeps a derivative that is finite, for a
        gradient of the gradient.
        """
        unread: Any = True
        for seen in self._grads:
            is_zero = seen == 0
            if is_zero.dim() > len(self._shape):  # an entry is a row
                is_zero = is_zero.flatten(len(self._shape)).all(-1)
            unread = is_zero & unread
        if unread is True:  # no gradient came through the table
            return grad
        unread = unread.view(*self._shape, *(1 for _ in range(grad.dim() - len(self._shape))))
        return torch.where(unread & ~grad.isfinite(), 0.0, grad)
