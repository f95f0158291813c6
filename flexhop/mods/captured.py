"""Find the tensors that a mod has captured, and replace them in a copy of the mod.

A mod may hold tensors in its closure, in the arguments of functools.partial, in the attributes of
an object with `__call__`, or of the object that a method is bound to. So may the functions that it
holds. Modules and globals are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from flexhop.compat.mods.held import Held

M = TypeVar("M")


def captured_tensors(mod: Any) -> list[Tensor]:
    """The tensors that a mod has captured, in a fixed order, one entry per place."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_captured(mod, note)
    return found


def map_captured(mod: M, change: Callable[[Tensor], Tensor]) -> M:
    """The mod with `change` applied to each captured tensor; the mod itself if none changes."""
    return Held(change, _is_mod).map(mod)


def _is_mod(value: Any) -> bool:
    """Whether an object may be a mod. Modules are left alone: nn.Module.to moves them."""
    return callable(value) and not isinstance(value, nn.Module)
