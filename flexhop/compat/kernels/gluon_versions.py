"""The installed Triton version, and whether Gluon kernels were checked with it."""

from __future__ import annotations

from importlib import metadata


def obstacle(checked: tuple[tuple[int, int], ...]) -> str:
    """Why the installed Triton is not supported; empty if it is one of `checked`."""
    found = triton_version()
    if found in checked:
        return ""
    known = " and ".join(".".join(map(str, version)) for version in checked)
    return f"it was tested with Triton {known}, not {found[0]}.{found[1]}"


def triton_version() -> tuple[int, int]:
    """Major and minor version of Triton; zeros if it is not installed."""
    try:
        major, minor = metadata.version("triton").split(".")[:2]
    except metadata.PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)
