"""Programs written for torch.nn.attention.flex_attention that changed only their import."""

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as torch_module

import flexhop
from flexhop.errors import BlockMaskIndexError, BlockSizeError, OptionValueError
from flexhop.masks import causal, sliding_window

LISTS = [name for name in flexhop.BlockMask._TENSOR_ATTRS if not name.startswith("dq")]
LENGTH = 300  # ends inside a block
PRIVATE = [
    *("_mask_mod_signature", "_score_mod_signature", "_DEFAULT_SPARSE_BLOCK_SIZE", "_identity"),
    *("_convert_mask_to_block_mask", "_create_sparse_block_from_block_mask", "_vmap_for_bhqkv"),
    *("_dense_to_ordered", "_ordered_to_dense", "_round_up_to_multiple", "_ModificationType"),
]


def checkered(b, h, q_idx, kv_idx):
    """Differs between batches, heads and rows, with full blocks."""
    return (q_idx // 64 + b) % 3 > (kv_idx // 64 + h) % 2


def make(create=flexhop.create_block_mask, mask_mod=checkered):
    return create(mask_mod, 2, 3, LENGTH, LENGTH, "cpu", BLOCK_SIZE=64)


def assert_same_lists(found, expected) -> None:
    for name in LISTS:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


# private names


@pytest.mark.parametrize("name", PRIVATE)
def test_private_names_are_those_of_pytorch(name):
    space = {}
    exec(f"from flexhop import {name}", space)
    assert space[name] is getattr(torch_module, name)


@pytest.mark.parametrize("name", ["_no_such_name", "no_such_name", "__no_such_name__", "create"])
def test_other_names_do_not_exist(name):
    with pytest.raises(AttributeError, match=f"^module 'flexhop' has no attribute '{name}'$"):
        getattr(flexhop, name)
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'flexhop'"):
        exec(f"from flexhop import {name}")


def test_public_names_of_pytorch_stay_behind():
    """Private names only: a public one that flexhop lacks would be another implementation."""
    assert hasattr(torch_module, "Tensor") and not hasattr(flexhop, "Tensor")


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
@pytest.mark.parametrize("separate", [True, False])
def test_a_mask_of_the_private_helpers(separate):
    dense = flexhop.create_mask(checkered, 2, 3, LENGTH, LENGTH, "cpu")
    blocks = flexhop._convert_mask_to_block_mask(dense, 64, 64, separate_full_blocks=separate)
    mask = flexhop._create_sparse_block_from_block_mask(
        blocks, checkered, (LENGTH, LENGTH), Q_BLOCK_SIZE=64, KV_BLOCK_SIZE=64
    )
    q, k, v = (torch.randn(2, 3, LENGTH, 16) for _ in range(3))
    found = flexhop.flex_attention(q, k, v, block_mask=mask)
    expected = flexhop.flex_attention(q, k, v, block_mask=make())
    torch.testing.assert_close(found, expected)


# indices of masks

LISTED = [
    [1],
    [0, 2],
    [-1, 0],
    [3, 3],
    [],
    [True, False, True, False, False],
    [np.int64(1), np.int64(4)],
    np.array([2, 0]),
    (0, 2),
    range(2),
]


@pytest.mark.parametrize("item", LISTED, ids=repr)
def test_a_list_selects_rows_of_blocks(item):
    found = make()[:, :, item]
    assert_same_lists(found, make(torch_module.create_block_mask)[:, :, item])
    chosen = found.kv_num_blocks.shape[-1]
    assert found.seq_lengths == (chosen * 64, LENGTH)


@pytest.mark.parametrize(
    "index",
    [[1], [1, 0], (slice(None), [2]), ([1], slice(1, 3), slice(2)), ([0, 1], [1, 2]), (0, [2, 0])],
    ids=repr,
)
def test_lists_select_batches_and_heads(index):
    found, expected = make()[index], make(torch_module.create_block_mask)[index]
    assert_same_lists(found, expected)


def test_a_selection_by_a_list_attends():
    """And its mask_mod does not know the rows, as after other selections."""
    rows = [3, 1]
    found = make()[:, :, rows]
    with pytest.raises(flexhop.errors.SlicedMaskModError):
        found.mask_mod(*[torch.tensor(0)] * 4)
    first = torch.tensor(rows) * 64
    found.mask_mod = lambda b, h, q, k: checkered(b, h, first[q // 64] + q % 64, k)
    dense = flexhop.create_mask(checkered, 2, 3, LENGTH, LENGTH, "cpu")
    kept = torch.cat([dense[:, :, row * 64 : row * 64 + 64] for row in rows], 2)
    assert torch.equal(flexhop.create_mask(found.mask_mod, 2, 3, 128, LENGTH, "cpu"), kept)
    assert found.shape == (2, 3, 128, LENGTH)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.array])
@pytest.mark.parametrize("position", [0, 1])
def test_an_int_of_numpy_is_an_int(kind, position):
    """PyTorch drops the dimension of these, and then reads another one in its place."""
    number = kind(position)
    mask, theirs = make(), make(torch_module.create_block_mask)
    assert_same_lists(mask[:, :, number], theirs[:, :, position])
    assert_same_lists(mask[number, number], theirs[position, position])
    assert mask[:, :, number].shape == mask[:, :, position].shape
    last = make()[:, :, np.int64(-1)]
    assert last.seq_lengths == (LENGTH - 4 * 64, LENGTH)


def test_indices_out_of_range():
    for item in (np.int64(5), np.int64(-6), [5]):
        with pytest.raises(IndexError):
            make()[:, :, item]
    with pytest.raises(BlockMaskIndexError):
        make()[0, 0, [0], 0]


def test_an_ellipsis_at_the_end_keeps_the_rest():
    for index in ((...,), (slice(None), slice(None), ...), (slice(None),) * 3 + (...,)):
        found = make()[index]
        assert_same_lists(found, make())
        assert found.shape == make().shape and found.mask_mod is checkered
    assert_same_lists(make()[1, ...], make()[1])


def test_a_list_in_a_compiled_function():
    def select(query):
        return make()[:, :, [1, 3]].kv_indices + query.int()

    compiled = torch.compile(select, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(1)), make()[:, :, [1, 3]].kv_indices)


