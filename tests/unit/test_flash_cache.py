"""flash_attn_with_kvcache against one sequence after the other, written out."""

import dataclasses

import pytest
import torch

from flexhop import errors
from flexhop.flash import flash_attn_with_kvcache
from tests.flash_cases import CASES, Case, attend_sequence, slopes_of, turn

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")

BATCH, LENGTH, DIM = 3, 300, 16
BEFORE = (7, 130, 290)


@dataclasses.dataclass(frozen=True)
class Step:
    """One call: queries, tokens to append, and where the cache lies."""

    options: str = "plain"
    queries: int = 1
    new: int | None = 1
    rotary: int = 0  # columns
    interleaved: bool = True
    leftpad: bool = False
    rows: bool = False
    page: int = 0


STEPS = {
    "append": Step(),
    "read_only": Step(new=None, queries=5),
    "causal": Step("causal", queries=4, new=4),
    "prompt": Step("causal", queries=140, new=9),
    "everything": Step("everything", queries=3, new=5, leftpad=True),
    "window": Step("window", queries=6, new=2),
    "rotary": Step(rotary=16),
    "rotary_causal": Step("causal", queries=4, new=4, rotary=8, interleaved=False),
    "rotary_unaligned": Step(queries=3, new=3, rotary=8, leftpad=True),
    "rotary_window": Step("left", queries=3, new=3, rotary=16, leftpad=True),
    "rows": Step("causal", queries=2, new=2, rows=True),
    "rows_everything": Step("everything", queries=3, new=3, rows=True, leftpad=True, rotary=8),
    "pages": Step("causal", queries=3, new=3, page=128),
    "pages_one_query": Step("alibi", page=256, rotary=16),
    "pages_everything": Step("everything", queries=130, new=4, page=128),
    "pages_of_16": Step("causal", queries=2, new=2, page=16),
    "pages_of_5": Step("window", queries=3, new=1, page=5, rotary=8),
}


@dataclasses.dataclass
class Cache:
    """Logical caches [B, N, H, D] that the reference changes, and the tensors of the call."""

    keys: torch.Tensor
    values: torch.Tensor
    arguments: dict

    def stored(self, step: Step) -> tuple[torch.Tensor, ...]:
        """What the call's tensors hold, as logical caches."""
        tensors = self.arguments["k_cache"], self.arguments["v_cache"]
        if step.page:
            return tuple(t[self.arguments["block_table"].long()].flatten(1, 2) for t in tensors)
        rows = self.arguments["cache_batch_idx"]
        return tensors if rows is None else tuple(t[rows.long()] for t in tensors)


