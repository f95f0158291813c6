"""Triton's interpreter rewrites a function when it first runs it; here, a whole file at once.

It reads each function back through tokens, twice. Kernels are made anew for every call, and that
took as long as a third of running them.
"""

from __future__ import annotations

import ast
import functools
import linecache
import types
from typing import Any

from triton.runtime import interpreter
from triton.runtime.interpreter import FunctionRewriter

__all__ = ["rewrite_ast"]

_original = FunctionRewriter.rewrite_ast


def rewrite_ast(self: Any) -> Any:
    """Instead of `FunctionRewriter.rewrite_ast`, the same in Triton 3.6 to 3.9."""
    code = self.fn.__code__
    lines = tuple(linecache.getlines(code.co_filename, self.fn.__globals__))
    rewritten = _rewritten(code.co_filename, lines).get((code.co_name, code.co_firstlineno))
    if rewritten is None:
        return _original(self)
    # The one name that rewritten text uses. The original leaves all of its module's names, also in
    # Triton's library, which is compiled later.
    names = self.fn.__globals__
    names.setdefault("interpreter_semantic", interpreter.interpreter_semantic)
    local: dict[str, Any] = dict(self.kwargs)
    exec(rewritten, names, local)
    return local[self.fn.__name__]


@functools.lru_cache(maxsize=32)
def _rewritten(filename: str, lines: tuple[str, ...]) -> dict[tuple[str, int], types.CodeType]:
    """Code that defines each function of a file, by name and first line (of its decorators)."""
    found: dict[tuple[str, int], types.CodeType] = {}
    for node in ast.parse("".join(lines)).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            node.decorator_list = []
            tree = ast.Module([FunctionRewriter.ast_transformer.visit(node)], [])
            code = compile(ast.fix_missing_locations(tree), filename, "exec")
            found[node.name, first] = code
    return found
