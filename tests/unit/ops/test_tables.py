"""Parts of mods as tables: values and gradients are those of the mods themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

import flexhop
from benchmarks.unusual import t5_bucket
from flexhop.compat.modes import assumed
from flexhop.ops.args import AttentionArgs
from flexhop.ops.graphs.tables import tabulate, tabulate_mask
from flexhop.sequences.row_tables import (
    RowTables,
    Window,
    local_mask_mod,
    local_score_mod,
    tabulate_rows,
)
from tests.tabulated import check_gradients

HEADS, QUERIES, KEYS = 3, 48, 64
SIDE = 8


def learned(*size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.rand(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


T5, PLAIN, SQUARE = learned(32, HEADS), learned(HEADS, 2 * KEYS), learned(15 * 15, HEADS)
SLOPES, FACTORS = learned(HEADS), torch.rand(HEADS).double()


def t5(s, b, h, q, k, table):
    return s + table[t5_bucket(k - q), h]


def t5_spelled_otherwise(s, b, h, q, k, table):
    return table[t5_bucket(-(q - k)), h] + s


def swin(s, b, h, q, k, table):
    row, column = q // SIDE - k // SIDE + 7, q % SIDE - k % SIDE + 7
    return s + table[row * 15 + column, h]


def decay(s, b, h, q, k, factors):
    return s * (1 - factors[h] / 8) ** (q - k).abs()


def log_distance(s, b, h, q, k, slopes):
    """NaN for keys behind a query, which a mask hides."""
    return s - slopes[h] * torch.log(1.0 + q - k)


def of_distance_alone(s, b, h, q, k, slopes):
    """Nothing subtracts or adds the whole."""
    return slopes[h] * torch.sin((q - k) * 0.1)


def subtracted_and_added(s, b, h, q, k, slopes):
    wave = slopes[h] * torch.sin((q - k) * 0.1)
    return (s - wave) * wave - slopes[h] * torch.cos((q - k) * 0.2)


def one_sided(s, b, h, q, k, slopes):
    """Comparisons of both positions, which see their distance only."""
    root = torch.where(q >= k, q - k, 0).double().sqrt()
    return s + slopes[h] * torch.where(k > q + h, torch.exp(-((k - q).abs() / 8)), root)


def nearer_row(s, b, h, q, k, slopes):
    """A comparison of quotients, and one of a difference with a number."""
    far = (q // SIDE - k // SIDE).abs() > 2
    return s + slopes[h] * torch.where(
        (q // SIDE <= k // SIDE) & ~far, torch.sin(q // SIDE - k // SIDE + 0.5), 0.3
    )


def waves(s, b, h, q, k, factors):
    return s + torch.sin(k * factors[h]) * torch.cos(q * factors[h])


def plain(s, b, h, q, k, table):
    return s + table[h, q - k + KEYS - 1]


def of_score(s, b, h, q, k, slopes):
    return s * torch.sigmoid(s) + slopes[h] * (q - k)


DISTANCES = SUMS = QUERIES + KEYS - 1
ROWS = 7 + 6
MADE: dict[Any, tuple[torch.Tensor, list[tuple[int, ...]]]] = {
    t5: (T5, [(HEADS, DISTANCES)]),
    t5_spelled_otherwise: (T5, [(HEADS, DISTANCES)]),
    decay: (FACTORS, [(HEADS, DISTANCES)]),
    log_distance: (SLOPES, [(HEADS, DISTANCES)]),
    of_distance_alone: (SLOPES, [(HEADS, DISTANCES)]),
    subtracted_and_added: (SLOPES, [(HEADS, DISTANCES), (HEADS, DISTANCES)]),
    one_sided: (SLOPES, [(HEADS, DISTANCES)]),
    nearer_row: (SLOPES, [(HEADS, ROWS)]),
}


def arguments(mod: Any, capture: torch.Tensor, keys: int = KEYS) -> AttentionArgs:
    query = torch.zeros(16, HEADS, QUERIES, 8, dtype=torch.float64)
    key = torch.zeros(16, HEADS, keys, 8, dtype=torch.float64)
    every = lambda b, h, q, k: q >= 0  # noqa: E731
    return AttentionArgs(query, key, key, mod, every, (), 1.0, {}, (capture,), ())


def scores(mod: Any, captures: Any) -> torch.Tensor:
    """What a mod makes of some scores [1, Hq, M, N]."""
    shape = (1, HEADS, QUERIES, KEYS)
    indices = [
        torch.arange(n, dtype=torch.int32).view([-1 if i == axis else 1 for i in range(4)])
        for axis, n in enumerate(shape)
    ]
    score = torch.linspace(-2, 2, 31, dtype=torch.float64).repeat(1000)[: HEADS * QUERIES * KEYS]
    return mod(score.view(shape), *indices, *captures)


@pytest.mark.parametrize("mod", MADE)
def test_tables_hold_what_the_mod_computes(mod):
    capture, sizes = MADE[mod]
    found = tabulate(arguments(mod, capture))
    assert found is not None
    assert list(found.sizes) == sizes
    assert found.saved > 2
    wanted, made = scores(mod, (capture,)), scores(found.mod, found.captures)
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("mod", [t5, one_sided, subtracted_and_added, of_distance_alone])
def test_gradients_go_through_tables(mod):
    capture, _ = MADE[mod]
    found = tabulate(arguments(mod, capture))
    assert found is not None
    check_gradients(scores(mod, (capture,)), scores(found.mod, found.captures), capture)


@pytest.mark.parametrize(
    ("mod", "has_table"),
    [
        (lambda s, b, h, q, k, t: s * torch.cos((q - k) * 0.05), False),
        (lambda s, b, h, q, k, t: torch.tanh(s - t[h]) * torch.cos((q - k) * 0.05), False),
        (lambda s, b, h, q, k, t: s + torch.cos((q - k) * 0.05), True),
        (lambda s, b, h, q, k, t: torch.where(q > k, s, torch.cos((q - k) * 0.05)), True),
        (lambda s, b, h, q, k, t: s * torch.lgamma((q - k).abs() + 1.5).cos().cosh(), True),
    ],
)
def test_a_factor_of_a_trained_score_must_save_more(mod, has_table):
    """Its gradient reads the table once more."""
    call = arguments(mod, SLOPES.detach())
    assert tabulate(call) is not None
    trained = call._replace(query=call.query.clone().requires_grad_())
    assert (tabulate(trained) is not None) == has_table


def test_a_trained_factor_is_a_table():
    mod = lambda s, b, h, q, k, table: s * table[(7 * q + k) % 5]  # noqa: E731
    call = arguments(mod, PLAIN[0, :5].detach().clone().requires_grad_())
    assert tabulate(call._replace(query=call.query.clone().requires_grad_())) is not None


def test_what_is_cheap_or_sees_the_score_stays():
    assert tabulate(arguments(plain, PLAIN)) is None
    assert tabulate(arguments(of_score, SLOPES)) is None


def test_a_table_must_be_small_beside_the_scores():
    call = arguments(t5, T5)
    assert tabulate(call._replace(query=call.query[:1, :, :1], key=call.key[:1])) is None


def half_of_score(s, b, h, q, k, table):
    return torch.sin(s * 0.7 + 0.3 * s.detach()) + table[t5_bucket(k - q), h].exp()


def half_of_table(s, b, h, q, k, table):
    bias = table[t5_bucket(k - q), h]
    return torch.sin(s) + bias.exp() * bias.detach() + (bias * bias.detach().exp()).cos()


def detached_factor(s, b, h, q, k, table):
    """A table of what is detached, and one of what is not."""
    bias = table[t5_bucket(k - q), h]
    return torch.sin(s) * bias.exp().detach() + torch.sin((s * bias).detach() * s) + bias.cos()


def detached_tensor(s, b, h, q, k, table):
    """The whole tensor is detached, whose entry kernels read as fast."""
    return torch.sin(s) + table.detach()[h, h] * torch.cosh(table[t5_bucket(k - q), h])


def one_of_two_results(s, b, h, q, k, table):
    """Gradients flow through operators with several results."""
    largest, soft = torch.stack([s, s * s]).max(0).values, logsigmoid(s)
    bias = table[t5_bucket(k - q), h]
    return largest * largest.detach() + torch.sin(soft + 0.3 * soft.detach()) + bias.exp()


def sorted_table(s, b, h, q, k, table):
    ordered = table.sort(0).values[k % 32, h]
    return torch.sin(s) + ordered.detach().exp() * table[t5_bucket(k - q), h].cos()


def without_gradients(s, b, h, q, k, table):
    with torch.no_grad():
        largest = torch.maximum(s, table[t5_bucket(k - q), h])
        bias = table[t5_bucket(k - q), h].exp()
    return torch.sin(s - largest) + bias * table[t5_bucket(k - q), h]


DETACHED = {
    half_of_score: 1,
    half_of_table: 2,
    detached_factor: 3,
    detached_tensor: 1,
    one_of_two_results: 1,
    without_gradients: 2,
}


@pytest.mark.parametrize("mod", DETACHED)
def test_what_the_user_detached_stays_detached(mod):
    """Gradients of the score and the captured tensor, and gradients of these."""
    found = tabulate(arguments(mod, T5))
    assert found is not None
    assert found.sizes == ((HEADS, DISTANCES),) * DETACHED[mod]
    weights = torch.linspace(-1, 1, HEADS * QUERIES * KEYS, dtype=torch.float64)
    derivatives = []
    for own, captures in ((mod, (T5,)), (found.mod, found.captures)):
        factor = torch.ones((), dtype=torch.float64, requires_grad=True)  # of all scores
        scaled = lambda s, *rest, own=own, factor=factor: own(s * factor, *rest)  # noqa: E731
        made = scores(scaled, captures)
        leaves = (factor, T5)
        grads = torch.autograd.grad(made, leaves, weights.view_as(made), create_graph=True)
        sum_of_both = grads[0] + grads[1].square().sum()
        again = torch.autograd.grad(sum_of_both, leaves, materialize_grads=True)
        derivatives.append((made, *grads, *again))
    for wanted, got in zip(*derivatives, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_a_sorted_table_that_the_user_detached_stays_detached():
    found = tabulate(arguments(sorted_table, T5))
    assert found is not None
    grads = [
        torch.autograd.grad(scores(mod, captures).sum(), T5)[0]
        for mod, captures in ((sorted_table, (T5,)), (found.mod, found.captures))
    ]
    torch.testing.assert_close(grads[1], grads[0])


def test_a_part_of_the_score_that_the_user_detached_stays_detached():
    """No captured tensor needs a gradient, but query and key do."""
    found = tabulate(arguments(half_of_score, T5.detach()))
    assert found is not None
    score = torch.linspace(-2, 2, 7, dtype=torch.float64, requires_grad=True)
    indices = [torch.tensor(i, dtype=torch.int32) for i in (0, 1, 5, 9)]
    grads = [
        torch.autograd.grad(own(score, *indices, *captures).sum(), score)[0]
        for own, captures in ((half_of_score, (T5.detach(),)), (found.mod, found.captures))
    ]
    torch.testing.assert_close(grads[1], grads[0])
    plain = lambda s, b, h, q, k, table: s * 1.3 + table[t5_bucket(k - q), h].detach()  # noqa: E731
    assert tabulate(arguments(plain, T5.detach())) is not None


def test_what_no_kernel_computes_is_a_table_beside_a_detached_score():
    mod = lambda s, b, h, q, k, table: s + 0.3 * s.detach() + table[h].sort().values[k]  # noqa: E731
    found = tabulate(arguments(mod, PLAIN))
    assert found is not None
    assert found.sizes == ((HEADS, 2 * KEYS),)


def test_a_detached_table_needs_no_gradient():
    mod = lambda s, b, h, q, k, table: s + table[t5_bucket(k - q), h].detach()  # noqa: E731
    found = tabulate(arguments(mod, T5))
    assert found is not None
    assert not found.captures[-1].requires_grad


def test_16_bit_tables_are_summed_in_fp32():
    table = learned(32, HEADS, dtype=torch.bfloat16)
    found = tabulate(arguments(t5, table))
    assert found is not None
    assert found.captures[-1].dtype == torch.float32


def between_entries(s, b, h, q, k, table):
    """`lerp` takes no two dtypes."""
    far = (q - k).abs()
    return s + torch.lerp(
        table[h, far // 4], table[h, far // 4 + 1], (far % 4).to(table.dtype) / 4
    )


def test_16_bit_tables_of_an_operator_that_takes_one_dtype():
    table = learned(HEADS, KEYS, dtype=torch.bfloat16)
    found = tabulate(arguments(between_entries, table))
    assert found is not None
    made = scores(found.mod, found.captures)
    wanted = scores(between_entries, (table.double(),))
    torch.testing.assert_close(made, wanted.to(made.dtype), rtol=1e-6, atol=1e-6)
    assert torch.autograd.grad(made.sum(), table)[0].dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
@pytest.mark.parametrize("mod", [t5, swin])
def test_compiled_calls_have_the_same_results_and_gradients(mod):
    capture = {t5: T5, swin: SQUARE}[mod].detach().float().requires_grad_()
    operands = [torch.randn(16, HEADS, KEYS, 16, requires_grad=True) for _ in range(3)]

    def attend(query, key, value):
        score_mod = lambda s, b, h, q, k: mod(s, b, h, q, k, capture)  # noqa: E731
        return flexhop.flex_attention(query, key, value, score_mod)

    results = []
    for call in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = call(*operands)
        grads = torch.autograd.grad(out, [*operands, capture], torch.ones_like(out))
        results.append((out, *grads))
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)


PACKED = (3, 20, 41)  # where the sequences of KEYS tokens end, but the last


def packed_rows() -> RowTables:
    cut = torch.tensor([0, *PACKED, KEYS])
    rows = tabulate_rows(cut, cut, KEYS, Window())
    return rows.with_keys(rows)


def in_sequences(make: Any, own: Any) -> Any:
    """A mod of packed tokens whose last captures are the tables of rows."""

    def mod(*args):
        indices, capture, numbers = args[:-9], args[-9], args[-8:]
        places = RowTables(*numbers[:6], True, *numbers[6:])
        return make(lambda *local: own(*local, capture), places)(*indices)

    return mod


def packed_arguments(**changes: Any) -> AttentionArgs:
    rows = packed_rows()
    numbers = (*rows[:6], rows.key_sequence, rows.key_position)
    query = torch.zeros(16, HEADS, KEYS, 8, dtype=torch.float64)
    args = arguments(plain, PLAIN)._replace(query=query)
    return args._replace(**{n: (*v, *numbers) if "capt" in n else v for n, v in changes.items()})


def test_a_bias_of_packed_keys_is_a_table_of_tokens():
    """A kernel reads it once per key, not a sequence and a position first."""
    rows, bias = packed_rows(), learned(len(PACKED) + 1, HEADS, KEYS)
    mod = in_sequences(local_score_mod, lambda s, b, h, q, k, bias: s + bias[b, h, k] * 0.5)
    found = tabulate(packed_arguments(score_mod=mod, score_captures=(bias,)))
    assert found is not None
    assert found.sizes == ((HEADS, KEYS),)
    table = found.captures[-1]
    wanted = bias[rows.key_sequence, :, rows.key_position].T * 0.5
    torch.testing.assert_close(table, wanted)
    assert table.requires_grad


@pytest.mark.parametrize("is_learned", [False, True])
def test_a_bias_by_distance_in_packed_sequences_is_a_table_of_distances(is_learned):
    """Entries of distances beyond the longest sequence are not used, and read nothing outside."""
    lengths = torch.tensor([0, *PACKED, KEYS]).diff()
    longest = int(lengths.max())
    weights = learned(HEADS, longest) if is_learned else torch.randn(HEADS, longest).double()

    def own(s, b, h, q, k, weights):
        return s + torch.tanh(weights[h, (q - k).abs()] * torch.exp(-(q - k).double() / 64))

    args = packed_arguments(
        score_mod=in_sequences(local_score_mod, own), score_captures=(weights,)
    )
    found = tabulate(args)
    assert found is not None
    assert found.sizes == ((HEADS, 2 * KEYS - 1),)
    sequence = packed_rows().sequence
    is_used = (sequence[:, None] == sequence)[:QUERIES]
    made, wanted = (
        scores(mod, captures)[..., is_used]
        for mod, captures in ((found.mod, found.captures), (args.score_mod, args.score_captures))
    )
    torch.testing.assert_close(made, wanted)
    if is_learned:
        grads = [torch.autograd.grad(x.square().sum(), weights)[0] for x in (made, wanted)]
        torch.testing.assert_close(*grads)


def test_what_a_mask_reads_of_packed_keys_is_a_table_of_tokens():
    rows, kinds = packed_rows(), torch.arange(4 * KEYS).view(4, KEYS) % 3
    mod = in_sequences(local_mask_mod, lambda b, h, q, k, kinds: (kinds[b, k] > 0) | (q == k))
    args = packed_arguments(mask_mod=mod, mask_captures=(kinds,))
    found = tabulate_mask(args)
    assert found is not None
    assert found.sizes == ((KEYS,),)
    assert torch.equal(found.captures[-1], kinds[rows.key_sequence, rows.key_position] > 0)
    zero, places = torch.zeros((), dtype=torch.int32), torch.arange(KEYS, dtype=torch.int32)
    indices = zero, zero, places[:, None], places
    made = found.mod(*indices, *found.captures)
    assert torch.equal(made, mod(*indices, *args.mask_captures))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
def test_reads_that_say_where_a_table_is_read_do_not_ask_for_one(dtype):
    """A comparison of ids is cheaper than a table of their differences."""
    kinds = (torch.arange(4 * KEYS).view(4, KEYS) % 3).to(dtype)
    mod = in_sequences(local_mask_mod, lambda b, h, q, k, kinds: ~(kinds[b][q] == kinds[b][k]))
    args = packed_arguments(mask_mod=mod, mask_captures=(kinds,))
    found = tabulate_mask(args)
    assert found is not None
    assert found.sizes == ((KEYS,),)


def test_places_in_tables_do_not_overflow():
    """Ids of 8 bits differ by up to 255."""
    ids = (torch.arange(KEYS) % 2 * 255 - 128).to(torch.int8)

    def mod(s, b, h, q, k, ids):
        return s - torch.log1p((ids[q].int() - ids[k].int()).abs().double())

    found = tabulate(arguments(mod, ids))
    assert found is not None
    assert found.sizes == ((511,),)
    torch.testing.assert_close(scores(found.mod, found.captures), scores(mod, (ids,)))


def test_what_says_where_a_table_is_read_may_be_a_table():
    """It costs a function for each key. Its bounds stay known, so that reads need no checks."""
    table = learned(9, HEADS)

    def bins(at):
        return (torch.sin(at.double()) * torch.cos(at.double()) * 8 + 4).long()

    def mod(s, b, h, q, k, table):
        return s + torch.tanh(table[(bins(q) - bins(k)).clamp(-4, 4) + 4, h]) * 2

    found = tabulate(arguments(mod, table))
    assert found is not None
    assert found.sizes[0][0] == HEADS
    assert (KEYS,) in found.sizes
    torch.testing.assert_close(scores(found.mod, found.captures), scores(mod, (table,)))


def test_bounds_of_integers_in_tables_stay_known():
    def mod(s, b, h, q, k, table):
        near = (torch.sin(k.double()) * 3).long().clamp(-3, 3)
        return s + (near - (torch.cos(q.double()) * 3).long()) * s.detach()

    found = tabulate(arguments(mod, PLAIN))
    assert found is not None
    clamps = found.mod.graph.find_nodes(op="call_function", target=torch.ops.aten.clamp.default)
    assert [node.args[1:] for node in clamps] == [(-3, 3)]
    torch.testing.assert_close(scores(found.mod, found.captures), scores(mod, (PLAIN,)))


def test_masks_of_dense_calls_read_no_tables():
    kinds = torch.arange(KEYS) % 3
    mod = lambda b, h, q, k, kinds: torch.sin(kinds[kinds[k]] * 1.5) > 0  # noqa: E731
    args = arguments(plain, PLAIN)._replace(mask_mod=mod, mask_captures=(kinds,))
    assert tabulate_mask(args) is None


ENDS = torch.tensor([3, 4, 9, 17], dtype=torch.int32)


def bumps(s, b, h, q, k, centres):
    """Short rows of numbers."""
    return s + 0.5 * torch.exp(-(((q - k) * 0.1 - centres) ** 2)).sum()


def waves_of_rows(s, b, h, q, k, centres):
    return s + (h + 1) * (torch.tanh((k - q).abs() * centres) * centres).sum()


def segment(index: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return (index >= ends).sum()


def place(index: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A search among 20 numbers: five reads, one after the other."""
    return torch.searchsorted(ends.repeat_interleave(5), index)


