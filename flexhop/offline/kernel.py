"""One generated Triton or Gluon kernel: its source, Inductor's metadata, the function."""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import hashlib
import itertools
import linecache
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["Kernel", "kernels_of", "moved", "parts_of"]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel as Inductor generated it.

    Args:
        name: Inductor's name for the kernel, e.g. "triton_tem_fused_flexhop_attention_0". A Gluon
            kernel's function has its own name and is aliased to this one at the end.
        source: the whole module text, with imports and Inductor's decorator.
        kind: Inductor's decorator: "template", "pointwise", "persistent_reduction", ...
        meta: `triton_meta`: "signature" (argument name -> type), "constants", "configs".
        inductor_meta: grid, mutated arguments and further metadata of Inductor.
        size_hints: e.g. {"x": 2048, "r0_": 64}; empty for templates.
        num_warps: warps per program; None if Inductor chooses it at the first run.
        num_stages: depth of the software pipeline; None likewise.
    """

    name: str
    source: str
    kind: str
    meta: dict[str, Any]
    inductor_meta: dict[str, Any]
    size_hints: dict[str, int]
    num_warps: int | None
    num_stages: int | None

    @property
    def is_template(self) -> bool:
        """Whether it comes from a template rather than Inductor's own code generation."""
        return self.kind == "template"

    @property
    def is_gluon(self) -> bool:
        """Whether it is a Gluon kernel; Triton's interpreter does not support Gluon."""
        return "@gluon.jit" in self.source

    @property
    def parameters(self) -> list[str]:
        """Names of the run-time arguments, in order: pointers and scalars."""
        return [a.arg for a in _kernel_function(self.source).args.args if not _is_constexpr(a)]

    @property
    def constexprs(self) -> list[str]:
        """Names of the arguments that a launch configuration sets, e.g. ["XBLOCK"]."""
        return [a.arg for a in _kernel_function(self.source).args.args if _is_constexpr(a)]

    @property
    def constants(self) -> dict[str, Any]:
        """The constants that a template was filled with, e.g. {"BLOCK_M": 128}; else empty."""
        return self.inductor_meta.get("config_args", {})

    @property
    def functions(self) -> list[str]:
        """Names of the kernel and its device functions, in the order of the text."""
        return [node.name for _, node in _functions(self.source)]

    def text(self) -> str:
        """The kernel, its device functions and their constants, without imports and Inductor's
        decorator."""
        functions = [_cut(part, node) for part, node in _functions(self.source)]
        statements = (node for part in parts_of(self.source) for node in part.body)
        constants = [ast.unparse(node) for node in statements if _is_constant(node)]
        return "\n\n\n".join([*functions, *filter(None, ["\n".join(constants)])]) + "\n"

    def function_text(self, name: str) -> str:
        """The text of one function, e.g. `score_mod` or the kernel itself.

        Raises:
            KeyError: there is none of this name.
        """
        for part, node in _functions(self.source):
            if node.name == name or (name == self.name and _is_launched(node)):
                return _cut(part, node) + "\n"
        raise KeyError(f"{self.name} has no function {name}.")

    def module(self) -> types.ModuleType:
        """Execute the source without Inductor's decorator.

        Returns:
            A new module whose attribute `name` is what `@triton.jit` or `@gluon.jit` makes of it.
        """
        filename = f"<{self.name} {hashlib.sha256(self.source.encode()).hexdigest()[:12]}>"
        # Triton reads a kernel's source back through inspect, which asks linecache.
        lines = self.source.splitlines(keepends=True)
        linecache.cache[filename] = (len(self.source), None, lines, filename)
        module = types.ModuleType(self.name)
        for part in parts_of(self.source):
            exec(moved(_compiled(part.text), filename, part.line), module.__dict__)
        return module


class Part(NamedTuple):
    """Some lines of a kernel's text.

    Args:
        text: whole statements, at most one device function.
        line: how many lines of the kernel are above.
        body: their trees, not to be changed; lines count from the text's first.
    """

    text: str
    line: int
    body: tuple[ast.stmt, ...]


_DECORATORS = ("@triton_heuristics.", "@triton.jit", "@gluon.jit")


