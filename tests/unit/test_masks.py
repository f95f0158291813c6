"""Ready mask_mods against their definitions, written again as loops over Python integers."""

import pytest
import torch

from flexhop import masks
from flexhop.compat.mods.indexing import IndexMode
from flexhop.errors import ModArgumentError
from flexhop.mods import and_masks, or_masks

BATCH, HEADS = 2, 3


def broadcast_indices(q_len, kv_len):
    sizes = (BATCH, HEADS, q_len, kv_len)
    shapes = [[-1 if axis == d else 1 for axis in range(4)] for d in range(4)]
    return [torch.arange(n, dtype=torch.int32).view(s) for n, s in zip(sizes, shapes, strict=True)]


def dense_by_broadcasting(mask_mod, q_len, kv_len):
    result = mask_mod(*broadcast_indices(q_len, kv_len))
    assert result.dtype == torch.bool
    return result.expand(BATCH, HEADS, q_len, kv_len)


def dense_by_vmap(mask_mod, q_len, kv_len):
    function = mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None)):
        function = torch.vmap(function, in_dims=dims)
    function = torch.vmap(function, in_dims=(0, None, None, None))
    sizes = (BATCH, HEADS, q_len, kv_len)
    with IndexMode():
        return function(*(torch.arange(n, dtype=torch.int32) for n in sizes))


def dense_by_definition(definition, q_len, kv_len):
    result = torch.zeros(BATCH, HEADS, q_len, kv_len, dtype=torch.bool)
    for b in range(BATCH):
        for q in range(q_len):
            for k in range(kv_len):
                result[b, :, q, k] = bool(definition(b, q, k))
    return result


def assert_same_mask(mask_mod, definition, q_len=13, kv_len=13):
    expected = dense_by_definition(definition, q_len, kv_len)
    for dense in (dense_by_broadcasting, dense_by_vmap):
        torch.testing.assert_close(dense(mask_mod, q_len, kv_len), expected)


def natten_keys(length, kernel, position):
    """The `kernel` positions nearest to `position` that lie in range, found by sliding."""
    start = position - kernel // 2
    while start < 0:
        start += 1
    while start + kernel > length:
        start -= 1
    return range(start, start + kernel)


def natten(q, k, height, width, kernel_h, kernel_w):
    (y, x), (v, u) = divmod(q, width), divmod(k, width)
    return v in natten_keys(height, kernel_h, y) and u in natten_keys(width, kernel_w, x)


IDS = torch.tensor([0] * 4 + [1] * 1 + [2] * 6 + [9] * 2)
BATCH_IDS = torch.stack([IDS, IDS.flip(0)])
GLOBAL = torch.tensor([True, False] * 3 + [False] * 7)
BATCH_GLOBAL = torch.stack([GLOBAL, GLOBAL.flip(0)])
LENGTHS = torch.tensor([5, 13])

CASES = {
    "causal": (masks.causal, lambda b, q, k: k <= q),
    "offset int": (masks.causal_with_offset(3), lambda b, q, k: k <= q + 3),
    "offset negative": (masks.causal_with_offset(-3), lambda b, q, k: k <= q - 3),
    "offset tensor": (masks.causal_with_offset(torch.tensor(4)), lambda b, q, k: k - 4 <= q),
    "offset batch": (
        masks.causal_with_offset(torch.tensor([0, 7])),
        lambda b, q, k: k <= q + [0, 7][b],
    ),
    "window": (masks.sliding_window(4), lambda b, q, k: k in (q, q - 1, q - 2, q - 3)),
    "window 1": (masks.sliding_window(1), lambda b, q, k: q == k),
    "window both": (
        masks.sliding_window(3, bidirectional=True),
        lambda b, q, k: k in (q - 2, q - 1, q, q + 1, q + 2),
    ),
    "dilated": (
        masks.dilated_sliding_window(3, 2),
        lambda b, q, k: k in (q, q - 2, q - 4),
    ),
    "dilated both": (
        masks.dilated_sliding_window(2, 3, bidirectional=True),
        lambda b, q, k: k in (q - 3, q, q + 3),
    ),
    "prefix int": (masks.prefix_lm(6), lambda b, q, k: k <= 5 or k <= q),
    "prefix tensor": (masks.prefix_lm(torch.tensor(6)), lambda b, q, k: k <= 5 or k <= q),
    "prefix batch": (masks.prefix_lm(LENGTHS), lambda b, q, k: k < (5, 13)[b] or k <= q),
    "padding": (masks.padding(LENGTHS), lambda b, q, k: k < (5, 13)[b]),
    "global int": (masks.global_tokens(2), lambda b, q, k: q in (0, 1) or k in (0, 1)),
    "global bool": (
        masks.global_tokens(GLOBAL),
        lambda b, q, k: q in (0, 2, 4) or k in (0, 2, 4),
    ),
    "global batch": (
        masks.global_tokens(BATCH_GLOBAL),
        lambda b, q, k: bool({q, k} & [{0, 2, 4}, {12, 10, 8}][b]),
    ),
    "document": (masks.document(IDS), lambda b, q, k: int(IDS[q]) == int(IDS[k])),
    "document batch": (
        masks.document(BATCH_IDS),
        lambda b, q, k: int(BATCH_IDS[b, q]) == int(BATCH_IDS[b, k]),
    ),
    "packed causal": (
        masks.packed_causal(IDS),
        lambda b, q, k: k <= q and int(IDS[q]) == int(IDS[k]),
    ),
    "longformer": (
        or_masks(masks.sliding_window(2, bidirectional=True), masks.global_tokens(1)),
        lambda b, q, k: abs(q - k) <= 1 or 0 in (q, k),
    ),
    "padded causal": (
        and_masks(masks.causal, masks.padding(LENGTHS)),
        lambda b, q, k: k <= q and k < (5, 13)[b],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_definition(name):
    assert_same_mask(*CASES[name])


def test_offset_aligns_the_bottom_right_corners():
    mask_mod = masks.causal_with_offset(9 - 4)
    assert_same_mask(mask_mod, lambda b, q, k: 4 - q <= 9 - k, q_len=4, kv_len=9)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (3, 5), (2, 4), (4, 5)])
