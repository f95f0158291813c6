"""A fingerprint of the sources that decide what a compiled graph contains.

Inductor's caches are keyed by the graph, its inputs and PyTorch's own sources, not by ours. The
fingerprint is one of the operator's options, so an edit of a template or lowering is a new key.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


@functools.cache
def source_fingerprint(package: Path = _PACKAGE) -> str:
    """First 16 hexadecimal digits of the SHA-256 of every source file of the package.

    All of them, because the CPU's graphs hold the definition (ops/eager.py) and whatever it calls:
    a list of rooms would be wrong as soon as a helper moved.
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".jinja"):
            digest.update(path.relative_to(package).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