# sizes of masks

NUMBERS = [np.int64, np.int32, np.uint16, np.array, torch.tensor, lambda n: torch.tensor(n).int()]


@pytest.mark.parametrize("number", NUMBERS)
def test_sizes_that_are_no_plain_ints(number):
    sizes = [number(size) for size in (2, 3, LENGTH, LENGTH)]
    found = flexhop.create_block_mask(checkered, *sizes, "cpu", BLOCK_SIZE=64)
    assert_same_lists(found, make(torch_module.create_block_mask))
    assert found.shape == (2, 3, LENGTH, LENGTH)
    assert {type(size) for size in (*found.seq_lengths, *found.BLOCK_SIZE)} == {int}
    for mod in (checkered, lambda score, b, h, q, k: score.masked_fill(q < k, -torch.inf)):
        dense = flexhop.create_mask(mod, *sizes, "cpu")
        assert torch.equal(dense, flexhop.create_mask(mod, 2, 3, LENGTH, LENGTH, "cpu"))


@pytest.mark.parametrize("number", NUMBERS)
def test_block_sizes_that_are_no_plain_ints(number):
    for given, pair in (
        (number(64), (64, 64)),
        ((number(64), number(32)), (64, 32)),
        ([number(64), 32], (64, 32)),
    ):
        found = flexhop.create_block_mask(checkered, 2, 3, LENGTH, LENGTH, "cpu", given)
        theirs = torch_module.create_block_mask(checkered, 2, 3, LENGTH, LENGTH, "cpu", pair)
        assert_same_lists(found, theirs)
        assert found.BLOCK_SIZE == pair and {type(size) for size in found.BLOCK_SIZE} == {int}


NO_INTS = [True, np.bool_(True), torch.tensor(True), 8.0, np.float64(8), np.float32(8), "8"]
NO_INTS += [torch.tensor(8.0), torch.tensor([8]), np.array([8])]


