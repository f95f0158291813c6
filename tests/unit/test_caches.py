"""page_table, k_mod and v_mod by definition, compiled on a CPU, and what is refused."""

import pytest
import torch

import flexhop
from flexhop import PageTable, errors
from flexhop.mods import dequantize
from tests.cache_cases import CASES, assert_cache_case, cache_call, make_cache_inputs, operands

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
BOTH = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_definition(case):
    inputs = make_cache_inputs(case)
    assert_cache_case(case, inputs, cache_call(inputs)(*operands(inputs)))


NAMES = ("page_16", "prompt_page_5", "int8", "shifted", "e4m3_rows_sinks")


@pytest.mark.parametrize("case", [c for c in CASES if c.name in NAMES], ids=lambda c: c.name)
def test_compiled_for_a_cpu(case):
    inputs = make_cache_inputs(case)
    call = torch.compile(cache_call(inputs), fullgraph=True)
    assert_cache_case(case, inputs, call(*operands(inputs)))


def test_a_cache_may_be_one_row_of_pages():
    case = CASES[2]
    inputs = make_cache_inputs(case)
    key, value = (t.transpose(0, 1).flatten(1, 2)[None] for t in (inputs.key, inputs.value))
    out, aux = cache_call(inputs)(inputs.query, key, value, inputs.table, None)
    assert_cache_case(case, inputs, (out, aux))


def test_mods_see_positions_in_the_sequence():
    inputs = make_cache_inputs(CASES[2])
    key, value = (t.float() for t in inputs.exact)
    lengths = inputs.table.lengths
    bias = torch.randn(6, key.size(2))

    def score(s, b, h, q_idx, kv_idx):
        return s + bias[h, kv_idx]

    found = flexhop.flex_attention(
        inputs.query, inputs.key, inputs.value, score, enable_gqa=True, page_table=inputs.table
    )
    mask = flexhop.create_block_mask(
        lambda b, h, q, k: k < lengths[b], 3, None, 1, key.size(2), "cpu"
    )
    expected = flexhop.flex_attention(inputs.query, key, value, score, mask, enable_gqa=True)
    torch.testing.assert_close(found, expected)


def test_a_table_of_a_paged_cache():
    paged = flexhop.PagedAttention(9, 8, 3, "cpu")
    lengths = torch.tensor([13, 20])
    caches = [torch.full((1, 2, 72, 16), torch.nan) for _ in range(2)]
    key, value = (torch.randn(2, 2, 20, 16) for _ in range(2))
    for sequence, row in ((2, 0), (0, 1)):
        paged.reserve(sequence, int(lengths[row]))
        steps = torch.arange(int(lengths[row]))[None]
        parts = (t[row : row + 1, :, : int(lengths[row])] for t in (key, value))
        paged.assign(torch.tensor([sequence]), steps, *parts, *caches)
    table = paged.table(lengths, torch.tensor([2, 0]))
    query = torch.randn(2, 2, 1, 16)
    found = flexhop.flex_attention(query, *caches, page_table=table)
    mask = flexhop.create_block_mask(lambda b, h, q, k: k < lengths[b], 2, None, 1, 20, "cpu")
    torch.testing.assert_close(found, flexhop.flex_attention(query, key, value, block_mask=mask))
    assert torch.equal(paged.table(lengths).pages, paged.page_table[:2].int())


# mistakes


def table(**changes) -> PageTable:
    pages = torch.tensor([[4, 1, -1], [0, 3, 2]], dtype=torch.int32)
    lengths = torch.tensor([20, 48], dtype=torch.int32)
    return PageTable(pages, 16, lengths)._replace(**changes)


def cache(dtype=torch.float32, **options):
    return torch.zeros(5, 2, 16, 32, **options).to(dtype)


