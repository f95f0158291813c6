"""Imports of PyTorch's modules: callbacks around them, and private names that projects import.

torch 2.11 to 2.15. `torch._dynamo` takes two seconds, and `import torch` does not import it; with
a callback, `import flexhop` need not. Many projects import private names from PyTorch's
flex_attention module: types of mods (`_mask_mod_signature`), constants
(`_DEFAULT_SPARSE_BLOCK_SIZE`) and helpers that make masks
(`_create_sparse_block_from_block_mask`). Which ones exist differs.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch.nn.attention.flex_attention as torch_module

__all__ = ["after_import", "private_name"]


def after_import(
    name: str, callback: Callable[[], None], before: Callable[[], None] = lambda: None
) -> None:
    """Call `callback` once the module is imported: now, if it already is.

    before: called when its import begins, if it does.
    """
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _Watch(name, callback, before))


class _Watch(importlib.abc.MetaPathFinder):
    """Finds one module like other finders, and calls back around its loader."""

    def __init__(
        self, name: str, callback: Callable[[], None], before: Callable[[], None]
    ) -> None:
        self.name, self.callback, self.before = name, callback, before

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.callback, self.before)
        return spec


class _Loader(importlib.abc.Loader):
    """The real loader between both callbacks."""

    def __init__(
        self,
        loader: importlib.abc.Loader,
        callback: Callable[[], None],
        before: Callable[[], None],
    ) -> None:
        self.loader, self.callback, self.before = loader, callback, before

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.before()
        # The module must look untouched.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.callback()


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
