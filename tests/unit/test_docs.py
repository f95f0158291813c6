"""The pages of the repository: their Python runs, their links lead somewhere, their names exist.

Blocks of a page share their names, in order. A block that cannot run here carries a marker in the
line before its fence, with the reason: ``<!-- test: gpu -->`` or ``<!-- test: skip (reason) -->``.
"""

import functools
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
READMES = [ROOT / "flexhop" / room / "README.md" for room in ("templates", "compat")]
BLOCK = re.compile(
    r"(?:^<!-- test: (?P<marker>[^\n]*?) -->\n+)?^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
MARKER = re.compile(r"gpu|skip \(.+\)")
INCLUDE = re.compile(r'^--8<-- "(?P<path>[^"]+)"$', re.MULTILINE)
CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FILE_NAME = re.compile(r"[\w*][\w.*/-]*\.(py|jinja|md|yml|toml|svg|expected)|[\w./-]+/")
IDENTIFIER = re.compile(r"[a-z]+(_[a-z]+)+")


class Block(NamedTuple):
    """One fenced Python block of a page."""

    line: int
    marker: str
    code: str


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(text.count("\n", 0, m.start("code")) + 1, m["marker"] or "", m["code"])
        for m in BLOCK.finditer(text)
    ]


def is_runnable(block: Block) -> bool:
    return not block.marker or (block.marker == "gpu" and torch.cuda.is_available())


def as_built(page: Path) -> str:
    """The page with the text of the files that it includes."""
    return INCLUDE.sub(lambda m: (ROOT / m["path"]).read_text(), page.read_text())


@functools.cache
def repository_files() -> list[str]:
    """Files and folders of the checkout, as paths that begin with a slash."""
    folders = ("flexhop", "tests", "docs", "benchmarks", "examples", "scripts", "requirements")
    below = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    every = [*(ROOT.glob("*")), *below]
    return [f"/{name_of(path)}{'/' if path.is_dir() else ''}" for path in every]


@functools.cache
def words_of_sources() -> set[str]:
    """Every word of the package, its templates and its tests."""
    suffixes = (".py", ".jinja", ".toml")
    paths = [path for name in repository_files() if (path := ROOT / name[1:]).suffix in suffixes]
    return {word for path in paths for word in re.findall(r"\w+", path.read_text())}


def exists(name: str) -> bool:
    """Whether some file or folder ends with this path; `*` stands for any characters."""
    pattern = re.compile("/" + re.escape(name).replace(r"\*", "[^/]*") + "$")
    return any(pattern.search(path) for path in repository_files())


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")  # pages show eager calls
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    blocks = [block for block in blocks_of(page) if is_runnable(block)]
    if not blocks:
        pytest.skip("no Python block of this page runs without a GPU")
    module = types.ModuleType(f"docs_{page.stem}")  # Dynamo looks functions up in their module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks:
        # Blank lines in front make tracebacks point at the line of the page.
        exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), vars(module))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_markers_are_known(page: Path):
    assert [b.marker for b in blocks_of(page) if b.marker and not MARKER.fullmatch(b.marker)] == []


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=name_of)
def test_relative_links_lead_somewhere(page: Path):
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=name_of)
def test_named_files_exist(page: Path):
    spans = set(CODE_SPAN.findall(page.read_text()))
    assert [s for s in sorted(spans) if FILE_NAME.fullmatch(s) and not exists(s)] == []


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *READMES], ids=name_of)
def test_named_functions_exist(page: Path):
    spans = set(CODE_SPAN.findall(page.read_text()))
    names = {s.removesuffix("()") for s in spans if IDENTIFIER.fullmatch(s.removesuffix("()"))}
    assert sorted(names - words_of_sources()) == []


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=name_of)
def test_dataclasses_are_where_the_page_says(page: Path):
    named = re.findall(r"dataclass(?:es)?\s+in\s+`([^`]+)`", page.read_text())
    files = [
        path
        for name in named
        for path in (ROOT / "flexhop").rglob("*.py")
        if path.as_posix().endswith(f"/{name.removeprefix('flexhop/')}")
    ]
    assert [path.name for path in files if "dataclasses.dataclass(" not in path.read_text()] == []
    assert len(files) >= len(named)


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_includes_are_whole(page: Path):
    # A formatter of Markdown once put blanks into an include: the page built, and showed nothing.
    marks = re.findall(r"^.*-\s*8\s*<\s*-.*$", page.read_text(), re.MULTILINE)
    assert [mark for mark in marks if not INCLUDE.fullmatch(mark)] == []


def test_the_page_of_a_kernel_shows_a_kernel():
    page = as_built(ROOT / "docs" / "kernel.md")
    assert "@triton.jit\ndef " in page
    legend = page[page.index("## How to read it") : page.index("## The kernel")]
    named = {name for span in CODE_SPAN.findall(legend) for name in re.findall(r"\w+_\w+", span)}
    shown = set(re.findall(r"\w+", page[page.index("@triton.jit") :]))
    assert sorted(named - shown) == []


def test_the_glossary_is_short():
    rows = re.findall(
        r"^\| (\*\*.+?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE
    )
    words = [word for row in rows for word in re.findall(r"\*\*(.+?)\*\*", row)]
    assert 20 <= len(rows) <= 40 and len(set(words)) == len(words)


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    paths = [page.relative_to(ROOT / "docs").as_posix() for page in DOCS]
    assert [path for path in paths if path not in navigation] == []


def test_the_site_builds_strictly(tmp_path: Path):
    pytest.importorskip("mkdocs", reason="the site is built by mkdocs: pip install --group docs")
    pytest.importorskip("material", reason="its theme is mkdocs-material")
    pytest.importorskip("mkdocstrings", reason="its reference is written by mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "def" in (tmp_path / "kernel" / "index.html").read_text()
