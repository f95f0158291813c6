"""Triton's interpreter rewrites a function when it first runs it; here, each text once.

It reads each function back through tokens, twice. Kernels are made anew for every call, most of
their functions with the same text, and that took as long as a third of running them.
"""

from __future__ import annotations

import ast
import functools
import linecache
import types
from typing import Any

from triton.runtime import interpreter
from triton.runtime.interpreter import FunctionRewriter

from flexhop.offline.kernel import moved, parts_of

__all__ = ["rewrite_ast"]

_original = FunctionRewriter.rewrite_ast


def rewrite_ast(self: Any) -> Any:
    """Instead of `FunctionRewriter.rewrite_ast`, the same in Triton 3.6 to 3.9."""
    code = self.fn.__code__
    lines = tuple(linecache.getlines(code.co_filename, self.fn.__globals__))
    text = _functions(lines).get((code.co_name, code.co_firstlineno))
    if text is None:
        return _original(self)
    # The one name that rewritten text uses. The original leaves all of its module's names, also in
    # Triton's library, which is compiled later.
    names = self.fn.__globals__
    names.setdefault("interpreter_semantic", interpreter.interpreter_semantic)
    local: dict[str, Any] = dict(self.kwargs)
    exec(moved(_rewritten(text), code.co_filename, code.co_firstlineno - 1), names, local)
    return local[self.fn.__name__]


@functools.lru_cache(maxsize=32)
def _functions(lines: tuple[str, ...]) -> dict[tuple[str, int], str]:
    """Text of each function of a file, by name and first line (of Triton's decorator)."""
    found: dict[tuple[str, int], str] = {}
    for part in parts_of("".join(lines)):
        for node in part.body:
            if isinstance(node, ast.FunctionDef):
                starts = [node.lineno, *(one.lineno for one in node.decorator_list)]
                for first in (line + part.line for line in starts):
                    found[node.name, first] = "".join(
                        lines[first - 1 : (node.end_lineno or node.lineno) + part.line]
                    )
    return found


@functools.lru_cache(maxsize=1024)
def _rewritten(text: str) -> types.CodeType:
    """Code that defines a function, whose text starts in line 1."""
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef)
    node.decorator_list = []
    tree = ast.Module([FunctionRewriter.ast_transformer.visit(node)], [])
    return compile(ast.fix_missing_locations(tree), "<kernel>", "exec")
