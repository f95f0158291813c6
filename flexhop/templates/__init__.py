"""Kernel sources: Jinja files that are Python once their holes are filled. See README.md here."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.resources import files


def part(name: str) -> str:
    """Text of one template file, named by its path below this folder, such as "mods/dropout"."""
    return files(__name__).joinpath(f"{name}.py.jinja").read_text(encoding="utf-8")


def header(*names: str) -> str:
    """C++ text of files in cpu/, one after the other."""
    folder = files(__name__).joinpath("cpu")
    return "\n".join(folder.joinpath(f"{name}.h").read_text(encoding="utf-8") for name in names)


@functools.cache
def join(names: Sequence[str]) -> str:
    """Text of one kernel: its own file, then those of the device functions it calls.

    Args:
        names: as in `part`, a tuple.
    """
    return "\n\n".join(part(name).strip("\n") for name in names) + "\n"
