"""When a compilation starts and ends. torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._guards import CompileContext

__all__ = ["watch_compilations"]


class _Watch:
    """Two callbacks around everything that Dynamo compiles, and around later backward graphs."""

    def __init__(self, start: Callable[[], None], end: Callable[[], None]) -> None:
        self.start, self.end = start, end

    def on_start(self, args: CallbackArgs) -> None:
        self.start()

    def on_end(self, args: CallbackArgs) -> None:
        self.end()

    def keep(self) -> None:
        """Called during a compilation. `torch.compiler.reset` removes callbacks: register them
        again."""
        if self.on_end in callback_handler.end_callbacks:
            return
        callback_handler.register_start_callback(self.on_start)
        callback_handler.register_end_callback(self.on_end)
        if CompileContext.try_get() is not None and not torch.compiler.is_exporting():
            self.start()  # it started before they were registered


def watch_compilations(start: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
    """Call back when compilations start and end.

    Returns:
        A function to call during a compilation, which keeps the callbacks registered.
    """
    watch = _Watch(start, end)
    return watch.keep
