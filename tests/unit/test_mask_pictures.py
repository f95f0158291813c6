"""Pictures of block masks: what is drawn is what is visited."""

import itertools
import re
import sys
from xml.etree import ElementTree

import pytest
import torch

import flexhop
from flexhop.block_mask.picture import COLORS, EMPTY, FULL, PARTIAL, outline
from flexhop.errors import MissingPackageError, OptionValueError
from flexhop.masks import causal, document, sliding_window


def make(mask_mod, queries, keys, block=16, batch=None, heads=None):
    return flexhop.create_block_mask(mask_mod, batch, heads, queries, keys, "cpu", block)


def by_batch(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (kv_idx >= 16 * b) | (h == 1)


def expected_cells(mask, batch=0, head=0, step=1):
    """Cells by a loop over blocks, from the fields of the mask."""
    visited = mask.to_dense()[batch, head]
    full = visited.clone().zero_()
    for row in range(full.shape[0]):
        for entry in range(int(mask.full_kv_num_blocks[batch, head, row])):
            full[row, mask.full_kv_indices[batch, head, row, entry]] = 1
    rows = range(0, visited.shape[0], step)
    columns = range(0, visited.shape[1], step)

    def cell(row, column):
        place = slice(row, row + step), slice(column, column + step)
        if not visited[place].any():
            return EMPTY
        return FULL if full[place].all() else PARTIAL

    return [[cell(row, column) for column in columns] for row in rows]


def cells_of(image):
    """Cells of an SVG image, painted rectangle by rectangle."""
    root = ElementTree.fromstring(image)
    columns, rows = (int(n) for n in root.get("viewBox").split()[2:])
    cells = [[EMPTY] * columns for _ in range(rows)]
    for path in root.iter("{http://www.w3.org/2000/svg}path"):
        kind = COLORS.index(path.get("fill"))
        for place in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-(\d+)z", path.get("d")):
            left, top, width, height, back = (int(number) for number in place)
            assert width == back
            for row, column in itertools.product(range(height), range(width)):
                assert cells[top + row][left + column] == EMPTY  # nothing is painted twice
                cells[top + row][left + column] = kind
    return cells


ids = torch.arange(200) // 70
MASKS = {
    "causal": make(causal, 128, 128),
    "window, odd lengths": make(sliding_window(40), 100, 200),
    "documents": make(document(ids), 200, 200),
    "nothing": make(lambda b, h, q_idx, kv_idx: kv_idx < 0, 64, 64),
    "one query": make(lambda b, h, q_idx, kv_idx: kv_idx < 100, 1, 300),
}


@pytest.mark.parametrize("grid_size", [64, 3, 1])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_svg_shows_the_blocks(mask, grid_size):
    blocks = max(mask.to_dense().shape[2:])
    steps = {n: -(-n // min(n, grid_size)) for n in mask.to_dense().shape[2:]}
    cells = cells_of(mask.to_svg(grid_size=grid_size))
    if len(set(steps.values())) == 1:
        assert cells == expected_cells(mask, step=steps[blocks])
    else:
        assert [len(cells), len(cells[0])] == [-(-n // steps[n]) for n in steps]


def test_batches_and_heads_have_pictures_of_their_own():
    mask = make(by_batch, 64, 64, batch=3, heads=2)
    for batch, head in ((0, 0), (2, 0), (1, 1)):
        assert cells_of(mask.to_svg(batch, head)) == expected_cells(mask, batch, head)
    with pytest.raises(OptionValueError, match="Invalid head value 2: it must be 0 to 1"):
        mask.to_svg(head=2)


def test_notebooks_get_figures_and_a_legend():
    mask = make(by_batch, 64, 64, batch=3, heads=2)
    page = ElementTree.fromstring(mask._repr_html_().replace("&nbsp;", " "))
    figures = list(page.iter("figure"))
    assert [figure.findtext("figcaption") for figure in figures] == [
        "(0, 0)", "(0, 1)", "(1, 0)", "(1, 1)"
    ]  # fmt: skip
    text = "".join(page.itertext())
    assert "and 2 more" in text and "sparsity=" in text
    assert all(name in text for name in ("full", "partial", "empty"))
    second = ElementTree.tostring(figures[1][0], encoding="unicode")
    assert cells_of(second) == expected_cells(mask, 0, 1)


def test_notebooks_do_not_wait_for_a_mask_without_data():
    assert "kv_indices" in make(causal, 64, 64).to("meta")._repr_html_()


def test_large_masks_stay_small():
    length = 1 << 17
    dense = torch.ones(1, 1, length // 128, length // 128, dtype=torch.bool).tril()
    indices = torch.arange(length // 128, dtype=torch.int32).expand(1, 1, length // 128, -1)
    counts = dense.sum(-1, dtype=torch.int32)
    mask = flexhop.BlockMask.from_kv_blocks(counts, indices, compute_q_blocks=False)
    assert len(mask._repr_html_()) < 10_000
    assert len(cells_of(mask.to_svg())) == 64


def test_an_outline_covers_exactly_what_is_chosen():
    chosen = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]).bool()
    assert outline(chosen) == "M0 0h2v1h-2zM3 0h1v1h-1zM0 2h4v2h-4z"


def test_plot():
    pytest.importorskip("matplotlib").use("agg")
    mask = make(sliding_window(40), 100, 200)
    axes = mask.plot()
    (image,) = axes.get_images()
    assert image.get_array().tolist() == expected_cells(mask)
    assert image.get_extent() == [0, 208, 112, 0]  # whole blocks; the axes end with the tokens
    assert axes.get_xlim() == (0, 200) and axes.get_ylim() == (100, 0)
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {
        "full", "partial", "empty"
    }  # fmt: skip
    assert mask.plot(axes, grid_size=2) is axes
    assert len(axes.get_images()[1].get_array()) == 2


def test_plot_says_what_to_install(monkeypatch):
    for module in ("matplotlib", "matplotlib.colors"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match="pip install matplotlib") as caught:
        MASKS["causal"].plot()
    assert isinstance(caught.value, ImportError)
