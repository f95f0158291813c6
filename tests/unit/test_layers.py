"""The import law: which room may import which (docs/walk.md). Arrows point downwards only."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "flexhop"

# Room -> rooms that it may import. A room is a folder or a file directly under flexhop/; the files
# of the block mask are one room.
LAW: dict[str, set[str]] = {
    "worded": set(),
    "notices": {"worded"},
    "errors": {"worded", "notices"},
    "fingerprint": set(),
    "indexing": {"errors", "compat"},
    "debug": {"errors"},
    "compat": {"errors", "debug"},
    "tanh": {"errors", "compat"},
    "options": {"errors"},
    "pages": set(),
    "key_mods": {"pages", "errors"},
    "mods": {"errors", "tanh", "key_mods"},
    "masks": {"mods", "errors"},
    "block_lists": set(),
    "block_mask": {"block_lists", "mods", "errors", "indexing", "compat"},
    "ops": {"block_lists", "mods", "options", "errors", "indexing", "fingerprint", "compat"}
    | {"tanh", "key_mods"},
    "sinks": set(),
    "caches": {"pages", "key_mods", "ops"},
    "paged": {"block_mask", "mods", "errors", "pages"},
    "bounded": set(),
    "row_tables": {"mods", "bounded"},
    "packing": {"block_mask", "row_tables", "mods"},
    "nested_mask": {"block_mask", "row_tables", "mods", "errors", "compat"},
    "nested": {"nested_mask", "packing", "row_tables", "mods", "ops", "compat"},
    "dropout": {"ops"},
    "attention": {"sinks", "dropout", "ops", "nested", "block_mask", "mods", "options", "errors"}
    | {"caches", "pages", "key_mods"},
    "varlen": {"attention", "dropout", "packing", "row_tables", "mods", "ops"},
    "sdpa": {"attention", "dropout", "nested", "packing", "row_tables", "block_mask", "masks"}
    | {"mods", "ops"},
    "rotary": set(),
    "flash_probabilities": {"dropout", "ops"},
    "flash_mods": {"attention", "dropout", "packing", "mods", "ops", "options"},
    "cache_checks": {"flash_mods", "ops"},
    "flash_cache": {"cache_checks", "flash_mods", "rotary", "attention", "block_mask", "mods"}
    | {"options", "ops", "caches", "key_mods"},
    "flash_paged": {"flash_cache", "flash_mods", "attention", "block_mask", "caches", "key_mods"}
    | {"ops"},
    "flash": {"flash_paged", "flash_cache", "flash_mods", "flash_probabilities", "dropout"}
    | {"varlen", "attention", "ops"},
    "templates": set(),
    "lowering": {
        "ops",
        "bounded",
        "tanh",
        "options",
        "mods",
        "errors",
        "indexing",
        "templates",
        "debug",
        "compat",
        "key_mods",
    },
    "report": {"options"},
    "explain": {"report", "attention", "block_mask", "block_lists", "ops", "lowering", "mods"}
    | {"debug", "compat", "errors", "nested", "pages", "key_mods"},
    "plugin": {"ops", "lowering", "mods", "indexing", "errors", "debug", "compat"},
    "offline": {"attention", "block_mask", "block_lists", "ops", "tanh", "lowering"}
    | {"templates", "options", "mods", "indexing", "plugin", "errors", "compat"},
    "__init__": {"attention", "block_mask", "masks", "mods", "options", "errors", "plugin"}
    | {
        "dropout",
        "explain",
        "offline",
        "paged",
        "pages",
        "varlen",
        "nested_mask",
        "sdpa",
        "flash",
    },
}


def room_of_module(parts: tuple[str, ...]) -> str:
    """Room of a module, from the parts of its name below flexhop."""
    is_mask = parts[0].startswith("block_") and parts[0] != "block_lists"
    return "block_mask" if is_mask or parts[0] == "mask_creation" else parts[0]


def room_of(path: Path) -> str:
    return room_of_module(path.relative_to(PACKAGE).with_suffix("").parts)


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


def imported_rooms(path: Path) -> set[str]:
    """Rooms of flexhop that a file imports, at any depth of the file."""
    package = ".".join(("flexhop", *path.relative_to(PACKAGE).parts[:-1]))
    names = [
        name
        for node in ast.walk(ast.parse(path.read_text()))
        for name in imported_modules(node, package)
    ]
    below = [tuple(name.split(".")[1:]) for name in names if name.startswith("flexhop.")]
    return {room_of_module(parts) for parts in below}


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
