"""Reads of captured tensors: slices, `...` and `None` beside 0-d index tensors."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import flexhop
from flexhop.compat.mods.indexing import IndexMode
from flexhop.errors import ModResultError
from flexhop.ops import eager
from tests.unit.ops.support import BATCH, HEADS, LENGTH, assert_same, compiled, operands, quiet

pytestmark = quiet


def place(index):
    return index if isinstance(index, torch.Tensor) else torch.tensor(index)


READS = {
    "ellipsis first": lambda t, h, i: t[..., h, 1, i],
    "ellipsis between": lambda t, h, i: t[h, ..., i][2],
    "ellipsis last": lambda t, h, i: t[h, 0, i, ...],
    "slice, then a number": lambda t, h, i: t[h, :, i][1],
    "slice, then an index": lambda t, h, i: t[:, 2, i][h],
    "part of a dimension": lambda t, h, i: t[:, 1:, :][h, 0, i] + t[h, 1:, i][0],
    "every other": lambda t, h, i: t[h, ::2, i][1],
    "new dimension first": lambda t, h, i: t[None, h, 1, i][0],
    "new dimension last": lambda t, h, i: t[h, 1, i, None][0],
    "negative number": lambda t, h, i: t[h, -1, i],
    "numbers last": lambda t, h, i: t[h, 2, 0] + t[h, i % 3, 1] + t[i % 2, 0, 2],
    "take": lambda t, h, i: torch.take(t, place(h * 3 * LENGTH + i)) + t.take(place(h + i)),
    "along a row": lambda t, h, i: (
        torch.take_along_dim(t.flatten(), place(h + i).long()[None], 0)[0]
        + t.flatten().gather(0, place(h * i).long()[None])[0]
    ),
    "embedding": lambda t, h, i: torch.nn.functional.embedding(place(h), t.flatten(1))[9 + i],
    "captured numbers last": lambda t, h, i: t[h, ONE, ONE] - t[h, i % 3, ONE],
}
ONE = torch.tensor(1)
TABLE = torch.randn(HEADS, 3, LENGTH, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", READS)
def test_reads_what_plain_indexing_reads(name):
    read = READS[name]
    with IndexMode():
        rows = torch.vmap(read, in_dims=(None, None, 0))
        found = torch.vmap(rows, in_dims=(None, 0, None))(
            TABLE, torch.arange(HEADS, dtype=torch.int32), torch.arange(LENGTH, dtype=torch.int32)
        )
    expected = [[read(TABLE, h, i) for i in range(LENGTH)] for h in range(HEADS)]
    assert torch.equal(found, torch.tensor(expected))


@pytest.mark.parametrize("is_fixed", [True, False], ids=["fixed", "any length"])
@pytest.mark.parametrize("name", READS)
def test_reads_by_any_number_of_positions(name, is_fixed):
    """As the definition is lowered under dynamic shapes, a chunk of queries at a time."""
    learned = TABLE.clone().requires_grad_()

    def reads(heads, positions, *tables):
        def read(h, i):
            return READS[name](*tables or [learned], h, i % 3)

        with IndexMode():
            of_heads = torch.vmap(torch.vmap(read, in_dims=(None, 0)), in_dims=(0, None))
            return of_heads(heads, positions)

    given = [torch.arange(HEADS, dtype=torch.int32), torch.arange(LENGTH)]
    given += [] if is_fixed else [learned]
    graph = make_fx(reads, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*given)
    given[1] = torch.arange(LENGTH - 4)
    assert torch.equal(graph(*given), reads(*given))


@pytest.mark.parametrize("name", READS)
def test_compiled_with_gradients(name):
    read = READS[name]

    def attend(query, key, value, table):
        return flexhop.flex_attention(
            query, key, value, lambda s, b, h, q, k: s + read(table, h, q) * read(table, h, k)
        )

    assert_same(attend, [*operands(grad=True), TABLE.clone().requires_grad_()])


@pytest.mark.parametrize("run", [lambda function: function, compiled], ids=["eager", "compiled"])
def test_a_row_is_no_score(run):
    def attend(query, key, value):
        return flexhop.flex_attention(query, key, value, lambda s, b, h, q, k: s + TABLE[h, :, q])

    with pytest.raises(ModResultError, match=r"one number per score.*shape \(3,\)"):
        run(attend)(*operands(BATCH))


def test_reads_in_the_creation_of_a_compiled_mask():
    table = TABLE > 0

    def create():
        return flexhop.create_block_mask(
            lambda b, h, q, k: (
                table[..., 1, q][h] & table[h, 1:, k][-1] & table[h, 0, None, k][0]
                | table[h, 1, 2] & table[h, ONE, 3] & ~table[h, 0, ONE]
            ),
            None, HEADS, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=4,
        ).kv_num_blocks  # fmt: skip

    assert torch.equal(compiled(create)(), create())


def test_conversions_of_a_compiled_mod_are_not_computed_one_by_one(recwarn):
    """prims.convert_element_type has no batching rule: PyTorch warns of that, and is slow."""
    q, k, v = (torch.randn(1, 2, 24, 8, requires_grad=True) for _ in range(3))

    def call(q, k, v):
        return flexhop.flex_attention(q, k, v, lambda s, b, h, m, n: s - 0.1 * (m - n).float())

    torch.compile(call, fullgraph=True)(q, k, v).sum().backward()
    assert not [w for w in recwarn if "batching rule" in str(w.message)]


def test_isclose_has_no_loop_over_scores():
    """PyTorch warns of its loop, and warnings are errors."""
    nan, inf = float("nan"), float("inf")
    values = torch.tensor([0.0, 1.0, 1.0 + 1e-6, 1.1, nan, inf, -inf, 1e9])
    with IndexMode():
        for options in ({}, {"equal_nan": True}, {"rtol": 0.0, "atol": 0.2}):
            compare = lambda a, b, options=options: torch.isclose(a, b, **options)  # noqa: E731
            found = torch.vmap(torch.vmap(compare, (None, 0)), (0, None))(values, values)
            assert torch.equal(found, torch.isclose(values[:, None], values, **options))
    numbers = torch.arange(40) // 7
    mask = flexhop.create_block_mask(
        lambda b, h, q, k: numbers[q].isclose(numbers[k], 0.0, 1.0), 1, 1, 40, 40, "cpu", 16
    )
    assert mask.to_dense().tolist() == [[[[1, 1, 0], [1, 1, 1], [0, 1, 1]]]]


def test_all_of_a_short_tensor_learns_under_symbolic_sizes():
    """Its sizes become static: each of its numbers has a gradient of its own."""
    first, second = (torch.randn(s, requires_grad=True) for s in ((2, 8), (8,)))

    def mod(s, b, h, q_idx, kv_idx):
        return s + torch.relu(torch.stack([s, 0.1 * kv_idx]) @ first) @ second

    def attend(q, k, v):
        return flexhop.flex_attention(q, k, v, mod)

    run = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (20, 24):
        inputs = [torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3)]
        leaves = [*inputs, first, second]
        found, expected = (torch.autograd.grad(f(*inputs).sum(), leaves) for f in (run, attend))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [1 << 14, 1 << 22])
def test_gradients_of_a_16_bit_table_are_summed_in_32_bits(monkeypatch, dtype, chunk):
    """Ten thousands of scores read each entry: 16 % of the gradient were lost."""
    monkeypatch.setattr(eager, "CHUNK_ELEMENTS", chunk)
    inputs = [torch.randn(1, 2, 512, 8) for _ in range(3)]
    weights = torch.randn(1, 2, 512, 8)

    def gradient(kind: torch.dtype) -> torch.Tensor:
        table = torch.zeros(16, dtype=kind, requires_grad=True)
        out = flexhop.flex_attention(
            *(tensor.to(kind) for tensor in inputs),
            lambda score, b, h, q, k: score + table[(q - k) % 16],
        )
        (out * weights.to(kind)).sum().backward()
        return table.grad

    wanted = gradient(torch.float64)
    assert (gradient(dtype) - wanted).norm() < 0.02 * wanted.norm()


def test_graphs_take_tensors_that_are_wider_than_those_they_were_traced_with():
    """`lerp` and products of matrices take no two dtypes; others say what is wrong."""
    rows = torch.tensor([[0.5, 1.0], [2.0, -1.0]])
    with IndexMode():
        assert torch.ops.aten.mm.default(rows, rows.double()).equal(rows.double() @ rows.double())
        assert torch.ops.aten.mm.default(rows.int(), rows.int()).dtype == torch.int32
        between = torch.ops.aten.lerp.Tensor(rows.double(), rows, rows.bfloat16())
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(rows, rows.double())
    assert between.equal(rows.double())