def test_natten(kernel):
    height, width = 4, 5
    mask_mod = masks.natten_2d(height, width, *kernel)
    assert_same_mask(mask_mod, lambda b, q, k: natten(q, k, height, width, *kernel), 20, 20)
    assert dense_by_broadcasting(mask_mod, 20, 20).sum(-1).unique().item() == kernel[0] * kernel[1]


def test_document_of_queries_and_keys():
    queries, keys = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 1, 1, 2, 3])
    assert_same_mask(
        masks.document(queries, keys), lambda b, q, k: int(queries[q]) == int(keys[k]), 4, 6
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_from_lengths_and_offsets(dtype):
    lengths = torch.tensor([3, 0, 2, 1], dtype=dtype)
    offsets = torch.tensor([0, 3, 3, 5, 6], dtype=dtype)
    expected = torch.tensor([0, 0, 0, 2, 2, 3], dtype=torch.int32)
    for ids in (masks.ids_from_lengths(lengths), masks.ids_from_offsets(offsets)):
        torch.testing.assert_close(ids, expected)
    padded = torch.tensor([0, 0, 0, 2, 2, 3, 4, 4], dtype=torch.int32)
    torch.testing.assert_close(masks.ids_from_lengths(lengths, 8), padded)
    torch.testing.assert_close(masks.ids_from_offsets(offsets, 8), padded)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.sliding_window(0), "sliding_window: window is 0, but must be at least 1."),
        (
            lambda: masks.dilated_sliding_window(2, 0),
            "sliding_window: dilation is 0, but must be at least 1.",
        ),
        (
            lambda: masks.causal_with_offset(torch.zeros(2, 2)),
            "causal_with_offset: the rank of offset is 2, but must be 0 or 1.",
        ),
        (
            lambda: masks.prefix_lm(torch.zeros(2, 2)),
            "prefix_lm: the rank of prefix is 2, but must be 0 or 1.",
        ),
        (
            lambda: masks.document(torch.zeros(1, 2, 3)),
            "document: the rank of ids is 3, but must be 1 or 2.",
        ),
        (
            lambda: masks.document(IDS, BATCH_IDS),
            "document: the rank of kv_ids is 2, but must be 1.",
        ),
        (
            lambda: masks.global_tokens(IDS),
            "global_tokens: the dtype of chosen is torch.int64, but must be torch.bool.",
        ),
        (
            lambda: masks.natten_2d(4, 4, 5, 3),
            "natten_2d: kernel_h is 5, but must be at most 4.",
        ),
        (
            lambda: masks.natten_2d(4, 4, 3, 0),
            "natten_2d: kernel_w is 0, but must be at least 1.",
        ),
    ],
)
def test_impossible_arguments(make, message):
    with pytest.raises(ModArgumentError) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["offset batch", "window both", "document batch", "longformer"])
def test_compiles_without_graph_breaks(name):
    mask_mod, definition = CASES[name]

    @torch.compile(fullgraph=True, backend="eager")
    def dense():
        return mask_mod(*broadcast_indices(13, 13))

    torch.testing.assert_close(
        dense().expand(BATCH, HEADS, 13, 13), dense_by_definition(definition, 13, 13)
    )
