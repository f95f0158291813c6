"""Words of messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["shape_text"]


def shape_text(sizes: Iterable[Any]) -> str:
    """Sizes as in "[2, 4, 128]".

    Under dynamic shapes, Dynamo (2.11, 2.13) can format a size, but no tuple of sizes.
    """
    text = ", ".join([f"{int(size)}" for size in sizes])
    return f"[{text}]"
