"""The pages of the repository: their Python runs, their links lead somewhere, their names exist.

Blocks of a page share their names, in order. A block that cannot run here carries a marker in the
line before its fence, with the reason: ``<!-- test: gpu -->`` or ``<!-- test: skip (reason) -->``.
"""

import functools
import importlib.util
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from benchmarks import chart, report
from flexhop import masks, mods
from flexhop.compat.kernels import gluon_versions
from flexhop.mods import library

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
READMES = [ROOT / "flexhop" / room / "README.md" for room in ("templates", "compat")]
BLOCK = re.compile(
    r"(?:^<!-- test: (?P<marker>[^\n]*?) -->\n+)?^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
MARKER = re.compile(r"gpu|hopper|skip \(.+\)")
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
    if block.marker == "hopper":
        return gluon_versions.obstacle() == ""
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


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_lines_fit_100_columns(page: Path):
    """Tables are exempt, and so are addresses, which cannot be broken."""
    lines = enumerate(page.read_text().splitlines(), 1)
    without_addresses = ((n, re.sub(r"https?://\S+|\]\([^)]*\)", "", text)) for n, text in lines)
    wide = [n for n, text in without_addresses if len(text) > 100 and not text.startswith("|")]
    assert wide == []


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
    assert 20 <= len(words) <= 40 and len(set(words)) == len(words)


def test_the_walk_passes_every_room():
    table = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "walk.md").read_text(), re.MULTILINE)
    named = sorted(name.rstrip("/") for row in table for name in CODE_SPAN.findall(row))
    rooms = [
        path for path in (ROOT / "flexhop").iterdir() if not path.name.startswith(("_", "py."))
    ]
    assert named == sorted(path.name for path in rooms)


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    lab = ROOT / "docs" / "lab"  # journals, which the pages of the designs link to
    paths = [p.relative_to(ROOT / "docs").as_posix() for p in DOCS if not p.is_relative_to(lab)]
    assert [path for path in paths if path not in navigation] == []


def test_charts_and_the_table_of_the_readme_are_those_of_the_recorded_results():
    for path, text in report.record(ROOT).items():
        assert path.read_text() == text, f"{name_of(path)}: run python -m benchmarks.report"


def test_the_headline_is_the_recorded_mean():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    means = [
        chart.read_results(page, d).speedup("geometric mean") for d in ("Forward", "Backward")
    ]
    head = " ".join((ROOT / "README.md").read_text().split("```")[0].split())
    assert "{:.1f}x faster forward and {:.1f}x faster backward".format(*means) in head


def gallery() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "scripts" / "draw_gallery.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_gallery_is_complete():
    """Every public function of masks and mods that makes a mod has an image on the page."""
    page = (ROOT / "docs" / "gallery.md").read_text()
    makers = [(masks, name) for name in vars(masks)] + [(mods, name) for name in vars(library)]
    public = {
        name
        for room, name in makers
        if callable(made := getattr(room, name, None))
        and getattr(made, "__module__", "") in (masks.__name__, library.__name__)
        and not name.startswith(("_", "ids_from", "alibi_slopes"))
    }
    drawn = {name.removeprefix("gallery/") for name in gallery().drawings()} - {"tutorial"}
    assert public == drawn
    assert [name for name in sorted(drawn) if f"(images/gallery/{name}.svg)" not in page] == []
    assert [name for name in sorted(public) if not re.search(rf"`[^`]*\b{name}\b", page)] == []


def test_the_gallery_is_drawn_by_this_code():
    for name, draw in gallery().drawings().items():
        path = ROOT / "docs" / "images" / f"{name}.svg"
        assert path.read_text() == draw(), f"{name_of(path)}: run scripts/draw_gallery.py"


def test_the_site_builds_strictly(tmp_path: Path):
    pytest.importorskip("mkdocs", reason="the site is built by mkdocs: pip install --group docs")
    pytest.importorskip("material", reason="its theme is mkdocs-material")
    pytest.importorskip("mkdocstrings", reason="its reference is written by mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "def" in (tmp_path / "kernel" / "index.html").read_text()
