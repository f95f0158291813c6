"""The versions of Triton whose Gluon the kernels are written in.

Gluon changes between releases, and so does the machine code that is made of it: a version counts
when tests/kernel/test_compiled.py finds neither spills nor products that wait for each other.
"""

from __future__ import annotations

from flexhop.compat import gluon_versions

CHECKED = ((3, 6), (3, 7))


def obstacle() -> str:
    """Why the installed Triton will not do; empty if it will."""
    return gluon_versions.obstacle(CHECKED)
