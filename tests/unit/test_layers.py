"""The import law: which room may import which (docs/walk.md). Arrows point downwards only."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "flexhop"

# Room -> rooms that it may import. A room is a folder or a file directly under flexhop/.
LAW: dict[str, set[str]] = {
    "errors": set(),
    "compat": {"errors", "options", "templates"},
    "options": {"errors"},
    "mods": {"errors", "compat"},
    "masks": {"mods", "errors"},
    "analysis": {"compat"},
    "block_mask": {"analysis", "mods", "errors", "compat"},
    "ops": {"analysis", "block_mask", "mods", "options", "errors", "compat"},
    "cache": {"block_mask", "mods", "ops", "errors"},
    "sequences": {"block_mask", "mods", "ops", "errors", "compat"},
    "attention": {"cache", "sequences", "ops", "block_mask", "mods", "options", "errors"}
    | {"compat"},
    "varlen": {"attention", "sequences", "mods", "ops", "errors"},
    "distributed": {"attention", "cache", "sequences", "block_mask", "mods", "ops", "errors"}
    | {"compat"},
    "sdpa": {"attention", "sequences", "masks", "mods", "ops", "errors"},
    "flash": {"varlen", "attention", "cache", "sequences", "block_mask", "mods", "options", "ops"}
    | {"errors"},
    "templates": set(),
    "lowering": {
        "analysis",
        "block_mask",
        "ops",
        "options",
        "mods",
        "templates",
        "errors",
        "compat",
    },
    "reports": {"attention", "sequences", "cache", "block_mask", "ops", "lowering", "mods"}
    | {"options", "compat", "errors"},
    "plugin": {
        "distributed",
        "block_mask",
        "ops",
        "lowering",
        "mods",
        "options",
        "errors",
        "compat",
    },
    "offline": {"errors", "compat"},
    "nn": {"attention", "block_mask", "mods", "errors"},
    "integrations": {"attention", "block_mask", "mods", "sdpa", "compat"},
    "__init__": {"attention", "block_mask", "cache", "flash", "masks", "mods", "ops", "options"}
    | {"errors", "nn", "plugin", "reports", "sdpa", "sequences", "varlen", "compat"},
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(node: ast.AST, package: str) -> list[str]:
    """Absolute names of the modules (or members) that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
        module = ".".join(part for part in (base, node.module) if part)
        return [f"{module}.{alias.name}" for alias in node.names]
    return []


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, without what `if TYPE_CHECKING:` holds, which never runs."""
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not is_for_types:
            yield child
            yield from runtime_nodes(child)


def imported_rooms(path: Path) -> set[str]:
    """Rooms of flexhop that a file imports, at any depth of the file."""
    package = ".".join(("flexhop", *path.relative_to(PACKAGE).parts[:-1]))
    names = [
        name
        for node in runtime_nodes(ast.parse(path.read_text()))
        for name in imported_modules(node, package)
    ]
    return {name.split(".")[1] for name in names if name.startswith("flexhop.")}


def local_imports(path: Path) -> list[int]:
    """Lines of flexhop imports that hide inside functions."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    package = ".".join(("flexhop", *path.relative_to(PACKAGE).parts[:-1]))
    return [
        inner.lineno
        for outer in ast.walk(ast.parse(path.read_text()))
        if isinstance(outer, functions)
        for inner in ast.walk(outer)
        for name in imported_modules(inner, package)
        if name.startswith("flexhop")
    ]


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path):
    room = room_of(path)
    assert room in LAW, f"flexhop/{room} has no place in the import law; give it one here"
    known = imported_rooms(path) & LAW.keys()  # members of flexhop/__init__ are not rooms
    assert known <= LAW[room] | {room}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_stand_at_the_top(path: Path):
    # Both import the lowering, which brings Inductor, only when it is needed: at the first graph
    # that is traced, and when somebody asks for an explanation.
    if path.name not in ("plugin.py", "explain.py"):
        assert local_imports(path) == []


def test_the_law_has_no_stale_rooms():
    assert {room_of(path) for path in SOURCES} >= LAW.keys()


def test_the_law_has_no_unused_permission():
    used: dict[str, set[str]] = {room: set() for room in LAW}
    for path in SOURCES:
        used[room_of(path)] |= imported_rooms(path)
    assert {room: unused for room in LAW if (unused := LAW[room] - used[room])} == {}


# Files outside of its folders that may say the name of a dialect, and why.
NAMES_HOPPER = {
    "options/__init__.py": "the registry, and tells users the values of `backend`",
    "flash/__init__.py": "tells users on which GPUs gradients vary from run to run",
    "reports/report.py": "tells users the names of its kernels",
    "templates/README.md": "the legend of all templates",
}


def test_only_the_folders_of_a_dialect_know_it():
    """What others must know of it is in the protocol of lowering/dialect.py."""
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".jinja", ".md")]
    named = {
        str(path.relative_to(PACKAGE)) for path in files if "hopper" in path.read_text().lower()
    }
    own = ("lowering/hopper/", "templates/hopper/")
    assert {name for name in named if not name.startswith(own)} == NAMES_HOPPER.keys()


def floor_of(room: str) -> int:
    """How many rooms lie on the longest way down; an endless recursion would be a circle."""
    return 1 + max((floor_of(below) for below in LAW[room] - {room}), default=0)


def test_the_house_is_low():
    assert len(LAW) <= 25
    assert max(floor_of(room) for room in LAW if room != "__init__") <= 10
