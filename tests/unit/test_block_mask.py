"""BlockMask: its fields, what it derives from them, and how it travels."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as in_tree
from torch.utils import _pytree as pytree

import flexhop
from flexhop.block_mask import BlockMask, create_block_mask
from flexhop.block_mask.fields import MaskModKey
from flexhop.block_mask.lists import dense_to_lists, lists_to_dense, transpose_lists
from flexhop.block_mask.saving import dump_context, load_context
from flexhop.errors import (
    BlockMaskFieldError,
    BlockMaskIndexError,
    BlockMaskTypeError,
    SlicedMaskModError,
    UnsupportedFeatureError,
)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def int32(values, *shape):
    return torch.tensor(values, dtype=torch.int32).view(shape)


def causal_mask(*sizes, block=16, **options):
    return create_block_mask(causal, *sizes, "cpu", block, **options)


HAND = {
    "kv_num_blocks": int32([1, 2, 1], 1, 1, 3),
    "kv_indices": int32([0, -1, 0, 1, 2, -1], 1, 1, 3, 2),
}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_lists_and_dense_are_inverse(batch, rows, columns, seed):
    dense = torch.rand(batch, rows, columns, generator=torch.Generator().manual_seed(seed)) < 0.5
    counts, indices = dense_to_lists(dense)
    assert torch.equal(lists_to_dense(counts, indices, columns), dense)
    assert torch.equal(lists_to_dense(*transpose_lists(counts, indices, columns), rows), dense.mT)
    everything = torch.arange(columns, dtype=torch.int32).expand_as(indices)
    assert torch.equal(indices.sort(-1).values, everything)


def test_picture():
    expected = (
        "BlockMask(shape=(1, 1, 64, 64), sparsity=37.50%, \n(0, 0)\n"
        "░░      \n██░░    \n████░░  \n██████░░\n)"
    )
    assert str(causal_mask(1, 1, 64, 64)) == expected


def test_picture_of_many_blocks_and_batches():
    mask = causal_mask(3, 1, 128, 128)
    assert mask.to_string(2).startswith("(0, 0)\n░░  \n██░░\n")
    assert "(1, 0)" not in mask.to_string(limit=1)
    assert len(mask[0].to_string(-1).splitlines()) == 1 + 8


def test_repr_reads_no_data():
    assert "kv_indices=(1, 1, 4, 4)" in repr(causal_mask(1, 1, 64, 64).to("meta"))


def test_measures():
    mask = causal_mask(4, 2, 2048, 2048, block=128)
    assert mask.shape == (4, 2, 2048, 2048) and mask.numel() == 8 * 2048**2
    assert mask.sparsity() == 46.875
    assert (mask.num_partial_blocks(), mask.num_full_blocks()) == (8 * 16, 8 * 120)
    assert mask.visited_area() == mask.density() * mask.numel()


def test_the_last_block_counts_by_its_real_size():
    mask = causal_mask(1, 1, 100, 100, block=128)
    assert mask.sparsity() == 0.0 and "sparsity=0.00%" in str(mask)
    assert mask.visited_area() == 100 * 100


def test_from_kv_blocks_lists_the_query_side():
    mask = BlockMask.from_kv_blocks(**HAND, BLOCK_SIZE=32, seq_lengths=(96, 96))
    assert mask.BLOCK_SIZE == (32, 32) and mask.shape == (1, 1, 96, 96)
    assert mask.q_num_blocks.tolist() == [[[2, 1, 1]]]
    assert [row[:n] for row, n in zip(mask.q_indices[0, 0].tolist(), [2, 1, 1], strict=True)] == [
        [0, 1],
        [1],
        [2],
    ]
    assert mask.full_q_indices is None


def test_from_kv_blocks_infers_lengths():
    mask = BlockMask.from_kv_blocks(**HAND)
    assert mask.seq_lengths == (384, 256) and mask.BLOCK_SIZE == (128, 128)


def test_lists_of_int64_are_converted():
    """topk and sort return them, and PyTorch's masks take them."""
    wide = {name: tensor.long() for name, tensor in HAND.items()}
    expected = BlockMask.from_kv_blocks(**HAND)
    theirs = in_tree.BlockMask.from_kv_blocks(**wide)
    assert theirs.kv_indices.dtype == torch.int64
    for mask in (BlockMask.from_kv_blocks(**wide), BlockMask.of(theirs)):
        assert mask.same_structure(expected)
        assert {t.dtype for t in (mask.kv_num_blocks, mask.kv_indices)} == {torch.int32}
    shared = {name: tensor.expand(3, 2, *tensor.shape[2:]) for name, tensor in wide.items()}
    mask = BlockMask.from_kv_blocks(**shared)
    assert mask.shape[:2] == (3, 2) and mask.kv_indices.stride()[:2] == (0, 0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_blocks_chosen_by_topk_in_a_graph(backend):
    def attend(q, scores):
        chosen = scores.topk(2).indices.sort().values
        counts = torch.full(chosen.shape[:-1], 2)
        mask = BlockMask.from_kv_blocks(counts, chosen, BLOCK_SIZE=16, seq_lengths=(64, 64))
        return flexhop.flex_attention(q, q, q, block_mask=mask)

    q, scores = torch.randn(1, 2, 64, 8, requires_grad=True), torch.randn(1, 2, 4, 4)
    seen = torch.zeros(scores.shape).scatter_(-1, scores.topk(2).indices, 1.0).bool()
    seen = seen.repeat_interleave(16, -1).repeat_interleave(16, -2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, seen)
    out = torch.compile(attend, fullgraph=True, backend=backend)(q, scores)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(o.sin().sum(), q) for o in (out, expected)))


