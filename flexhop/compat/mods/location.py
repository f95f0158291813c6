"""Locate a line in the user's program."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch
from torch.fx import Node

# Ends with a separator: a project next to ours, or named after PyTorch, is the user's.
_OURS = f"{Path(__file__).parents[2]}/"
_OTHERS = (f"{Path(torch.__file__).parent}/", _OURS)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*(?:\n\s*(?P<code>[^\n]+))?')


def users_line(stack: str) -> str:
    """The innermost line of a formatted stack that is neither PyTorch's nor ours.

    Args:
        stack: as in a traceback, innermost frame last.

    Returns:
        "file:line (code)", or "its body" if there is none.
    """
    for frame in reversed(list(_FRAME.finditer(stack))):
        if not frame["file"].startswith(_OTHERS):
            code = (frame["code"] or "").strip()
            return f"{frame['file']}:{frame['line']}" + (f" ({code})" if code else "")
    return "its body"


def line_of(node: Node | None) -> str:
    """The user's line in the stack that the tracer recorded for a node, if it recorded one."""
    return users_line((node.meta.get("stack_trace") if node is not None else None) or "")


def is_inside_flexhop(node: Node) -> bool:
    """Whether the stack that the tracer recorded for a node has a frame of flexhop."""
    frames = _FRAME.finditer(node.meta.get("stack_trace") or "")
    return any(frame["file"].startswith(_OURS) for frame in frames)


def innermost_line(error: BaseException) -> str:
    """The line of the user's program that raised an error; see `users_line`."""
    return users_line("".join(traceback.format_tb(error.__traceback__)))
