"""The registry of dialects: families of kernels, each in its own folder.

To add a dialect, add a folder and a line here. flexhop/lowering/dialect.py says what it must
provide; `KernelOptions.backend` takes its name.
"""

from __future__ import annotations

# The preferred one first; the last one serves every GPU.
PACKAGES = {
    "hopper": "flexhop.lowering.hopper",
    "triton": "flexhop.lowering.portable",
}


def backends() -> tuple[tuple[str, ...], str]:
    """The values of `KernelOptions.backend`, and the same in words."""
    names = ("auto", *reversed(PACKAGES))
    *others, last = map(repr, names)
    return names, f"{', '.join(others)} or {last}"