@functools.lru_cache(maxsize=32)  # a kernel is asked about its parts several times
def parts_of(source: str) -> tuple[Part, ...]:
    """A kernel's text, cut above its device functions: other kernels have most of them, too."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    above = ""
    for number, line in enumerate(lines):
        if line.startswith(_DECORATORS) and not above.startswith(("@", ")")):
            starts.append(number)
        above = line if line.strip() else above
    texts = ["".join(lines[a:b]) for a, b in itertools.pairwise([*starts, len(lines)])]
    try:
        bodies = [_parsed(text) for text in texts]
    except SyntaxError:  # a decorator of several lines was cut in two
        return (Part(source, 0, _parsed(source)),)
    return tuple(map(Part, texts, starts, bodies))


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[ast.stmt, ...]:
    return tuple(ast.parse(text).body)


@functools.lru_cache(maxsize=1024)
def _compiled(text: str) -> types.CodeType:
    """Code of a part without Inductor's decorator, which would require a driver."""
    body: list[ast.stmt] = []
    for node in _parsed(text):
        if isinstance(node, ast.FunctionDef):
            node = copy.copy(node)
            node.decorator_list = [d for d in node.decorator_list if not _is_inductor(d)]
        # Without a GPU there is no driver either.
        if not isinstance(node, ast.Expr) or "set_driver_to_gpu" not in ast.unparse(node):
            body.append(node)
    return compile(ast.Module(body, []), "<kernel>", "exec")


def moved(code: types.CodeType, filename: str, lines: int) -> types.CodeType:
    """The same code further down in a file, for tracebacks and for who reads its text."""
    parts = (
        moved(one, filename, lines) if isinstance(one, types.CodeType) else one
        for one in code.co_consts
    )
    return code.replace(
        co_filename=filename, co_firstlineno=code.co_firstlineno + lines, co_consts=tuple(parts)
    )


def _functions(source: str) -> Iterator[tuple[Part, ast.FunctionDef]]:
    for part in parts_of(source):
        for node in part.body:
            if isinstance(node, ast.FunctionDef):
                yield part, node


def _cut(part: Part, function: ast.FunctionDef) -> str:
    kept = [d.lineno for d in function.decorator_list if not _is_inductor(d)]
    first = min([function.lineno, *kept])
    return "\n".join(part.text.splitlines()[first - 1 : function.end_lineno])


def kernels_of(code: str) -> list[Kernel]:
    """The kernels in Inductor's output code, in order of definition."""
    calls = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func) == "async_compile.triton"
    ]
    return [read_kernel(*(ast.literal_eval(a) for a in call.args[:2])) for call in calls]


def read_kernel(name: str, source: str) -> Kernel:
    """Read a kernel from the two arguments of `async_compile.triton`."""
    function = _kernel_function(source)
    decorator = next(d for d in function.decorator_list if _is_inductor(d))
    assert isinstance(decorator, ast.Call)
    facts = {keyword.arg: keyword.value for keyword in decorator.keywords}

    def read(key: str, default: Any) -> Any:
        return _evaluate(facts[key]) if key in facts else default

    return Kernel(
        name=name,
        source=source,
        kind=ast.unparse(decorator.func).rpartition(".")[2],
        meta=read("triton_meta", {}),
        inductor_meta=read("inductor_meta", {}),
        size_hints=read("size_hints", {}),
        num_warps=read("num_warps", None),
        num_stages=read("num_stages", None),
    )


def _kernel_function(source: str) -> ast.FunctionDef:
    """The function that Inductor decorates; the others are called by it."""
    functions = (function for _, function in _functions(source))
    return next(filter(_is_launched, functions))


def _is_launched(function: ast.FunctionDef) -> bool:
    return any(map(_is_inductor, function.decorator_list))


def _is_constant(node: ast.stmt) -> bool:
    """Whether a statement names a constant that all functions read."""
    return isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("gl.constexpr(")


def _is_constexpr(argument: ast.arg) -> bool:
    return argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation)


def _is_inductor(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and "triton_heuristics." in ast.unparse(decorator.func)


def _evaluate(node: ast.expr) -> Any:
    """Literals, and enums or records such as `DeviceProperties(...)` as plain values."""
    return eval(ast.unparse(node), {"__builtins__": {"set": set}}, _Names())


class _Names(dict[str, Any]):
    """Stand-in for the classes that Inductor's decorators mention."""

    def __missing__(self, name: str) -> Any:
        return _Name(name)


class _Name(str):
    """A class known by name only: calling it gives its arguments, an attribute is its text."""

    def __call__(self, *args: Any, **fields: Any) -> Any:
        return fields or args

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self}.{name}")
