"""Refuse private PyTorch outside ``flexhop/compat``: the import law, without needing ruff.

Private is ``torch._anything``, imported or reached by attribute. Run without arguments it reads
the package, the benchmarks, the examples and the scripts; file names limit it to those.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKED = ("flexhop", "benchmarks", "examples", "scripts")
ALLOWED = ROOT / "flexhop" / "compat"


def dotted_name(node: ast.expr) -> str:
    """``a.b.c`` for nested attributes of a name, else the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted_name(node.value)):
        return f"{base}.{node.attr}"
    return ""


def named_modules(node: ast.AST) -> Iterator[str]:
    """Every dotted name that one syntax node brings in."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute):
        yield dotted_name(node)


def is_private(name: str) -> bool:
    """Whether the name lies in PyTorch behind an underscore (dunders are public)."""
    first, *rest = name.split(".")
    return first == "torch" and any(p.startswith("_") and not p.startswith("__") for p in rest)


def private_uses(source: str) -> list[tuple[int, str]]:
    """Line and name of each use of private PyTorch in a source text."""
    return sorted(
        {
            (node.lineno, name)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute)
            for name in named_modules(node)
            if is_private(name)
        }
    )


def checked_files(arguments: list[str]) -> list[Path]:
    """The files to read: the arguments, or every Python file of the checked folders."""
    given = [Path(argument).resolve() for argument in arguments]
    files = given or [path for folder in CHECKED for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in files if not path.is_relative_to(ALLOWED))


def main(arguments: list[str]) -> int:
    """Print every violation; the exit status says whether there was one."""
    violations = [
        f"{path.relative_to(ROOT)}:{line}: {name} (private PyTorch belongs in flexhop/compat)"
        for path in checked_files(arguments)
        for line, name in private_uses(path.read_text())
    ]
    print("\n".join(violations), end="\n" if violations else "")
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
