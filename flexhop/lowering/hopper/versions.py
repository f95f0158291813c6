"""The Triton versions whose Gluon the kernels support.

Gluon changes between releases, and so does the generated machine code. A version counts as checked
if tests/kernel/test_compiled.py finds neither spills nor serialised products.
"""

from __future__ import annotations

from flexhop.compat.kernels import gluon_versions

CHECKED = ((3, 6), (3, 7))


def obstacle() -> str:
    """Why the installed Triton is not supported; empty if it is."""
    return gluon_versions.obstacle(CHECKED)
