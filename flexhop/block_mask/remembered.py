"""Lists of masks that equal ones before: eager calls repeat only operators on captured tensors.

The first call for a mask notes the operators that find its lists. Those that do not depend on a
captured tensor become constants: for a mask without captured tensors, all of them. An equal mask
is one whose code, numbers and functions are equal, and whose captured tensors have the same form
(mods/closures.py); their contents are read again by every call.

Noting operators takes longer than the analysis. A mask whose functions hold no tensor and whose
graph reads none needs no notes: its lists are constants.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from flexhop.block_mask.coverage import Look
from flexhop.block_mask.scores import Grid
from flexhop.compat.mods.recorded import Program, Recorder, can_record, surroundings
from flexhop.mods.closures import Described, describe
from flexhop.mods.functions import MaskMod

MOST = 256  # masks
LARGEST = 32 << 20  # bytes of constants of one mask
TOGETHER = 128 << 20  # bytes of constants of all masks


class _Known(NamedTuple):
    """A program; None if the mask has to be analysed by every call, or noted by the next one."""

    program: Program | None
    lists: int  # how many of its results are lists
    size: int
    is_noted: bool


_known: OrderedDict[Hashable, _Known] = OrderedDict()


class Found(NamedTuple):
    """Lists; the look that they come from if some blocks may be unknown.

    is_constant: whether the mask's operators read no captured tensor.
    """

    lists: tuple[Tensor, ...]
    look: Look | None = None
    is_constant: bool = False


def remembered(
    mask_mod: MaskMod, grid: Grid, sides: tuple[bool, bool], find: Callable[[], Found]
) -> Found:
    """The lists of a mask, in memory of their own: by what is known of equal masks, or `find`.

    Args:
        mask_mod, grid, sides: what the lists depend on, with captured tensors and surroundings.
        find: analyses the mask.
    """
    described = describe((mask_mod,))
    if described is None or not can_record(grid.device, described.tensors):
        return find()
    key = (described.key, grid, sides, surroundings(grid.device))
    known = _known.get(key)
    if known is None or not known.is_noted:
        has_notes = bool(described.tensors) or known is not None
        return _recorded(key, mask_mod, described, find, has_notes)
    with contextlib.suppress(KeyError):  # another thread may have dropped it
        _known.move_to_end(key)
    if known.program is None:
        return find()
    with torch.no_grad():
        results = known.program(described.tensors)
    lists, rest = results[: known.lists], results[known.lists :]
    if not rest:
        return Found(lists)
    some, every, unknown = rest
    return Found(lists, Look(some, every, unknown))


def forget() -> None:
    """Drop everything that is remembered."""
    _known.clear()


def _recorded(
    key: Hashable,
    mask_mod: MaskMod,
    described: Described,
    find: Callable[[], Found],
    has_notes: bool,
) -> Found:
    recorder = Recorder(described.tensors) if has_notes else None
    with torch.inference_mode(False), torch.no_grad(), recorder or contextlib.nullcontext():
        found = find()
    if recorder is not None:
        look = found.look
        rest = [] if look is None else [look.some, look.every, look.unknown]
        program = recorder.program([*found.lists, *(t for t in rest if t is not None)])
    else:
        program = Program(0, [], found.lists) if found.is_constant else None
    size = 0 if program is None else program.constant_bytes()
    is_noted = has_notes or program is not None
    after = describe((mask_mod,))  # a mask that changes something is called each time
    if size > LARGEST or after is None or after.key != described.key:
        program, size, is_noted = None, 0, True
    if program is not None:
        program.keep(len(found.lists))
    _known[key] = _Known(program, len(found.lists), size, is_noted)
    while len(_known) > MOST or sum(known.size for known in _known.values()) > TOGETHER:
        _known.popitem(last=False)
    return found
