"""Call back around the import of a module, so that `import flexhop` need not import it.

torch 2.11 to 2.15: `torch._dynamo` takes two seconds, and `import torch` does not import it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["after_import"]


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