def bad_calls():
    int8, ones = cache(torch.int8), torch.ones
    return {
        "type": ({"page_table": ones(2, 3)}, "page_table is a Tensor, but must be a flexhop.Page"),
        "dtype": ({"page_table": table(pages=ones(2, 3).long())}, "has pages of torch.int64"),
        "rank": ({"page_table": table(pages=ones(2).int())}, "has pages of shape [2]"),
        "batch": ({"page_table": table(lengths=ones(3).int())}, "first of size 2, query's batch"),
        "size": ({"page_table": table(page_size=0)}, "has page_size 0, but it must be at least 1"),
        "room": ({"page_table": table(pages=ones(2, 0).int())}, "has pages of shape [2, 0]"),
        "pages": ({"page_table": table(page_size=15)}, "must be [P, Hkv, 15, D] or [1, Hkv, P *"),
        "mask": (
            {
                "page_table": table(),
                "block_mask": flexhop.create_block_mask(
                    lambda b, h, q, k: k >= q, None, None, 1, 40, "cpu"
                ),
            },
            "created for 1 queries and 40 keys, but query has length 1 and key has length 48",
        ),
        "no_mod": ({"key": int8, "v_mod": dequantize(1.0)}, "pass k_mod=flexhop.mods.dequantize"),
        "stored": (
            {"key": int8.long(), "k_mod": dequantize(1.0), "page_table": table()},
            "key is torch.int64, but query is torch.float32; k_mod reads float16",
        ),
        "scale": (
            {"key": int8, "k_mod": dequantize(ones(3)), "page_table": table()},
            "the scale of k_mod has shape [3], but must have [2]",
        ),
        "scale_of_keys": (
            {"key": int8, "k_mod": dequantize(ones(2, 2, 40)), "page_table": table()},
            "shape [2, 2, 40], but must have [2, 2, 48]",
        ),
        "scale_of_rows": (
            {"key": int8, "k_mod": dequantize(ones(2, 2, 16), table()), "page_table": table()},
            "shape [2, 2, 16], but must have [5, 2, 16]",
        ),
        "gradient": (
            {"value": cache(requires_grad=True), "page_table": table()}, "under torch.no_grad()",
        ),
        "result": ({"k_mod": lambda x, b, h, i: i, "page_table": table()}, "a floating-point"),
        "arity": ({"k_mod": lambda x, b: x, "page_table": table()}, "called as (k, b, h, kv_idx)"),
    }  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", bad_calls())
def test_mistakes(name, compiled):
    changes, text = bad_calls()[name]
    call = flexhop.flex_attention
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="eager")
    arguments = {"query": torch.zeros(2, 4, 1, 32), "key": cache(), "value": cache()} | changes
    with pytest.raises(errors.FlexhopError) as caught:
        call(**arguments, enable_gqa=True)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lengths": torch.tensor([20, 49], dtype=torch.int32)}, "3 pages of 16 keys hold 48"),
        ({"lengths": torch.tensor([-1, 3], dtype=torch.int32)}, "has length -1 for sequence 0"),
        (
            {"lengths": torch.tensor([33, 3], dtype=torch.int32)},
            "only 32 keys have pages: entry 2",
        ),
        (
            {"pages": torch.tensor([[4, 1, -1], [0, 5, 2]], dtype=torch.int32)},
            "has page 5 at [1, 1], but the cache has 5 pages",
        ),
    ],
)
def test_values_are_looked_at_without_compile(changes, text):
    with pytest.raises(errors.CacheShapeError) as caught:
        flexhop.flex_attention(
            torch.zeros(2, 2, 1, 32), cache(), cache(), page_table=table(**changes)
        )
    assert text in str(caught.value)


def test_scales_of_other_shapes_are_refused():
    with pytest.raises(errors.ModArgumentError, match=r"\[2, 3\], but must be \[\], \[Hkv\]"):
        dequantize(torch.ones(2, 3))
    with pytest.raises(errors.ModArgumentError, match=r"must be \[P, Hkv, page_size"):
        dequantize(torch.ones(2), table())
    with pytest.raises(errors.ModArgumentError, match="int64, but must be floating-point"):
        dequantize(torch.ones(2).long())


def test_a_captured_tensor_with_a_gradient_is_refused():
    bias = torch.zeros(2, requires_grad=True)
    call = torch.compile(
        lambda q, k, v: flexhop.flex_attention(
            q, k, v, lambda s, b, h, i, j: s + bias[h], page_table=table()
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(errors.UnsupportedFeatureError, match="A gradient of flex_attention"):
        call(torch.zeros(2, 2, 1, 32), cache(), cache())


@BOTH
def test_dropout_is_refused(compiled):
    """A cache serves inference; to drop nothing in silence would be a wrong answer."""

    def call(q, k, v):
        return flexhop.flex_attention(q, k, v, page_table=table(), dropout_p=0.5)

    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises(errors.UnsupportedFeatureError, match="dropout_p with page_table"):
        call(torch.zeros(2, 2, 1, 32), cache(), cache())
