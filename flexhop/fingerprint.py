"""A fingerprint of the sources that decide what a compiled graph contains.

Inductor's caches are keyed by the graph, its inputs and PyTorch's own sources, not by ours. The
fingerprint is one of the operator's options, so an edit of a template or lowering is a new key.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_ROOMS = ("ops", "lowering", "templates", "compat")


@functools.cache
def source_fingerprint() -> str:
    """First 16 hexadecimal digits of the SHA-256 of operator, lowering and template sources."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((root / room).glob("*")):
            if path.suffix in (".py", ".jinja"):
                digest.update(path.name.encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
