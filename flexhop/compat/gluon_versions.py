"""Which Triton is there, and which versions have the Gluon that the Hopper kernels are written in.

Gluon changes between releases, and so does the machine code that is made of it: a version counts
when tests/kernel/test_compiled.py finds neither spills nor products that wait for each other.
"""

from __future__ import annotations

from importlib import metadata

CHECKED = ((3, 6), (3, 7))


def obstacle() -> str:
    """Why the installed Triton will not do; empty if it will."""
    found = triton_version()
    if found in CHECKED:
        return ""
    known = " and ".join(".".join(map(str, version)) for version in CHECKED)
    return f"it is checked with Triton {known}, not {found[0]}.{found[1]}"


def triton_version() -> tuple[int, int]:
    """Major and minor version of Triton; zeros where there is none."""
    try:
        major, minor = metadata.version("triton").split(".")[:2]
    except metadata.PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)