def test_positional_constructor():
    mask = BlockMask(
        (96, 64), *HAND.values(), None, None, None, None, None, None, (32, 32), causal
    )
    assert (mask.BLOCK_SIZE, mask.mask_mod, mask.dq_write_order) == ((32, 32), causal, None)


def test_as_tuple():
    """PyTorch's own attention unpacks it, and the number of fields depends on the version."""
    mask = causal_mask(1, 1, 64, 48)
    theirs = in_tree.create_block_mask(causal, 1, 1, 64, 48, device="cpu", BLOCK_SIZE=16)
    for flatten in (True, False):
        own, other = mask.as_tuple(flatten), theirs.as_tuple(flatten)
        assert [type(part) for part in own] == [type(part) for part in other]
    assert own[-2] == (16, 16) and mask.as_tuple()[:2] == (64, 48)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"full_kv_num_blocks": HAND["kv_num_blocks"]}, "full_kv_indices"),
        ({"full_kv_indices": HAND["kv_indices"]}, "full_kv_num_blocks"),
        ({"kv_indices": HAND["kv_indices"].short()}, "int32"),
        ({"kv_num_blocks": int32([1, 2], 1, 1, 2)}, "shape"),
        ({"kv_num_blocks": int32(1), "kv_indices": int32([0], 1)}, "2 dimensions"),
        ({"kv_indices": HAND["kv_indices"].to("meta")}, "cpu"),
        ({"seq_lengths": (1000, 256)}, "1000 queries"),
        ({"dq_kv_order": 3}, "dq_kv_order must be"),
        ({"dq_write_order_full": HAND["kv_indices"]}, "dq_write_order_full requires"),
    ],
)
def test_fields_that_do_not_fit(changes, words):
    with pytest.raises(BlockMaskFieldError, match=words):
        BlockMask.from_kv_blocks(**(HAND | changes))


