"""When a compilation starts and ends, what rests, and which sizes change. torch 2.11 to 2.15."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._guards import CompileContext

__all__ = ["OldObjects", "mark_dynamic", "watch_compilations"]


class OldObjects:
    """The objects that exist when a compilation starts, which Python need not search for garbage.

    A compilation makes enough objects for one search among all, those of PyTorch's modules above
    all: a quarter of a second. Garbage of the compilation itself is still found.
    """

    # Who sets objects aside does it once, for good. Python counts two million of them in 45 ms.
    user_has_some = False

    def __init__(self) -> None:
        self._are_set_aside = False

    def set_aside(self) -> None:
        """Search among new objects alone, unless the user has set objects aside."""
        if self._are_set_aside or OldObjects.user_has_some or not gc.isenabled():
            return
        OldObjects.user_has_some = gc.get_freeze_count() > 0
        if not OldObjects.user_has_some:
            gc.freeze()
            self._are_set_aside = True

    def put_back(self) -> None:
        """Search among all objects again."""
        if self._are_set_aside:
            gc.unfreeze()
            self._are_set_aside = False


class _Watch:
    """Two callbacks around everything that Dynamo compiles, and around later backward graphs."""

    def __init__(self, start: Callable[[], None], end: Callable[[], None]) -> None:
        self.start, self.end = start, end
        self.old = OldObjects()

    def on_start(self, args: CallbackArgs) -> None:
        self.old.set_aside()
        self.start()

    def on_end(self, args: CallbackArgs) -> None:
        self.old.put_back()
        self.end()

    def keep(self) -> None:
        """Called during a compilation. `torch.compiler.reset` removes callbacks: register them
        again."""
        if self.on_end in callback_handler.end_callbacks:
            return
        callback_handler.register_start_callback(self.on_start)
        callback_handler.register_end_callback(self.on_end)
        if CompileContext.try_get() is not None and not torch.compiler.is_exporting():
            self.old.set_aside()
            self.start()  # it started before they were registered


def watch_compilations(start: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
    """Call back when compilations start and end.

    Returns:
        A function to call during a compilation, which keeps the callbacks registered.
    """
    watch = _Watch(start, end)
    return watch.keep


def mark_dynamic(tensor: Tensor, dims: Iterable[int]) -> None:
    """Compile for any size of these dimensions except 1; code that needs one size may
    specialise."""
    for dim in dims:
        if tensor.size(dim) != 1:
            maybe_mark_dynamic(tensor, dim)
