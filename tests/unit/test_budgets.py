"""Size budgets: a file or function that outgrows them is asking to be split."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES = 400
FUNCTION_LINES = 60
TEMPLATE_LINES = 120

SOURCES = sorted(
    path
    for folder in ("flexhop", "benchmarks", "examples", "scripts")
    for path in (ROOT / folder).rglob("*.py")
)
TEMPLATES = sorted((ROOT / "flexhop" / "templates").rglob("*.jinja"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def line_count(path: Path) -> int:
    return len(path.read_text().splitlines())


def long_functions(path: Path) -> list[str]:
    """``name: lines`` of every function over the budget; a docstring does not count."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = ast.get_docstring(node) is not None
            first = node.body[min(int(documented), len(node.body) - 1)].lineno
            lines = (node.end_lineno or first) - first + 1
            if lines > FUNCTION_LINES:
                found.append(f"{node.name}: {lines}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_file_budget(path: Path):
    assert line_count(path) <= FILE_LINES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_function_budget(path: Path):
    assert long_functions(path) == []


@pytest.mark.parametrize("path", TEMPLATES, ids=name_of)
def test_template_budget(path: Path):
    assert line_count(path) <= TEMPLATE_LINES
