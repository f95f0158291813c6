"""Windows of keys around a query, as users write them."""

from __future__ import annotations

from typing import Any

from flexhop import errors
from flexhop.ops.call import Mistake, note_mistake

__all__ = ["window_mistake"]


def window_mistake(window: Any) -> Mistake | None:
    """What is wrong with a window. flash-attn's -1 would mean that the next key is the first."""
    is_pair = isinstance(window, (tuple, list)) and len(window) == 2
    if is_pair and all([n is None or (isinstance(n, int) and n >= 0) for n in window]):
        return None
    allowed = "two numbers (before, after) from 0, or None for no bound (flash-attn's -1)"
    found = window if is_pair else type(window).__name__
    return note_mistake(
        errors.OptionValueError, name="window_size", value=str(found), allowed=allowed
    )
