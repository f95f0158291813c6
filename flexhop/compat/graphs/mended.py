"""Inductor's own Triton kernels in graphs with flexhop's operators (Triton 3.6).

Such a graph has more kernels than those of templates: lists of blocks, tables, bits of masks, sums
of gradients. LLVM may get them wrong as it does templates (compiler_process.py). Hence they are
marked, and whichever process compiles them imports what heeds the mark. Other graphs, and kernels
that the user wrote, stay as they are. Names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node

from flexhop.compat.kernels.gluon_versions import triton_version
from flexhop.compat.kernels.isolated import MENDED
from flexhop.compat.operators.hop import Operator

__all__ = ["mend_own_graphs"]

_IMPORT = "import flexhop.compat.kernels.triton_runtime\n"
_known: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def mend_own_graphs() -> None:
    """From now on, mark the kernels of graphs with flexhop's operators."""
    if triton_version() != (3, 6):
        return
    meta_of = TritonKernel.inductor_meta_common.__func__  # type: ignore[attr-defined]
    imports_of = TritonKernel.gen_common_triton_imports.__func__  # type: ignore[attr-defined]

    @functools.wraps(meta_of)
    def inductor_meta_common(cls: Any) -> dict[str, Any]:
        meta = meta_of(cls)
        return {**meta, MENDED: True} if _is_own(V.graph) else meta

    @functools.wraps(imports_of)
    def gen_common_triton_imports(cls: Any) -> str:
        imports = imports_of(cls)
        return imports + _IMPORT if _is_own(V.graph) else imports

    TritonKernel.inductor_meta_common = classmethod(inductor_meta_common)  # type: ignore[assignment]
    TritonKernel.gen_common_triton_imports = classmethod(gen_common_triton_imports)  # type: ignore[assignment]


def _is_own(graph: Any) -> bool:
    """Whether an operator of flexhop is in a graph, or was until it was decomposed."""
    if not isinstance(getattr(graph, "module", None), GraphModule):
        return False  # nothing is lowered
    if graph not in _known:
        parts = (part for part in graph.module.modules() if isinstance(part, GraphModule))
        has_own = any(_is_own_node(node) for part in parts for node in part.graph.nodes)
        _known[graph] = has_own or _is_own(getattr(graph, "parent", None))
    return _known[graph]


def _is_own_node(node: Node) -> bool:
    traced = (target for _, target in node.meta.get("source_fn_stack") or ())
    return any(isinstance(target, Operator) for target in (node.target, *traced))