@pytest.mark.parametrize(
    ("index", "sizes"),
    [
        (0, (1, 2, 64)),
        (-1, (1, 2, 64)),
        ((0, 1), (1, 1, 64)),
        ((slice(0, 2), slice(1, 2)), (2, 1, 64)),
        ((slice(None), slice(None), torch.tensor([1, 3], dtype=torch.int32)), (4, 2, 32)),
    ],
)
def test_indexing_keeps_dimensions(index, sizes):
    mask = causal_mask(4, 2, 64, 64)
    part = mask[index]
    assert part.shape == (*sizes, 64)
    items = index if isinstance(index, tuple) else (index,)
    kept = tuple([i] if isinstance(i, int) else i for i in items)
    expected = mask.to_dense()
    for dim, item in enumerate(kept):
        expected = expected[(slice(None),) * dim + (item,)]
    assert torch.equal(part.to_dense(), expected)
    assert part.q_indices.shape[:2] == part.kv_indices.shape[:2]


@pytest.mark.parametrize(
    ("rows", "length"),
    [
        (slice(0, 1), 4),
        (slice(2, None), 1),
        (slice(0, 0), 0),
        (slice(None, None, 2), 5),
        (slice(-2, None), 5),
        (-1, 1),
        (torch.tensor([2]), 4),
    ],
)
def test_the_length_follows_the_query_blocks(rows, length):
    mask = causal_mask(1, 1, 9, 10, block=4)
    part = mask[:, :, rows]
    assert part.seq_lengths == (length, 10)
    kept = [rows] if isinstance(rows, int) else rows
    assert torch.equal(part.to_dense(), mask.to_dense()[:, :, kept])


def test_only_a_whole_selection_keeps_the_mask_mod():
    mask = causal_mask(1, 4, 64, 64)
    assert mask[0, :].mask_mod is causal
    for part in (mask[:, 1], mask[:, :, :2], mask[:, :, torch.arange(4)]):
        with pytest.raises(SlicedMaskModError, match="Cannot use mask_mod from a sliced"):
            part.mask_mod(*torch.zeros(4, dtype=torch.int32))


def test_indices_out_of_range():
    mask = causal_mask(2, 1, 64, 64)
    with pytest.raises(BlockMaskIndexError, match="batch, head, and Q-block"):
        mask[0, 0, 0, 0]
    with pytest.raises(IndexError):
        mask[2]
    assert len(list(mask)) == 2  # Python iterates until IndexError


def test_metadata_survives():
    mask = causal_mask(2, 1, 64, 64, compute_dq_write_order=True)
    for other in (mask[0], mask._adjust(48, 48), mask.to("cpu"), copy.deepcopy(mask)):
        assert other.dq_write_order is not None and other._dq_kv_order() is True
    mask.dq_kv_order = torch.arange(4)
    for change in (lambda: mask[0], lambda: mask._adjust(32, 32)):
        with pytest.raises(UnsupportedFeatureError, match="tensor dq_kv_order"):
            change()


def test_operations_without_the_query_side():
    mask = causal_mask(1, 1, 64, 64, compute_q_blocks=False)
    for other in (mask[0], mask.to("cpu"), mask._adjust(32, 32)):
        assert other.q_indices is None and other.full_q_indices is None


@pytest.mark.parametrize("lengths", [(16, 64), (64, 48), (60, 60), (50, 39)])
def test_adjust_crops_as_if_made_anew(lengths):
    mask = causal_mask(1, 1, 64, 64)._adjust(*lengths)
    assert mask.same_structure(causal_mask(1, 1, *lengths))


def test_adjust_grows_by_nothing():
    mask = causal_mask(1, 1, 32, 32)._adjust(64, 80)
    assert mask.shape == (1, 1, 64, 80) and mask.num_partial_blocks() == 2


def test_same_structure():
    mask = causal_mask(1, 1, 64, 64)
    assert mask.same_structure(causal_mask(1, 1, 64, 64, compute_q_blocks=False))
    assert not mask.same_structure(causal_mask(1, 1, 64, 64, separate_full_blocks=False))
    assert not mask.same_structure(causal_mask(1, 1, 64, 63))
    assert mask != causal_mask(1, 1, 64, 64)  # by identity, as Dynamo's guards want it


