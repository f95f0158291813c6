"""Sums over lanes, as sums and distances of templates/hopper/backward/ take them.

Their text is run with arrays of NumPy in the place of Gluon's tensors. A warp's lanes are the
last two axes of [4 warps, 8, 4].
"""

from __future__ import annotations

import types
from typing import Any

import jinja2
import numpy as np
import pytest

from flexhop.templates import part

LANES = np.broadcast_to(np.arange(32).reshape(8, 4), (4, 8, 4))


class Block(np.ndarray):
    """An array with the methods of Gluon's tensors that NumPy names otherwise."""

    def permute(self, axes: tuple[int, ...]) -> Any:
        return self.transpose(axes)

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return self  # what lanes exchange are bits


def block(values: Any) -> Block:
    return np.asarray(values).view(Block)


def run_assembly(text: str, constraints: str, args: list[Block], **_: Any) -> Block:
    """The two instructions that the text has."""
    if "%laneid" in text:
        return block(LANES.copy())
    assert "shfl.sync.idx" in text
    values, source = (x.reshape(4, 32) for x in args)
    return block(np.take_along_axis(values, source, 1).reshape(4, 8, 4))


GL = types.SimpleNamespace(
    constexpr=object, static_range=range, int32=None, float32=None,
    split=lambda x: (x[..., 0], x[..., 1]), where=lambda *x: block(np.where(*x)),
    zeros_like=np.zeros_like, sum=lambda x, axis: x.sum(axis),
    inline_asm_elementwise=run_assembly,
)  # fmt: skip


@pytest.fixture(scope="module")
def functions() -> dict[str, Any]:
    names: dict[str, Any] = {"gl": GL, "gluon": types.SimpleNamespace(jit=lambda f: f)}
    for name in ("hopper/backward/sums", "hopper/backward/distances"):
        exec(jinja2.Template(part(name)).render(), names)
    return names


def tile(queries: int) -> tuple[Block, Block, Block]:
    """Whole numbers, so that sums are exact; positions of queries and keys."""
    values = np.random.default_rng(queries).integers(-99, 99, (64, queries)).astype(float)
    q_idx, kv_idx = np.arange(640, 640 + queries)[None], np.arange(128, 192)[:, None]
    return block(values), block(q_idx + 0 * kv_idx), block(0 * q_idx + kv_idx)


def gather(found: tuple[tuple[Block, ...], tuple[Block, ...]], size: int) -> np.ndarray:
    """What additions to memory leave there; nothing is added where a sum is 0."""
    memory = np.zeros(size)
    for sums, places in zip(*found, strict=True):
        assert sums.shape == places.shape == (4, 8, 4)
        np.add.at(memory, places[sums != 0], sums[sums != 0])
    return memory


@pytest.mark.parametrize("queries", [32, 64])
def test_sums_over_the_keys_of_a_warp(functions, queries):
    values, q_idx, _ = tile(queries)
    found = functions["sum_keys"](values, q_idx)
    assert len(found[0]) == queries // 32, "each lane adds one number for a query of the tile"
    wanted = np.zeros(1024)
    wanted[640 : 640 + queries] = values.sum(0)
    assert (gather(found, 1024) == wanted).all()


@pytest.mark.parametrize("queries", [32, 64])
def test_sums_over_pairs_at_equal_distances(functions, queries):
    values, q_idx, kv_idx = tile(queries)
    found = functions["sum_distances"](values, q_idx - kv_idx)
    assert len(found[0]) == 2 + queries // 32, "of 16 and of 32 scores that a thread has"
    wanted = np.zeros(1024)
    np.add.at(wanted, q_idx - kv_idx, values)
    assert (gather(found, 1024) == wanted).all()


@pytest.mark.parametrize("queries", [32, 64])
def test_sums_over_what_a_thread_has_of_a_row(functions, queries):
    values, *_ = tile(queries)
    assert (functions["sum_rows"](values).sum(1) == values.sum(1)).all()


def test_sums_of_one_place_are_merged(functions):
    """Far from the diagonal all pairs read the last entry: a warp adds to it once."""
    values, q_idx, kv_idx = tile(64)
    sums, places = functions["sum_distances"](values, q_idx - kv_idx)
    near = tuple(np.minimum(place, 470) for place in places)  # of 449 to 575
    for offsets, most in ((near, 512), (tuple(place * 0 + 7 for place in places), 4)):
        wanted = gather((sums, offsets), 1024)
        # Gluon's += makes another tensor.
        merged = functions["merge_equal"](tuple(map(np.copy, sums)), offsets)
        assert (gather((merged, offsets), 1024) == wanted).all()
        assert sum((part != 0).sum() for part in merged) <= most