def normal(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_cache(step: Step, heads: int, before=BEFORE) -> Cache:
    length = 3 * step.page if step.page == 128 else 512 if step.page else LENGTH
    if step.page:
        length -= length % step.page
    keys, values = (normal(BATCH, length, heads, DIM, seed=s) for s in (1, 2))
    places = {"block_table": None, "cache_batch_idx": None, "cache_leftpad": None}
    caches = [keys.clone(), values.clone()]
    if step.page:
        count = length // step.page
        order = torch.randperm(BATCH * count + 4, generator=torch.Generator().manual_seed(3))
        table = order[: BATCH * count].view(BATCH, count).to(torch.int32)
        caches = [normal(len(order), step.page, heads, DIM, seed=8) for _ in range(2)]
        for pool, logical in zip(caches, (keys, values), strict=True):
            pool[table.long()] = logical.unflatten(1, (count, step.page))
        places["block_table"] = table
    if step.rows:
        rows = torch.tensor([4, 0, 2], dtype=torch.int32)
        caches = [normal(6, length, heads, DIM, seed=8) for _ in range(2)]
        for pool, logical in zip(caches, (keys, values), strict=True):
            pool[rows.long()] = logical
        places["cache_batch_idx"] = rows
    if step.leftpad:
        places["cache_leftpad"] = torch.tensor([3, 0, 140], dtype=torch.int32)
    lengths = torch.tensor(before, dtype=torch.int32)
    arguments = {"k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": lengths, **places}
    return Cache(keys, values, arguments)


def make_call(step: Step, before=BEFORE):
    """Query, all keyword arguments, and what the cache should hold and the call return."""
    case = CASES[step.options]
    cache = make_cache(step, case.kv_heads, before)
    q = normal(BATCH, step.queries, case.heads, DIM, seed=4)
    slopes = case.make_slopes(BATCH)
    arguments = {**cache.arguments, **case.options, "alibi_slopes": slopes}
    angles = None
    if step.new:
        arguments["k"], arguments["v"] = (
            normal(BATCH, step.new, case.kv_heads, DIM, seed=s) for s in (5, 6)
        )
    if step.rotary:
        angles = normal(cache.keys.size(1), step.rotary // 2, seed=7)
        arguments |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        arguments["rotary_interleaved"] = step.interleaved
    arguments["return_softmax_lse"] = True
    expected = reference(step, case, cache, q, arguments, angles)
    return q, arguments, cache, expected


def reference(step, case, cache, q, arguments, angles):
    outs, statistics = [], []
    for b, before in enumerate(arguments["cache_seqlens"].tolist()):
        query, end = q[b], before + (step.new or 0)
        if step.new:
            key = arguments["k"][b]
            if angles is not None:
                key = turn(key, angles[before:end], step.interleaved)
                places = torch.full((step.queries,), before)
                if case.causal or case.window != (-1, -1):
                    places = places + torch.arange(step.queries)
                query = turn(query, angles[places], step.interleaved)
            cache.keys[b, before:end], cache.values[b, before:end] = key, arguments["v"][b]
        pad = arguments["cache_leftpad"]
        seen = slice(0 if pad is None else int(pad[b]), end)
        slopes = slopes_of(arguments["alibi_slopes"], b)
        out, lse = attend_sequence(case, query, cache.keys[b, seen], cache.values[b, seen], slopes)
        outs.append(out)
        statistics.append(lse)
    return torch.stack(outs), torch.stack(statistics)


def assert_call(step, call, before=BEFORE):
    q, arguments, cache, (out, lse) = make_call(step, before)
    found, found_lse = call(q, **arguments)
    torch.testing.assert_close(found, out, rtol=0, atol=1e-12)
    torch.testing.assert_close(found_lse, lse, rtol=0, atol=1e-12)
    for stored, expected in zip(cache.stored(step), (cache.keys, cache.values), strict=True):
        torch.testing.assert_close(stored, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    assert_call(STEPS[name], flash_attn_with_kvcache)


@pytest.mark.parametrize("name", ["causal", "rows_everything", "pages_everything"])
def test_compiled_steps_share_a_graph(name):
    torch._dynamo.reset()
    graphs = []

    def count(module, _):
        graphs.append(module)
        return module.forward

    call = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend=count)
    for before in (BEFORE, (0, 270, 145), (200, 1, 250)):
        assert_call(STEPS[name], call, before)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["rotary_causal", "rows", "pages"])
def test_compiled_by_inductor(name):
    torch._dynamo.reset()
    assert_call(STEPS[name], torch.compile(flash_attn_with_kvcache, fullgraph=True))


def test_an_int_is_the_length_of_every_sequence():
    q, arguments, _, _ = make_call(Step("causal", queries=2, new=None))
    arguments["cache_seqlens"] = torch.tensor([50] * BATCH)
    expected = flash_attn_with_kvcache(q, **arguments)
    arguments["cache_seqlens"] = 50
    for actual, right in zip(flash_attn_with_kvcache(q, **arguments), expected, strict=True):
        assert torch.equal(actual, right)
    arguments["cache_seqlens"] = LENGTH
    expected = flash_attn_with_kvcache(q, **arguments)
    arguments["cache_seqlens"] = None
    assert torch.equal(flash_attn_with_kvcache(q, **arguments)[0], expected[0])


def test_a_number_of_splits_changes_nothing():
    q, arguments, _, (out, _) = make_call(Step())
    torch.testing.assert_close(flash_attn_with_kvcache(q, **arguments, num_splits=4)[0], out)


def bad_calls():
    """Changes to a good call, and the words that must come."""
    new, int32 = normal(BATCH, 1, 2, DIM), torch.int32
    cos = torch.ones(LENGTH, 8, dtype=torch.float64)
    shared = {"cache_batch_idx": torch.tensor([0, 1, 2])}
    return {
        "rank": ({"k_cache": new[0]}, "k_cache must have 4"),
        "dtype": ({"k": new.float()}, "k is torch.float32, but q is torch.float64"),
        "device": ({"cache_leftpad": torch.zeros(3, dtype=int32, device="meta")}, "is on meta"),
        "index_dtype": ({"cache_seqlens": torch.ones(3)}, "must be int32 or int64"),
        "index_shape": ({"cache_seqlens": torch.ones(2, dtype=int32)}, "has shape [2]"),
        "rows": ({"k_cache": normal(4, LENGTH, 2, DIM)}, "v_cache has shape [3, 300, 2, 16]"),
        "batch": (
            {name: normal(4, LENGTH, 2, DIM) for name in ("k_cache", "v_cache")},
            "pass cache_batch_idx",
        ),
        "pair": ({"v": None}, "v is None, but k was given"),
        "place": ({"cache_seqlens": None}, "where k and v go in the cache"),
        "new_shape": ({"k": new[:, :, :1]}, "k has shape [3, 1, 1, 16]"),
        "rotary_pair": ({"rotary_cos": cos}, "rotary_sin is None"),
        "rotary_alone": (
            {"rotary_cos": cos, "rotary_sin": cos, "k": None, "v": None}, "k and v are None",
        ),
        "rotary_short": ({"rotary_cos": cos[:9], "rotary_sin": cos[:9]}, "the cache has 300"),
        "rotary_wide": (
            {"rotary_cos": cos.repeat(1, 2), "rotary_sin": cos.repeat(1, 2)}, "rotates 32 columns",
        ),
        "gaps": (
            {**shared, "k_cache": normal(3, 400, 2, DIM)[:, :LENGTH]}, "gaps between its rows",
        ),
        "splits": ({"num_splits": 1000}, "num_splits is 1000"),
        "gradient": ({"q": normal(3, 1, 2, DIM).requires_grad_()}, "torch.no_grad()"),
    }  # fmt: skip


def bad_values():
    return {
        "full": ({"cache_seqlens": torch.tensor([0, 300, 0])}, "has 300, but must be 0 to 299"),
        "int": ({"cache_seqlens": 301}, "has 301"),
        "row": ({"cache_batch_idx": torch.tensor([0, 1, 3])}, "has 3, but must be 0 to 2"),
        "pad": ({"cache_leftpad": torch.tensor([0, -1, 3])}, "has -1"),
    }


def assert_refused(changes, text, call):
    q, arguments, cache, _ = make_call(Step())
    arguments |= changes
    q = arguments.pop("q", q)
    kept = cache.arguments["v_cache"].clone()
    with pytest.raises(errors.FlexhopError) as caught:
        call(q, **arguments)
    assert text in str(caught.value)
    assert torch.equal(cache.arguments["v_cache"], kept)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
@pytest.mark.parametrize("name", bad_calls())
def test_mistakes_are_found_before_anything_is_written(name, compiled):
    call = flash_attn_with_kvcache
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="eager")
    assert_refused(*bad_calls()[name], call)


@pytest.mark.parametrize("name", bad_values())
def test_wrong_values_are_found_without_compile(name):
    assert_refused(*bad_values()[name], flash_attn_with_kvcache)


def test_pages_outside_of_the_pool_are_found_without_compile():
    q, arguments, _, _ = make_call(Step(page=128))
    arguments["block_table"][1, 0] = 99
    with pytest.raises(errors.FlashArgumentError, match="block_table has 99"):
        flash_attn_with_kvcache(q, **arguments)


def test_dead_pages_may_hold_anything():
    step = Step("causal", queries=3, new=3, page=128)
    q, arguments, _, (out, _) = make_call(step, before=(7, 130, 120))
    arguments["block_table"][0, 1:] = -1
    arguments["block_table"][1:, 2:] = 1 << 20
    found, _ = flash_attn_with_kvcache(q, **arguments)
    torch.testing.assert_close(found, out, rtol=0, atol=1e-12)


def test_case_with_defaults_needs_no_statistics():
    q, arguments, _, (out, _) = make_call(Step())
    arguments |= {"return_softmax_lse": False}
    assert Case() == CASES["plain"]
    torch.testing.assert_close(flash_attn_with_kvcache(q, **arguments), out)
