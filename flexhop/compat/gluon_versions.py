"""Which Triton is there, and whether kernels in its Gluon are checked with it."""

from __future__ import annotations

from importlib import metadata


def obstacle(checked: tuple[tuple[int, int], ...]) -> str:
    """Why the installed Triton will not do; empty if it is one of `checked`."""
    found = triton_version()
    if found in checked:
        return ""
    known = " and ".join(".".join(map(str, version)) for version in checked)
    return f"it was tested with Triton {known}, not {found[0]}.{found[1]}"


def triton_version() -> tuple[int, int]:
    """Major and minor version of Triton; zeros where there is none."""
    try:
        major, minor = metadata.version("triton").split(".")[:2]
    except metadata.PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)
