"""Errors of PyTorch inside a mod, as ours: they name the operation, the line and a hint."""

from __future__ import annotations

from typing import NamedTuple

from flexhop.compat.mods.location import innermost_line
from flexhop.compat.mods.writes import UnknownWriteError
from flexhop.errors import CaptureMutationError, FlexhopError, ModLoweringError

__all__ = ["known", "refused", "unknown_write"]


class _Refusal(NamedTuple):
    """What a mod did, and what to do instead."""

    operation: str
    reason: str


_VALUE = _Refusal(
    "reading the value of an index or score (if, while, .item(), int())",
    "they are tensors; use torch.where, & and | instead",
)
_RANDOM = _Refusal(
    "drawing random numbers",
    "every pass over the scores would draw others; draw before the call and capture the tensor, "
    "or pass dropout_p",
)
_MEMORY = _Refusal(
    "reading the memory of a tensor, as NumPy does",
    "an index or score has none; convert NumPy arrays with torch.from_numpy before the call",
)
_NO_POSITION = _Refusal(
    "indexing a tensor with a float, or with an integer of 8 or 16 bits",
    "positions are integers of 32 or 64 bits; convert it with .to(torch.int32)",
)
_MANY_INDICES = _Refusal(
    "indexing a tensor with more indices than it has dimensions", "leave out the indices too many"
)
_DEVICES = _Refusal(
    "an operation on tensors of two devices",
    "move captured tensors to the device of query before the call",
)
# Parts of PyTorch's messages, 2.11 to 2.15.
_KNOWN = {
    "data-dependent control flow": _VALUE,
    ".item()": _VALUE,
    "called random operation": _RANDOM,
    "Cannot access data pointer": _MEMORY,
    "can't be converted to a numpy": _MEMORY,
    "tensors used as indices must be": _NO_POSITION,
    "too many indices for tensor": _MANY_INDICES,
    "is not on the expected device": _DEVICES,
    "to be on the same device": _DEVICES,
}
_WRITES = ("is not possible because there exists a Tensor", "vmap: inplace arithmetic")


def refused(error: Exception, mod: str) -> FlexhopError | None:
    """Our error for one that a call of a mod raised; None if it is the user's own.

    Args:
        error: what the mod raised, with its traceback.
        mod: the name of the mod for the message.
    """
    if isinstance(error, FlexhopError):
        return None
    if isinstance(error, UnknownWriteError):
        return unknown_write(error, mod, innermost_line(error))
    if any(part in str(error) for part in _WRITES):
        return CaptureMutationError(mod=mod, location=innermost_line(error))
    return known(error, mod, innermost_line(error))


def known(error: Exception, mod: str, location: str) -> FlexhopError | None:
    """Our error for one of PyTorch's whose cause its message tells; None for others."""
    for part, refusal in _KNOWN.items():
        if part in str(error):
            return ModLoweringError(
                mod=mod, operation=refusal.operation, location=location, reason=refusal.reason
            )
    return None


def unknown_write(error: UnknownWriteError, mod: str, location: str) -> ModLoweringError:
    """Our error for a write that cannot be followed."""
    return ModLoweringError(
        mod=mod, operation=f"an in-place operation on {error}", location=location,
        reason="compute a new tensor instead",
    )  # fmt: skip
