"""create_block_mask and create_mask against the definition: look at every element of a block."""

import functools
import operator
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flexhop
from flexhop.block_mask import BlockMask, coverage, create_block_mask, create_mask, scores
from flexhop.block_mask.lists import in_memory
from flexhop.errors import (
    BlockMaskFieldError,
    BlockSizeError,
    CaptureDeviceError,
    ModArityError,
    ModLoweringError,
    ModResultError,
    OptionValueError,
    SequenceLengthError,
)

LISTS = [name for name in BlockMask._TENSOR_ATTRS if not name.startswith("dq")]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def table_mask(table: Tensor):
    """The mask that a table [B, H, M, N] holds, read in one step."""
    return lambda b, h, q_idx, kv_idx: table[b, h, q_idx, kv_idx]


def blocks_by_definition(table: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Partial and full blocks of a mask, by looking at each block; [B, H, R, C] bool."""
    rows = [part for part in table.split(block[0], dim=2)]
    some, full = [], []
    for row in rows:
        tiles = row.split(block[1], dim=3)
        some.append(torch.stack([tile.flatten(2).any(2) for tile in tiles], -1))
        whole = [tile.shape[2:] == torch.Size(block) for tile in tiles]
        full.append(
            torch.stack([t.flatten(2).all(2) & w for t, w in zip(tiles, whole, strict=True)], -1)
        )
    visited, full_blocks = torch.stack(some, 2), torch.stack(full, 2)
    return visited & ~full_blocks, full_blocks


def assert_lists(counts: Tensor, indices: Tensor, expected: Tensor) -> None:
    """Each row of the lists names the marked columns of `expected`, ascending."""
    assert counts.dtype == indices.dtype == torch.int32
    flat = zip(counts.flatten(), indices.flatten(0, -2), expected.flatten(0, -2), strict=True)
    for count, row, marked in flat:
        assert row[: int(count)].tolist() == marked.nonzero().flatten().tolist()


def assert_matches(mask: BlockMask, table: Tensor) -> None:
    partial, full = blocks_by_definition(table, mask.BLOCK_SIZE)
    assert_lists(mask.kv_num_blocks, mask.kv_indices, partial)
    assert_lists(mask.full_kv_num_blocks, mask.full_kv_indices, full)
    assert_lists(mask.q_num_blocks, mask.q_indices, partial.mT)
    assert_lists(mask.full_q_num_blocks, mask.full_q_indices, full.mT)


def assert_same_lists(first: BlockMask, second: BlockMask) -> None:
    for name in LISTS:
        a, b = getattr(first, name), getattr(second, name)
        assert (a is None and b is None) or torch.equal(a, b), name


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 70), st.integers(1, 70)),
    block=st.tuples(st.sampled_from([1, 8, 16, 100]), st.sampled_from([1, 8, 16, 100])),
    dense=st.sampled_from([0.0, 0.01, 0.99, 1.0]),
    seed=st.integers(0, 99),
    chunk=st.sampled_from([1, 500, 10**6]),
)
def test_random_masks(shape, block, dense, seed, chunk):
    table = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < dense
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "CHUNK_ELEMENTS", chunk)
        patch.setattr(coverage, "CHUNK_ELEMENTS", chunk)
        patch.setattr(scores, "LONGEST", 13)
        mask = create_block_mask(table_mask(table), *shape, "cpu", block)
    assert mask.shape == shape
    assert_matches(mask, table)


@pytest.mark.parametrize("length", [1, 100, 257])
@pytest.mark.parametrize("block", [16, 128, 256, (32, 64), (64, 32)])
def test_causal_of_ragged_lengths(length, block):
    mask = create_block_mask(causal, None, None, length, length + 3, "cpu", block)
    assert mask.shape == (1, 1, length, length + 3)
    assert_matches(mask, create_mask(causal, 1, 1, length, length + 3, "cpu"))


@pytest.mark.parametrize("shape", [(1, 1, 1024, 1024), (3, 5, 7, 11), (64, 32, 4, 4)])
@pytest.mark.parametrize("area", [1, 128 * 128, 1024 * 1024])
def test_chunks_are_bounded_and_cover_everything(shape, area):
    covered = torch.zeros(shape, dtype=torch.int32)
    for chunk in scores._chunks(shape, area):
        covered[chunk] += 1
        assert covered[chunk].numel() * area <= scores.CHUNK_ELEMENTS
    assert bool((covered == 1).all())


def test_full_blocks_need_not_be_separated():
    mask = create_block_mask(causal, 1, 1, 64, 64, "cpu", 16, separate_full_blocks=False)
    assert mask.full_kv_indices is None and mask.full_q_indices is None
    assert mask.num_partial_blocks() == 10


def test_the_query_side_can_be_left_out():
    mask = create_block_mask(causal, 1, 1, 64, 64, "cpu", 16, compute_q_blocks=False)
    assert mask.q_indices is None and mask.full_q_num_blocks is None


def test_mods_see_only_indices_in_range():
    seen = torch.ones(100, 90, dtype=torch.bool)  # reading past it would raise
    mask = create_block_mask(
        lambda b, h, q_idx, kv_idx: seen[q_idx, kv_idx], 1, 1, 100, 90, "cpu", 64
    )
    assert (mask.num_full_blocks(), mask.num_partial_blocks()) == (1, 3)


KEEP = torch.arange(600).view(2, 300) % 7 != 3


def two_steps(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & KEEP[b][q_idx]


def factory(b, h, q_idx, kv_idx):
    return KEEP[h.new_zeros(h.shape), q_idx] | (q_idx >= kv_idx)


def many_reads(b, h, q_idx, kv_idx):
    """More reads than Inductor lets one loop collect; b joins late."""
    same = KEEP[0, q_idx] & KEEP[0, kv_idx] & KEEP[1, q_idx] & KEEP[1, kv_idx]
    near = KEEP[0, (q_idx + 1) % 300] & KEEP[0, (kv_idx + 1) % 300] & KEEP[1, (q_idx + 2) % 300]
    far = KEEP[1, (kv_idx + 2) % 300] & KEEP[0, (kv_idx + 3) % 300] & KEEP[0, (q_idx + 3) % 300]
    return (same & near & far) | ((q_idx == kv_idx) & (b == 0))


def shifted(b, h, q_idx, kv_idx, offset):
    return q_idx + offset >= kv_idx


class Window:
    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() < 9 + h


MODS = {
    "causal": causal,
    "two_steps": two_steps,
    "factory": factory,
    "many_reads": many_reads,
    "callable": Window(),
    "partial": functools.partial(shifted, offset=31),
    "partial_tensor": functools.partial(shifted, offset=torch.tensor(3.0)),
}


@pytest.mark.parametrize("mod", MODS.values(), ids=MODS)
def test_compiled_equals_eager(mod):
    def create():
        return create_block_mask(mod, 2, 2, 300, 257, "cpu", (32, 64))

    compiled = torch.compile(create, fullgraph=True, backend="aot_eager")()
    assert type(compiled) is BlockMask and compiled.mask_mod is mod
    assert_same_lists(compiled, create())
    assert_matches(create(), create_mask(mod, 2, 2, 300, 257, "cpu"))


def test_two_step_indexing_by_loops():
    expected = torch.tensor(
        [[[bool(KEEP[b, q]) and q >= k for k in range(40)] for q in range(40)] for b in range(2)]
    )
    assert torch.equal(create_mask(two_steps, 2, None, 40, 40, "cpu")[:, 0], expected)


def buffer_sizes(code: str) -> list[int]:
    """Elements of the tensors that generated code allocates."""
    shapes = re.findall(r"empty_strided_cpu\(\(([\d, ]*)\)", code)
    return [functools.reduce(lambda a, b: a * int(b), re.findall(r"\d+", s), 1) for s in shapes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mod", "batch", "most"),
    # A step of the loop over blocks has 2^20 scores. Before 2.13, Inductor stores those of a step.
    [(causal, 2, 8 * 320), (many_reads, 64, 1 << (15 if torch.__version__ >= "2.13" else 20))],
)
def test_inductor_does_not_store_the_mask(mod, batch, most):
    """The second has 6.5 million scores."""
    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(create_block_mask, fullgraph=True)
    mask, code = run_and_get_code(compiled, mod, batch, 1, 300, 300, "cpu", 32)
    assert_same_lists(mask, create_block_mask(mod, batch, 1, 300, 300, "cpu", 32))
    assert 0 < max(buffer_sizes(code[0])) <= most


def test_other_sizes_recompile_once():
    from torch._dynamo.utils import counters

    counters.clear()
    compiled = torch.compile(create_block_mask, fullgraph=True, backend="aot_eager")
    graphs = []
    for batch, heads, length in ((2, 2, 256), (3, 4, 512), (4, 5, 768)):
        compiled(causal, batch, heads, length, length, "cpu")
        graphs.append(counters["aot_autograd"]["ok"])
    assert graphs == [1, 2, 2]


@pytest.mark.slow
def test_the_compile_flag():
    mask = create_block_mask(causal, 1, 1, 300, 300, "cpu", 32, _compile=True)
    assert_same_lists(mask, create_block_mask(causal, 1, 1, 300, 300, "cpu", 32))


def test_create_mask_of_a_score_mod():
    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score, -float("inf"))

    expected = torch.ones(5, 7, dtype=torch.bool).tril().expand(2, 3, 5, 7)
    assert torch.equal(create_mask(score_mod, 2, 3, 5, 7, "cpu"), expected)


@pytest.mark.parametrize("descending", [True, False])
def test_write_order(descending):
    mask = create_block_mask(
        causal, 1, 1, 80, 64, "cpu", 16, compute_dq_write_order=True, dq_kv_order=descending
    )
    assert mask._dq_kv_order() is descending
    visited = mask.to_dense()[0, 0].bool()
    for column in range(4):
        for entry in range(int(mask.q_num_blocks[0, 0, column])):
            row = int(mask.q_indices[0, 0, column, entry])
            turns = visited[row].nonzero().flatten().tolist()
            turns = turns[::-1] if descending else turns
            assert mask.dq_write_order[0, 0, column, entry] == turns.index(column)


def branching(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx if q_idx > 3 else kv_idx > 3


EMPTY = torch.zeros(400, device="meta")


def without_values(b, h, q_idx, kv_idx):
    return EMPTY[q_idx] == EMPTY[kv_idx]


def test_a_captured_tensor_without_values_is_named():
    """Its entries could not be copied, PyTorch would say."""
    empty = torch.zeros(20, device="meta")

    def mod(b, h, q_idx, kv_idx):
        return empty[q_idx] == empty[kv_idx]

    for create in (create_block_mask, create_mask):
        with pytest.raises(CaptureDeviceError, match="tensor 0 of mask_mod 'mod' is on meta"):
            create(mod, 1, 1, 20, 20, "cpu")
    assert create_block_mask(mod, 1, 1, 20, 20, "meta").kv_num_blocks.is_meta


def segments(count, calls):
    """A mask that a loop over segments makes; it notes its calls."""

    def mod(b, h, q_idx, kv_idx):
        calls.append(count)
        ends = [(1200 * i // count, 1200 * (i + 1) // count) for i in range(count)]
        return torch.stack(
            [(q_idx >= a) & (q_idx < e) & (kv_idx >= a) & (kv_idx < e) for a, e in ends]
        ).any(0)

    return mod


@pytest.mark.parametrize("count", [3, 16, 17, 50, 64])
def test_rows_of_many_conditions_are_understood(count):
    """No more scores are evaluated than for a few."""
    few, many = [], []
    create_block_mask(segments(3, few), 1, 1, 1200, 1200, "cpu")
    found = create_block_mask(segments(count, many), 1, 1, 1200, 1200, "cpu")
    assert len(many) <= len(few)
    assert_matches(found, create_mask(segments(count, []), 1, 1, 1200, 1200, "cpu"))


def test_a_mask_of_integer_scores():
    """Only -inf hides a pair."""
    found = create_mask(lambda score, b, h, q_idx, kv_idx: q_idx - kv_idx, 1, 1, 4, 4, "cpu")
    assert found.all()


@pytest.mark.parametrize(
    ("error", "mod", "changes"),
    [
        (ModResultError, lambda b, h, q_idx, kv_idx: q_idx - kv_idx, {}),
        (ModResultError, lambda b, h, q_idx, kv_idx: True, {}),
        (ModResultError, lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx).view(1), {}),
        (ModArityError, lambda q_idx, kv_idx: q_idx >= kv_idx, {}),
        (ModLoweringError, branching, {}),
        (CaptureDeviceError, without_values, {}),
        (BlockSizeError, causal, {"BLOCK_SIZE": 0}),
        (BlockSizeError, causal, {"BLOCK_SIZE": (16, -16)}),
        (BlockSizeError, causal, {"BLOCK_SIZE": (16, 16, 16)}),
        (BlockSizeError, causal, {"BLOCK_SIZE": 16.0}),
        (SequenceLengthError, causal, {"KV_LEN": -1}),
        (OptionValueError, causal, {"B": True}),
        (OptionValueError, causal, {"Q_LEN": 8.0}),
        (OptionValueError, causal, {"compute_q_blocks": "no"}),
        (BlockMaskFieldError, causal, {"dq_kv_order": 3}),
    ],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
def test_bad_input(error, mod, changes, compiled):
    """Dynamo alone would say that it observed an exception."""
    torch._dynamo.reset()
    arguments = {"B": 1, "H": 1, "Q_LEN": 8, "KV_LEN": 8, "device": "cpu"} | changes
    create = functools.partial(create_block_mask, mod, **arguments)
    if compiled:
        create = torch.compile(create, fullgraph=True, backend="eager")
    with pytest.raises(error) as caught:
        create()
    assert all(name in str(caught.value) for name in changes)


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_a_mask_that_was_made_for_inference_serves_training():
    """The first mask of a kind, one that equals it, and one whose scores are all evaluated."""
    documents = torch.randint(0, 3, (40,))
    query = torch.randn(1, 1, 40, 8, requires_grad=True)
    train = torch.compile(flexhop.flex_attention, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        ids = torch.randint(0, 3, (40,))
        masks = [
            create_block_mask(mod, None, None, 40, 40, "cpu", BLOCK_SIZE=16)
            for mod in (causal, causal, lambda b, h, q, k: documents[q] == documents[k])
        ]
        read = create_block_mask(lambda b, h, q, k: ids[q] >= ids[k], None, None, 40, 40, "cpu")
    for mask in (*masks, read):
        lists = [tensor for tensor in mask.as_tuple() if isinstance(tensor, torch.Tensor)]
        assert not any(tensor.is_inference() for tensor in lists)
    for mask in masks:
        train(query, query, query, block_mask=mask).sum().backward()


def test_the_argument_that_is_negative_is_named():
    for name in ("B", "H", "Q_LEN", "KV_LEN"):
        arguments = {"B": 1, "H": 1, "Q_LEN": 8, "KV_LEN": 8} | {name: -1}
        with pytest.raises(SequenceLengthError, match=f"^{name} must be 0 or more, but is -1"):
            create_block_mask(causal, **arguments, device="cpu")


@pytest.mark.parametrize("size", [(2, 3, 0, 40), (2, 3, 40, 0), (0, 3, 40, 40), (2, 0, 0, 0)])
@pytest.mark.parametrize("backend", ["", "aot_eager"])
def test_masks_of_nothing_have_lists_of_no_blocks(size, backend):
    """As PyTorch's own: a size of 0 is a size."""
    create = create_block_mask
    if backend:
        torch._dynamo.reset()
        create = torch.compile(create_block_mask, fullgraph=True, backend=backend)
    mask = create(causal, *size, "cpu", BLOCK_SIZE=16)
    batch, heads, rows, columns = (*size[:2], -(-size[2] // 16), -(-size[3] // 16))
    assert mask.shape == size
    for lists in (mask.kv_indices, mask.full_kv_indices):
        assert lists is not None and lists.shape == (batch, heads, rows, columns)
    for lists in (mask.q_indices, mask.full_q_indices):
        assert lists is not None and lists.shape == (batch, heads, columns, rows)
    assert not mask.kv_num_blocks.any() and not mask.to_dense().any()
    assert create_mask(causal, *size, "cpu").shape == size


def test_masks_of_nothing_have_four_indices():
    with pytest.raises(ModArityError):
        create_block_mask(lambda q, k: q >= k, 1, 1, 0, 8, "cpu")


def test_a_branch_is_located():
    with pytest.raises(ModLoweringError, match=r"test_mask_creation\.py:\d+"):
        create_block_mask(branching, 1, 1, 8, 8, "cpu")


@pytest.mark.parametrize("batch", [None, 3])
def test_fields_have_memory_of_their_own(batch: int | None):
    """AOTInductor's packages keep fields as constants, and did not read views of others right."""
    mask = create_block_mask(lambda b, h, i, j: i >= j, batch, None, 512, 512, device="cpu")
    fields = mask._tensors()
    own = [in_memory(t) for t in fields]
    assert all(t.is_contiguous() and t.storage_offset() == 0 for t in own)
    assert all(t.untyped_storage().nbytes() == 4 * t.numel() for t in own)
    assert batch is not None or not any(t._is_view() for t in fields)


@pytest.mark.parametrize("sizes", [(None, None, 8.5, 8), ("x", None, 8, 8), (None, None, 8, None)])
def test_sizes_that_are_no_ints(sizes):
    with pytest.raises(OptionValueError, match="must be an int"):
        create_block_mask(causal, *sizes, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a PyTorch without a GPU")
def test_without_a_gpu_pytorch_says_so():
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA enabled|NVIDIA|CUDA GPUs"):
        create_block_mask(causal, None, None, 8, 8, device="cuda")


def _near(b, h, q_idx, kv_idx, width=3):
    return q_idx - kv_idx < width


class _Causal:
    """A mask, and a score_mod, as methods."""

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def score(self, score, b, h, q_idx, kv_idx):
        return score.masked_fill(q_idx < kv_idx, float("-inf"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: causal,
        lambda: _near,
        lambda: lambda s, b, h, q_idx, kv_idx: s.masked_fill(q_idx < kv_idx, float("-inf")),
        lambda: functools.partial(lambda width, b, h, q_idx, kv_idx: q_idx < kv_idx + width, 3),
        lambda: flexhop.and_masks(causal, lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 5),
        lambda: _Causal(),
        lambda: _Causal().score,
    ],
    ids=["mask", "default", "score", "partial", "both", "object", "method"],
)
def test_dense_masks_are_made_inside_of_compiled_functions(make):
    """Also of functions that are defined there."""
    made = lambda: create_mask(make(), 2, 3, 9, 11, "cpu")  # noqa: E731
    assert torch.equal(torch.compile(made, fullgraph=True, backend="eager")(), made())


@pytest.mark.parametrize("bits", [operator.and_, operator.or_, operator.xor])
def test_bits_of_floats_are_refused_by_pytorch(bits):
    """The analysis failed before, with a message about Python's floats."""
    mask_mod = lambda b, h, q_idx, kv_idx: bits(q_idx / 2, 3) == kv_idx  # noqa: E731
    with pytest.raises(NotImplementedError, match="not implemented for 'Float'"):
        create_block_mask(mask_mod, None, None, 64, 64, "cpu", 16)
