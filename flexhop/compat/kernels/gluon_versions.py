"""The installed Triton version, and whether its Gluon is one that the kernels support.

Gluon changes between releases, and so does the generated machine code. A version counts as checked
if tests/kernel/test_compiled.py finds no spills in steps and no serialised products.
"""

from __future__ import annotations

from importlib import metadata

__all__ = ["CHECKED", "obstacle", "triton_version"]

CHECKED = ((3, 6), (3, 7))


def obstacle() -> str:
    """Why the installed Triton is not supported; empty if it is."""
    found = triton_version()
    if found in CHECKED:
        return ""
    known = " and ".join(".".join(map(str, version)) for version in CHECKED)
    return f"it was tested with Triton {known}, not {found[0]}.{found[1]}"


def triton_version() -> tuple[int, int]:
    """Major and minor version of Triton; zeros if it is not installed."""
    try:
        major, minor = metadata.version("triton").split(".")[:2]
    except metadata.PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)
