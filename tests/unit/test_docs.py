"""The Python blocks of README.md and docs/ run, page by page, on the CPU.

Blocks of a page share their names, in order. A block that cannot run here carries a marker in the
line before its fence, with the reason: ``<!-- test: gpu -->`` or ``<!-- test: skip (reason) -->``.
"""

import re
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- test: (?P<marker>[^\n]*?) -->\n+)?^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
MARKER = re.compile(r"gpu|skip \(.+\)")


class Block(NamedTuple):
    """One fenced Python block of a page."""

    line: int
    marker: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(text.count("\n", 0, m.start("code")) + 1, m["marker"] or "", m["code"])
        for m in BLOCK.finditer(text)
    ]


def is_runnable(block: Block) -> bool:
    return not block.marker or (block.marker == "gpu" and torch.cuda.is_available())


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")  # pages show eager calls
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_markers_are_known(page: Path):
    assert [b.marker for b in blocks_of(page) if b.marker and not MARKER.fullmatch(b.marker)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path):
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [p.name for p in (ROOT / "docs").glob("*.md") if p.name not in navigation] == []
