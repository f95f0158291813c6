"""A fingerprint of the sources that determine compiled graphs.

Inductor's cache keys cover the graph, its inputs and PyTorch's own sources, but not flexhop's.
Every operator of ours has the fingerprint among its operands, so editing a template or lowering
changes the key.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


@functools.cache
def source_fingerprint(package: Path = _PACKAGE) -> str:
    """First 16 hexadecimal digits of the SHA-256 of every source file of the package.

    It covers all files, because CPU graphs contain the reference (ops/eager.py) and everything
    that it calls. A list of rooms would be wrong as soon as a helper moved.
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".jinja", ".h"):
            digest.update(path.relative_to(package).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