def test_pytorch_masks_are_taken():
    theirs = in_tree.create_block_mask(causal, 2, 1, 100, 70, device="cpu", BLOCK_SIZE=32)
    ours = BlockMask.of(theirs)
    assert ours.kv_indices is theirs.kv_indices and ours.mask_mod is causal
    assert ours.same_structure(create_block_mask(causal, 2, 1, 100, 70, "cpu", 32))
    assert torch.equal(ours.to_dense().int(), theirs.to_dense().int())
    assert BlockMask.of(ours) is ours


@pytest.mark.parametrize("value", [None, 3, torch.ones(2, 2), BlockMask])
def test_other_things_are_refused(value):
    with pytest.raises(BlockMaskTypeError):
        BlockMask.of(value)


def test_tree():
    mask = causal_mask(1, 1, 64, 64)
    leaves, context = mask._flatten()
    keyed, keyed_context = mask._flatten_with_keys()
    assert len(leaves) == len(keyed) == 8 and context == keyed_context
    assert len(context) == len(BlockMask._CONTEXT_ATTRS) + 1
    assert [key.name for key, _ in keyed] == BlockMask._TENSOR_ATTRS[:8]
    again = BlockMask._unflatten(leaves, context)
    assert again.same_structure(mask) and again.mask_mod is causal
    shapes = pytree.tree_map(lambda leaf: leaf.shape, mask)  # leaves need not be tensors
    assert shapes.kv_indices == (1, 1, 4, 4)


def test_trees_of_equal_closures_are_equal():
    def window(size, table):
        return lambda b, h, q_idx, kv_idx: table[q_idx] & (q_idx - kv_idx < size)

    table = torch.ones(64, dtype=torch.bool)
    same, other = MaskModKey(window(8, table)), MaskModKey(window(9, table))
    assert MaskModKey(window(8, table)) == same and hash(MaskModKey(window(8, table))) == hash(
        same
    )
    assert same != other and same != MaskModKey(window(8, table.clone()))


def test_context_of_an_exported_program():
    _, context = causal_mask(1, 1, 64, 64)._flatten()
    try:
        dumped = dump_context(context)
    except UnsupportedFeatureError:
        pytest.skip("this runner does not keep test modules in sys.modules")
    assert load_context(dumped) == context
    with pytest.raises(UnsupportedFeatureError, match="by name"):
        dump_context(create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 8, 8, "cpu")._flatten()[1])


class Weigh(torch.nn.Module):
    def forward(self, x, mask):
        return x * mask.kv_num_blocks.sum() + mask.seq_lengths[0]


def test_export_takes_a_mask():
    mask, x = causal_mask(1, 1, 64, 64), torch.ones(3)
    program = torch.export.export(Weigh(), (x, mask))
    assert torch.equal(program.module()(x, mask), Weigh()(x, mask))


def test_saving():
    mask = causal_mask(1, 1, 64, 64)
    file = io.BytesIO()
    torch.save(mask.state_dict(), file)
    file.seek(0)
    loaded = BlockMask.from_state_dict(torch.load(file, weights_only=True), causal)
    assert loaded.same_structure(mask) and loaded.mask_mod is causal
    sliced = pickle.loads(pickle.dumps(mask[:, :, 0]))  # its mask_mod has a name
    assert sliced.same_structure(mask[:, :, 0])


def within_a_graph(counts, indices):
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=32)
    part = mask[:, :, 1:3]
    return mask.q_num_blocks, mask.q_indices, part.kv_indices, *part.seq_lengths, mask.to_dense()


@pytest.mark.parametrize("dynamic", [False, True])
def test_masks_made_in_a_graph(dynamic):
    compiled = torch.compile(within_a_graph, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(compiled(*HAND.values()), within_a_graph(*HAND.values()))


def use(mask):
    ours = BlockMask.of(mask)
    return ours.to_dense() + ours[0].to_dense(), ours._adjust(40, 50).kv_indices, ours.shape


@pytest.mark.parametrize("create", [create_block_mask, in_tree.create_block_mask])
def test_masks_given_to_a_graph(create):
    mask = create(causal, 2, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    compiled = torch.compile(use, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(mask), use(mask))
