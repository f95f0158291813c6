"""Calls outside torch.compile that repeat an earlier one: their plan is found by one look-up.

A call is checked, lifted and planned once (calls.py). A later one with an equal key runs
the same compiled code at once. The key holds everything that those steps read: sizes, strides,
dtypes and devices of tensors, which of them require gradients, the description of the mods, all
choices, and PyTorch's own settings. Values of tensors are in no key.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.block_mask.mask import BlockMask
from flexhop.compat.compilation import remember
from flexhop.compat.mods.wrapped import are_tensors, is_quiet
from flexhop.mods.closures import Described, Places, describe
from flexhop.mods.functions import noop_mask, noop_score
from flexhop.ops.call import is_determinism_required
from flexhop.ops.replicated import SLOT
from flexhop.ops.uncompiled.bare import Plan, Repeat
from flexhop.ops.uncompiled.option import wants_kernels
from flexhop.options import KernelOptions

__all__ = ["Asked", "ask", "forget", "note_plan"]

_MOST = 4096
_CHOICES = frozenset([KernelOptions, type(None)])
_SCALES = frozenset([float, int, type(None)])
_MASK_FIELDS = operator.attrgetter(
    "seq_lengths", "BLOCK_SIZE", "kv_num_blocks", "kv_indices", "full_kv_num_blocks",
    "full_kv_indices", "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip
_NO_MODS = (noop_score, noop_mask)

Blocks = tuple[Tensor, ...]
ReadMask = Callable[[Any], tuple[Blocks, Any, Any]]


class _Mask(NamedTuple):
    """A block mask that was read: its fields then, its blocks, and what stands for it in keys."""

    owner: weakref.ref[BlockMask]
    fields: tuple[Any, ...]
    blocks: Blocks
    token: object


class _Noted(threading.local):
    plan: tuple[Plan, Places] | None = None


_NOTED = _Noted()
_repeats: dict[Hashable, Repeat] = {}
_masks: dict[int, _Mask] = {}  # by id
_tokens: dict[Hashable, object] = {}


def note_plan(plan: Plan, places: Places) -> None:
    """Note the plan that a call follows, and where its captures are among the mods' tensors."""
    _NOTED.plan = (plan, places)


def forget() -> None:
    """Forget all calls."""
    _repeats.clear()


class Asked(NamedTuple):
    """A call that may repeat one."""

    key: Hashable
    operands: tuple[Tensor, Tensor, Tensor]
    blocks: Blocks
    held: list[Tensor]  # what its mods read

    def run(self) -> Tensor | None:
        """Its output, if it repeats a call; None otherwise, and then `keep` follows the call."""
        found = _repeats.get(self.key)
        if found is None:
            _NOTED.plan = None
            return None
        return found.run(self.operands, self.blocks, self.held)

    def keep(self) -> None:
        """Keep the plan that the call has noted."""
        noted, _NOTED.plan = _NOTED.plan, None
        if noted is None:
            return
        found = Repeat.of(*noted, self.operands, self.blocks, self.held)
        if found is not None:
            remember(_repeats, self.key, found, _MOST)


def ask(
    operands: tuple[Any, Any, Any], mods: tuple[Any, Any], choices: tuple[Any, ...],
    read_mask: ReadMask,
) -> Asked | None:  # fmt: skip
    """Whether a call can repeat one: it runs kernels, and nobody but autograd watches.

    Args:
        operands: query, key and value, unchecked.
        mods: score_mod and block_mask, or None for each.
        choices: scale, enable_gqa, kernel_options and dropout_p.
        read_mask: the tensors of a block mask, its mask_mod, and its other facts.
    """
    scale, enable_gqa, kernel_options, dropout_p = choices
    if type(kernel_options) not in _CHOICES or not wants_kernels(kernel_options):
        return None
    score_mod, block_mask = mods
    is_plain = type(scale) in _SCALES and type(enable_gqa) is bool and _is_zero(dropout_p)
    if not is_plain or SLOT.current is not None or not is_quiet():
        return None
    mask = None if block_mask is None else _read(block_mask, read_mask)
    if block_mask is not None and mask is None:
        return None
    described = _describe(score_mod, block_mask)
    if described is None or not are_tensors((*operands, *described.tensors)):
        return None
    # Nested tensors have the shapes of dense ones, but are packed before they are attended to.
    query, key, value = operands
    if query.is_nested or key.is_nested or value.is_nested:
        return None
    problem = (
        query.shape, query.stride(), query.dtype, query.device, query.requires_grad,
        key.shape, key.stride(), key.dtype, key.device, key.requires_grad,
        value.shape, value.stride(), value.dtype, value.device, value.requires_grad,
        described.key, None if mask is None else mask.token, type(scale), scale, enable_gqa,
        kernel_options, torch.is_grad_enabled(), is_determinism_required(),
        torch.get_float32_matmul_precision(),
    )  # fmt: skip
    return Asked(problem, operands, () if mask is None else mask.blocks, described.tensors)


def _is_zero(value: Any) -> bool:
    return type(value) in (int, float) and value == 0


def _describe(score_mod: Any, block_mask: Any) -> Described | None:
    if score_mod is None and block_mask is None:
        return _PLAIN
    mask_mod = noop_mask if block_mask is None else block_mask.mask_mod
    return describe((noop_score if score_mod is None else score_mod, mask_mod))


_PLAIN = describe(_NO_MODS)


def _read(block_mask: Any, read_mask: ReadMask) -> _Mask | None:
    """A mask's tensors and token; its mask_mod is described at every call.

    Equal tokens stand for equal facts of the mask and of its tensors. These are read again if the
    mask gets other tensors; compiled code itself checks the sizes and strides of what it reads.
    """
    # A subclass may compute its fields anew at each read.
    if type(block_mask) is not BlockMask:
        return None
    fields, number = _MASK_FIELDS(block_mask), id(block_mask)
    found = _masks.get(number)
    if found is not None and found.owner() is block_mask:
        if all(map(operator.is_, found.fields, fields)):
            return found
    blocks, _, facts = read_mask(block_mask)
    if not are_tensors(blocks):
        return None
    # An id stands for another mask once this one is gone.
    owner = weakref.ref(block_mask, lambda _: _masks.pop(number, None))
    found = _masks[number] = _Mask(owner, fields, blocks, _token(blocks, facts))
    return found


def _token(blocks: Sequence[Tensor], facts: Any) -> object:
    key = (facts, *((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in blocks))
    found = _tokens.get(key)
    return remember(_tokens, key, object(), _MOST) if found is None else found