def each_score(mod: Any, captures: Any) -> torch.Tensor:
    """What a mod makes of scores [Hq, M, N], asked about one at a time."""
    sizes = (HEADS, QUERIES, KEYS)
    asked = lambda h, q, k: mod(0.25 * k, torch.tensor(0), h, q, k, *captures)  # noqa: E731
    for dim in ((None, None, 0), (None, 0, None), (0, None, None)):
        asked = torch.vmap(asked, dim)
    return asked(*map(torch.arange, sizes))


@pytest.mark.parametrize(
    ("mod", "size"), [(bumps, (DISTANCES,)), (waves_of_rows, (HEADS, DISTANCES))]
)
def test_tables_of_what_is_computed_with_short_rows(mod, size):
    centres = torch.linspace(-1, 1, 4, dtype=torch.float64)
    found = tabulate(arguments(mod, centres))
    assert found is not None
    assert list(found.sizes) == [size]
    wanted, made = each_score(mod, (centres,)), each_score(found.mod, found.captures)
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)


def test_gradients_of_short_rows_go_through_tables():
    centres = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
    found = tabulate(arguments(waves_of_rows, centres))
    assert found is not None
    sums = [
        (each_score(waves_of_rows, (centres,)).sin()).sum(),
        (each_score(found.mod, found.captures).sin()).sum(),
    ]
    wanted, made = (torch.autograd.grad(total, centres)[0] for total in sums)
    torch.testing.assert_close(made, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("mask", "sizes"),
    [
        (lambda b, h, q, k, ends: segment(q, ends) == segment(k, ends), [(KEYS,)]),
        (lambda b, h, q, k, ends: (segment(k, ends) > 1) | (q >= k), [(KEYS,)]),
        (lambda b, h, q, k, ends: (q // ends.repeat(5)).any() & (q >= k), [(QUERIES,)]),
        (
            lambda b, h, q, k, ends: place(q, ends) == place(k, ends),
            [(QUERIES,), (KEYS,)],
        ),
        (lambda b, h, q, k, ends: (q >= k) & (k // 57 == q // 57), None),
        (lambda b, h, q, k, ends: (q - k >= ends).sum() > 1, None),
    ],
)
def test_masks_have_tables_of_what_they_compute_with_short_rows(mask, sizes):
    args = arguments(bumps, torch.ones(1))._replace(mask_mod=mask, mask_captures=(ENDS,))
    found = tabulate_mask(args)
    assert (list(found.sizes) if found else None) == sizes
    if found:
        wanted = each_score(lambda s, *rest: mask(*rest), (ENDS,))
        assert torch.equal(each_score(lambda s, *rest: found.mod(*rest), found.captures), wanted)


WIDTHS = torch.tensor([3, 9, 20])


@pytest.mark.parametrize(
    ("mask", "sizes"),
    [
        (lambda b, h, q, k, w: (q >= k) & ((q - k) % (h + 2) == 0), [(HEADS, DISTANCES)]),
        (
            lambda b, h, q, k, w: (((q - k) & (q - k - 1)) == 0) | ((q - k).abs() < w[h]),
            [(HEADS, DISTANCES)],
        ),
        (lambda b, h, q, k, w: (q - k == w).any() | (h == k % HEADS), [(DISTANCES,)]),
        # A table by both sums would be larger than one by query and key.
        (
            lambda b, h, q, k, w: (h == k) | (((q - k) % 7 == 0) & ((q + k) % 5 != 3)),
            [(DISTANCES,), (SUMS,)],
        ),
        (lambda b, h, q, k, w: (q >= k) & (q - k < w[h]), None),  # cheaper than a read
        (lambda b, h, q, k, w: (q >= k) & ((q - k) % 5 == 0), None),  # heads share it
    ],
)
def test_masks_that_heads_do_not_share_have_tables_by_distance(mask, sizes):
    args = arguments(bumps, torch.ones(1))._replace(mask_mod=mask, mask_captures=(WIDTHS,))
    found = tabulate_mask(args)
    assert (list(found.sizes) if found else None) == sizes
    if found:
        assert all(table.dtype == torch.bool for table in found.captures[-len(found.sizes) :])
        wanted = each_score(lambda s, *rest: mask(*rest), (WIDTHS,))
        assert torch.equal(each_score(lambda s, *rest: found.mod(*rest), found.captures), wanted)


def test_masks_of_heads_are_computed_on_gpus_whose_kernels_read_slowly():
    mask = lambda b, h, q, k: (q >= k) & ((q - k) % (h + 2) == 0)  # noqa: E731
    args = arguments(bumps, torch.ones(1))._replace(mask_mod=mask)
    for capability, is_table in (((8, 0), False), ((9, 0), True)):
        narrow = args._replace(query=args.query.half(), key=args.key.half())
        narrow = narrow._replace(value=narrow.key)
        with assumed(capability):
            assert (tabulate_mask(narrow) is not None) == is_table


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_gradients_of_float32_captures_under_float64_operands():
    """Through a table they were 0: readers of sums came before them (compat/graphs/renames.py)."""
    torch.manual_seed(0)
    size = (2, 4, 60, 16)
    tensors = [torch.randn(size, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    scale, rate = (torch.randn(4, requires_grad=True) for _ in range(2))

    def decay(s, b, h, q, k):
        return s + scale[h] * torch.exp(-rate[h].abs() * (q - k).abs())

    def gradients(attention):
        out = attention(*tensors, score_mod=decay)
        return torch.autograd.grad(out.square().sum(), (scale, rate))

    expected = gradients(flexhop.flex_attention)
    found = gradients(torch.compile(flexhop.flex_attention))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
