"""One line about a long compilation: that it is running, and at which stage.

A compilation starts and ends with PyTorch's. If it contains attention and takes more than SECONDS,
one line goes to stderr; in a terminal with tqdm installed, a running clock. Only the first of
several ranks prints. `FLEXHOP_PROGRESS=0` turns it off.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from typing import Any

import torch

VARIABLE = "FLEXHOP_PROGRESS"
SECONDS = 5.0


class Progress:
    """The current compilation. PyTorch compiles one at a time, in any thread."""

    def __init__(self) -> None:
        self._done: threading.Event | None = None
        self._is_watched = False  # whether this compilation is watched
        self._since = 0.0
        self.part = ""

    @property
    def is_watching(self) -> bool:
        """Whether a compilation with attention is running."""
        return self._done is not None and self._is_watched

    def start(self) -> None:
        """PyTorch starts to compile something."""
        self._done, self._since = threading.Event(), time.monotonic()
        self._is_watched = False

    def enter(self, part: str) -> None:
        """The compilation contains attention and reaches this stage; watch from now on."""
        self.part = part
        if self._done is None or self._is_watched or os.environ.get(VARIABLE) == "0":
            return
        self._is_watched = True
        threading.Thread(
            target=self._watch, args=(self._done, self._since), name="flexhop", daemon=True
        ).start()

    def end(self) -> None:
        """It has ended, successfully or not."""
        if self._done is not None:
            self._done.set()
        self._done = None

    def _watch(self, done: threading.Event, since: float) -> None:
        left = max(0.0, SECONDS - (time.monotonic() - since))
        if done.wait(left) or not _speaks():
            return
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            self._run_clock(done, since)
        else:
            seconds = time.monotonic() - since
            print(self._line(f"{seconds:.0f} s"), file=sys.stderr, flush=True)

    def _line(self, elapsed: str) -> str:
        return f"flexhop: compiling for {elapsed}: {self.part} ({VARIABLE}=0 hides this)"

    def _run_clock(self, done: threading.Event, since: float) -> None:
        """Rewrite the line every second until the end."""
        from tqdm import tqdm

        bar: Any = tqdm(bar_format="{desc}", leave=True)
        while True:
            bar.set_description_str(self._line(f"{time.monotonic() - since:.0f} s"))
            if done.wait(1.0):
                return bar.close()


def _speaks() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or (
        distributed.get_rank() == 0
    )


PROGRESS = Progress()
