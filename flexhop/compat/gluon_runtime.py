"""What a generated Gluon kernel imports, wherever Inductor compiles it.

Inductor's launcher makes an `ASTSource` of every kernel; a Gluon kernel needs a `GluonASTSource`.
Importing this file lets the launcher take the one that fits, also in Inductor's compile workers,
which know a kernel by its text alone. The name is the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.runtime import triton_heuristics
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = ["load_async"]


class _SourceByDialect:
    """Stands for `ASTSource`; calls make the source of a function in its own dialect."""

    def __init__(self, portable: Any) -> None:
        self.portable = portable

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        is_gluon = getattr(function, "is_gluon", None)
        made = GluonASTSource if is_gluon is not None and is_gluon() else self.portable
        return made(function, *args, **kwargs)


def _install() -> None:
    runtime: Any = triton_heuristics
    if not isinstance(runtime.ASTSource, _SourceByDialect):
        runtime.ASTSource = _SourceByDialect(runtime.ASTSource)


_install()

# A copy by the tensor memory accelerator; 3.6: async_copy_global_to_shared, since 3.9: async_load.
load_async: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
