"""Quotients by products: exact for every dividend that is allowed."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexhop
from flexhop.compat.kernels.integers import note_quotient
from flexhop.offline import generate_code

MOST = 2**23  # of positions


def noted(divisor: int, most: float) -> Any:
    node = torch.fx.Graph().placeholder("x")
    return note_quotient(node, divisor, most).meta.get("flexhop_reciprocal")


@given(st.integers(3, 2**30), st.integers(0, 2**31 - 1), st.data())
def test_they_are_exact(divisor, most, data):
    found = noted(divisor, most)
    if found is None:
        assert most * divisor >= 2**31
        return
    of, factor, shift = found
    assert of == divisor
    assert factor < 2**31
    drawn = data.draw(st.integers(0, most // divisor)) * divisor
    last = most // divisor * divisor
    for n in {0, most, drawn, last, min(most, drawn + divisor - 1), max(0, last - 1)}:
        assert n * factor < 2**63
        assert (n * factor) >> shift == n // divisor


@pytest.mark.parametrize("divisor", [3, 5, 7, 11, 49, 100, 641, 12345, 999_983, 2**22 + 1])
def test_positions_have_them(divisor):
    assert noted(divisor, MOST) is not None


def test_there_are_none_of_what_may_be_anything():
    assert noted(7, float("inf")) is None
    assert noted(7, 2**31) is None


def test_kernels_do_not_divide_positions():
    query, key, value = (torch.randn(1, 2, 256, 64) for _ in range(3))

    def attend(query, key, value):
        return flexhop.flex_attention(
            query, key, value, lambda s, b, h, q, k: s - 0.1 * (q // 7 - k // 7) ** 2 + k % 11
        )

    (kernel,) = generate_code(attend, query, key, value).templates
    mod = kernel.source.split("def score_mod")[1].split("\n\n\n")[0]
    assert mod.count(">>") == 3
    assert "//" not in mod
    assert "%" not in mod
