"""Private names of PyTorch's flex_attention module, which many projects import from there.

torch 2.11 to 2.15: types of mods (`_mask_mod_signature`), constants (`_DEFAULT_SPARSE_BLOCK_SIZE`)
and helpers that make masks (`_create_sparse_block_from_block_mask`). Which ones exist differs.
"""

from __future__ import annotations

from typing import Any

import torch.nn.attention.flex_attention as torch_module

__all__ = ["private_name"]


def private_name(name: str, module: str) -> Any:
    """What the installed PyTorch has under this name.

    Args:
        name: any name; those with one underscore in front are private.
        module: who is asked for it, for the error.

    Raises:
        AttributeError: the name is not private, or PyTorch's module has no such name.
    """
    is_private = name.startswith("_") and not name.startswith("__")
    if not (is_private and hasattr(torch_module, name)):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(torch_module, name)
