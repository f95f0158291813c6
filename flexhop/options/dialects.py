"""The registry of dialects: families of kernels, each in a folder of its own.

A new dialect is such a folder and a line here. flexhop/lowering/dialect.py says what it has to
provide; `KernelOptions.backend` takes its name.
"""

from __future__ import annotations

# The preferred one first; the last one serves every GPU.
PACKAGES = {
    "hopper": "flexhop.lowering.hopper",
    "triton": "flexhop.lowering.portable",
}


def backends() -> tuple[tuple[str, ...], str]:
    """What `KernelOptions.backend` may be, and the same in words."""
    names = ("auto", *reversed(PACKAGES))
    *others, last = map(repr, names)
    return names, f"{', '.join(others)} or {last}"
