"""Bits of masks that are two numbers per row, as templates/hopper/spans.py.jinja makes them.

Its text is run with arrays of NumPy in the place of Gluon's tensors.
"""

from __future__ import annotations

import types
from typing import Any

import jinja2
import numpy as np
import pytest

from flexhop.templates import part


def run_assembly(text: str, _: str, args: list[Any], **options: Any) -> Any:
    """`bmsk.clamp`: as many ones as the second operand says, from the bit that the first says."""
    assert text.startswith("bmsk.clamp.b32")
    low, count = (np.asarray(x, np.int64) for x in args)
    assert (count >= 0).all()
    return ((1 << count) - 1) << low


GL = types.SimpleNamespace(
    constexpr=object, constexpr_function=lambda f: f, int32=None, where=np.where,
    minimum=np.minimum, maximum=np.maximum, expand_dims=np.expand_dims,
    arange=lambda first, end, layout: np.arange(first, end),
    convert_layout=lambda x, layout, assert_trivial: x, SliceLayout=lambda *_: None,
    DistributedLinearLayout=lambda **_: None, inline_asm_elementwise=run_assembly,
)  # fmt: skip


@pytest.fixture(scope="module")
def text() -> dict[str, Any]:
    jit = types.SimpleNamespace(jit=lambda f: f, constexpr_function=lambda f: f)
    names: dict[str, Any] = {"gl": GL, "gluon": jit}
    exec(jinja2.Template(part("hopper/spans")).render(), names)
    return names


def unpacked(words: Any, columns: int) -> Any:
    """Words [64, 4] as what they keep, [64, columns]; bits behind the columns do not count."""
    column = np.arange(columns)
    return (words[:, column % 8 // 2] >> (column // 8 * 2 + column % 2) & 1).astype(bool)


@pytest.mark.parametrize("columns", [32, 64, 128])
@pytest.mark.parametrize(
    ("first", "end"), [(-15, 1), (-70, 71), (30, 200), (-2000, 3), (-2, 1), (1, 0)]
)
def test_bits_of_a_band(text, first, end, columns):
    for row in (0, 64, 1984):
        rows = row + np.arange(64)
        for start in range(0, 2048, columns):
            place = start + np.arange(columns)
            span = text["open_band"](rows, first, end)
            kept = unpacked(text["find_bits"](span, start, False, columns), columns)
            distance = place - rows[:, None]
            assert (kept == ((distance >= first) & (distance < end))).all()
            # Rows are keys in the backward kernel.
            span = text["open_band"](rows, 1 - end, 1 - first)
            kept = unpacked(text["find_bits"](span, start, False, columns), columns)
            assert (kept == ((-distance >= first) & (-distance < end))).all()


def test_full_blocks_keep_all(text):
    words = text["find_bits"](text["open_band"](np.arange(64), 500, 501), 0, True, 128)
    assert unpacked(words, 128).all()