@pytest.mark.parametrize("size", NO_INTS, ids=repr)
def test_other_sizes_are_refused(size):
    for name in ("B", "H", "Q_LEN", "KV_LEN"):
        sizes = {"B": 1, "H": 1, "Q_LEN": 8, "KV_LEN": 8, name: size}
        for create in (flexhop.create_block_mask, flexhop.create_mask):
            with pytest.raises(OptionValueError, match=f"^Invalid {name} value .*an int"):
                create(causal, **sizes, device="cpu")
    if size is not True:
        with pytest.raises(BlockSizeError, match="sizes must be ints"):
            flexhop.create_block_mask(causal, 1, 1, 8, 8, "cpu", BLOCK_SIZE=(8, size))


def test_symbolic_sizes_stay_symbolic():
    """One graph for all lengths."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=count, dynamic=True)
    def build(query):
        mask = flexhop.create_block_mask(causal, 1, 1, query.size(2), query.size(2), "cpu", 16)
        return mask.kv_num_blocks

    for length in (40, 72, 100):
        expected = flexhop.create_block_mask(causal, 1, 1, length, length, "cpu", 16)
        found = build(torch.zeros(1, 1, length, 8))[..., : -(-length // 16)]
        assert torch.equal(found, expected.kv_num_blocks)
    assert len(graphs) == 1


def test_ints_of_numpy_in_a_compiled_function_with_graph_breaks():
    """Dynamo leaves them to eager mode."""

    @torch.compile(backend="eager")
    def build(length):
        return flexhop.create_block_mask(causal, 1, 1, length, length, "cpu", 16).kv_num_blocks

    expected = flexhop.create_block_mask(causal, 1, 1, 40, 40, "cpu", 16).kv_num_blocks
    assert torch.equal(build(np.int64(40)), expected)


# mods


@pytest.mark.parametrize("combine", ["and_masks", "or_masks"])
def test_combined_masks_have_a_name(combine):
    mod = getattr(flexhop, combine)(causal, sliding_window(20))
    expected = getattr(torch_module, combine)(causal, causal).__name__
    dense = flexhop.create_mask(mod, 1, 1, 40, 40, "cpu")
    for same in (mod, pickle.loads(pickle.dumps(mod)), copy.deepcopy(mod), copy.copy(mod)):
        assert same.__name__ == expected
        assert torch.equal(flexhop.create_mask(same, 1, 1, 40, 40, "cpu"), dense)
    mask = flexhop.create_block_mask(mod, 1, 1, 40, 40, "cpu", 16)
    assert f"mask_mod={expected}," in repr(mask)
    assert pickle.loads(pickle.dumps(mask)).mask_mod.__name__ == expected


@pytest.mark.parametrize("combine", [flexhop.and_masks, flexhop.or_masks])
def test_combined_masks_compile(combine):
    """Made outside of the compiled function, and inside, where a partial has no attributes."""
    made = combine(causal, sliding_window(20))

    def attend(query, is_inside):
        mod = combine(causal, sliding_window(20)) if is_inside else made
        mask = flexhop.create_block_mask(mod, 1, 1, 40, 40, "cpu", 16)
        return flexhop.flex_attention(query, query, query, block_mask=mask)

    query = torch.randn(1, 1, 40, 16)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    expected = flexhop.create_mask(made, 1, 1, 40, 40, "cpu")
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query, expected)
    for is_inside in (False, True):
        torch.testing.assert_close(compiled(query, is_inside), expected)


def test_errors_name_a_combined_mask():
    with pytest.raises(flexhop.errors.ModArityError, match=r"^score_mod 'and_mask'"):
        flexhop.mods.check_arity(flexhop.and_masks(causal), "score_mod")


def test_noop_mask_has_the_parameters_of_pytorch():
    names = list(inspect.signature(torch_module.noop_mask).parameters)
    assert list(inspect.signature(flexhop.noop_mask).parameters) == names
    found = flexhop.noop_mask(**dict.fromkeys(names, torch.arange(3)))
    assert torch.equal(found, torch.tensor(True))
