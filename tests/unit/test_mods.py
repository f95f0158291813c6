"""Composition and checks of mods, and the ready score mods against loops over Python numbers."""

import functools
import math

import pytest
import torch

from flexhop import mods
from flexhop.compat.mods.indexing import IndexMode
from flexhop.errors import ModArgumentError, ModArityError, ModNotCallableError, ModResultError

BATCH, HEADS, Q_LEN, KV_LEN = 2, 4, 9, 9
SIZES = (BATCH, HEADS, Q_LEN, KV_LEN)
SCORES = torch.linspace(-120, 120, math.prod(SIZES)).view(SIZES)


def indices():
    shapes = [[-1 if axis == d else 1 for axis in range(4)] for d in range(4)]
    return [torch.arange(n, dtype=torch.int32).view(s) for n, s in zip(SIZES, shapes, strict=True)]


# composition


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def near(window, b, h, q_idx, kv_idx):
    return q_idx - kv_idx < window


class SecondHead:
    def __call__(self, b, h, q_idx, kv_idx):
        return h == 1


MASKS = [causal, functools.partial(near, 3), SecondHead(), lambda b, h, q_idx, kv_idx: b == 0]


def dense(mask_mod):
    return mask_mod(*indices()).expand(SIZES)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("compiled", [False, True])
def test_masks_combine(count, compiled):
    chosen = MASKS[:count]
    parts = torch.stack([dense(mask_mod) for mask_mod in chosen])

    def evaluate():
        everything = mods.and_masks(*chosen)(*indices())
        anything = mods.or_masks(*chosen)(*indices())
        return everything.expand(SIZES), anything.expand(SIZES)

    if compiled:
        evaluate = torch.compile(evaluate, fullgraph=True, backend="eager")
    everything, anything = evaluate()
    assert torch.equal(everything, parts.all(0))
    assert torch.equal(anything, parts.any(0))


def test_masks_nest():
    nested = mods.or_masks(mods.and_masks(causal, MASKS[1]), MASKS[2])
    assert torch.equal(dense(nested), (dense(causal) & dense(MASKS[1])) | dense(MASKS[2]))


def test_no_masks_at_all():
    assert dense(mods.and_masks()).all()
    assert not dense(mods.or_masks()).any()


@pytest.mark.parametrize("combine", [mods.and_masks, mods.or_masks])
def test_only_functions_combine(combine):
    with pytest.raises(ModNotCallableError, match=f"argument 1 of {combine.__name__} must be"):
        combine(causal, torch.ones(2, 2))
    with pytest.raises(ModArityError, match=r"\(b, h, q_idx, kv_idx\).*\(score\)"):
        combine(causal, lambda score: score)


def test_noops():
    assert mods.noop_score(SCORES, *indices()) is SCORES
    visible = mods.noop_mask(*indices())
    assert visible.shape == ()
    assert visible.dtype == torch.bool
    assert dense(mods.noop_mask).all()


@pytest.mark.parametrize("count", range(5))
@pytest.mark.parametrize("name", ["and_masks", "or_masks"])
def test_same_meaning_as_pytorch(name, count):
    from torch.nn.attention import flex_attention as torch_flex

    ours, theirs = getattr(mods, name), getattr(torch_flex, name)
    assert torch.equal(dense(ours(*MASKS[:count])), dense(theirs(*MASKS[:count])))


# checks


class Callable4:
    def __call__(self, b, h, q_idx, kv_idx):
        return b == h

    def method(self, b, h, q_idx, kv_idx):
        return b == h

    @staticmethod
    def static(b, h, q_idx, kv_idx):
        return b == h


def with_default(b, h, q_idx, kv_idx, window=3):
    return q_idx - kv_idx < window


def wraps_a_score_mod(score_mod):
    """A decorator that changes the signature but keeps the name of what it wraps."""

    @functools.wraps(score_mod)
    def mask_mod(b, h, q_idx, kv_idx):
        return score_mod(b.new_ones(()), b, h, q_idx, kv_idx) > 0

    return mask_mod


TAKE_4 = [
    causal,
    lambda b, h, q, k: q >= k,
    functools.partial(near, 3),
    functools.partial(with_default, window=5),
    with_default,
    Callable4(),
    Callable4().method,
    Callable4.static,
    functools.partial(Callable4.method, Callable4()),
    lambda *indices: indices[2] >= indices[3],
    lambda b, h, *positions: positions[0] >= positions[1],
    wraps_a_score_mod(mods.noop_score),
    mods.and_masks(causal, causal),
    max,  # a builtin that does not tell
]


@pytest.mark.parametrize("mod", TAKE_4)
def test_arity_of_masks(mod):
    mods.check_arity(mod, "mask_mod")


@pytest.mark.parametrize(
    "mod",
    [
        mods.noop_score,
        lambda s, b, h, q, k: s,
        lambda s, b, h, q, k, cap=2: s,
        lambda *arguments: arguments[0],
        functools.partial(lambda cap, s, b, h, q, k: s, 2),
    ],
)
def test_arity_of_scores(mod):
    mods.check_arity(mod, "score_mod")


@pytest.mark.parametrize(
    ("mod", "kind", "message"),
    [
        (
            lambda q, k: q >= k,
            "mask_mod",
            "mask_mod '<lambda>' is called as (b, h, q_idx, kv_idx), but its signature is (q, k).",
        ),
        (
            causal,
            "score_mod",
            "score_mod 'causal' is called as (score, b, h, q_idx, kv_idx), "
            "but its signature is (b, h, q_idx, kv_idx).",
        ),
        (
            functools.partial(near, window=3),
            "mask_mod",
            "mask_mod 'partial(near)' is called as (b, h, q_idx, kv_idx), "
            "but its signature is (*, window=3, b, h, q_idx, kv_idx).",
        ),
        (
            Callable4(),
            "score_mod",
            "score_mod 'Callable4' is called as (score, b, h, q_idx, kv_idx), "
            "but its signature is (b, h, q_idx, kv_idx).",
        ),
        (
            lambda b, h, q, k, *, window: q >= k,
            "mask_mod",
            "mask_mod '<lambda>' is called as (b, h, q_idx, kv_idx), "
            "but its signature is (b, h, q, k, *, window).",
        ),
    ],
)
def test_wrong_arity(mod, kind, message):
    with pytest.raises(ModArityError) as caught:
        mods.check_arity(mod, kind)
    assert str(caught.value) == message


def test_a_mod_is_callable():
    with pytest.raises(ModNotCallableError, match="mask_mod must be callable, but is a Tensor"):
        mods.check_arity(torch.ones(2), "mask_mod")


@pytest.mark.parametrize(
    ("mod", "answer"),
    [
        (mods.noop_score, True),
        (mods.noop_mask, False),
        (with_default, False),
        (functools.partial(near, 3), False),
        (Callable4().method, False),
        (lambda s, b, h, q, k, cap=3: s, True),
        (functools.partial(lambda cap, s, b, h, q, k: s, 3), True),
    ],
)
def test_classification(mod, answer):
    assert mods.is_score_mod(mod) is answer


@pytest.mark.parametrize("mod", [lambda q, k: q, lambda *a: a, lambda a, b, c, d, e, f: a])
def test_what_cannot_be_classified(mod):
    with pytest.raises(
        ModArityError, match=r"'<lambda>' is called as .* or .*, but its signature"
    ):
        mods.is_score_mod(mod)


def test_results():
    mods.check_mask_result(torch.ones(2, dtype=torch.bool))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        mods.check_score_result(torch.ones((), dtype=dtype))


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (torch.ones(2), "a tensor of dtype torch.float32"),
        (torch.ones(2, dtype=torch.int32), "a tensor of dtype torch.int32"),
        (True, "an object of type bool"),
        (None, "an object of type NoneType"),
    ],
)
def test_wrong_mask_result(result, found):
    with pytest.raises(ModResultError) as caught:
        mods.check_mask_result(result, "causal")
    assert (
        str(caught.value) == f"mask_mod 'causal' must return a bool tensor, but returned {found}."
    )


@pytest.mark.parametrize("result", [torch.ones(2) * 1j, (torch.ones(()),), None, 1.0])
def test_wrong_score_result(result):
    with pytest.raises(ModResultError, match="must return a tensor of real numbers, but returned"):
        mods.check_score_result(result)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16])
def test_score_results_that_are_converted(dtype):
    """PyTorch converts them; a key's element stays what it is."""
    mods.check_score_result(torch.ones((), dtype=dtype))
    if not dtype.is_floating_point:
        with pytest.raises(ModResultError, match="k_mod 'f' must return a floating-point tensor"):
            mods.check_score_result(torch.ones((), dtype=dtype), "f", "k_mod")


# ready score mods


def evaluate_by_broadcasting(score_mod):
    return score_mod(SCORES, *indices()).expand(SIZES)


def evaluate_by_vmap(score_mod):
    function = score_mod
    for dims in (
        (0, None, None, None, 0),
        (0, None, None, 0, None),
        (0, None, 0, None, None),
        (0, 0, None, None, None),
    ):
        function = torch.vmap(function, in_dims=dims)
    with IndexMode():
        return function(SCORES, *(torch.arange(n, dtype=torch.int32) for n in SIZES))


def evaluate_by_definition(definition):
    result = torch.empty(SIZES)
    for b, h, q, k in torch.cartesian_prod(*map(torch.arange, SIZES)).tolist():
        result[b, h, q, k] = definition(SCORES[b, h, q, k].item(), b, h, q, k)
    return result


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


SLOPES = random(HEADS)
PER_HEAD = random(HEADS, 2 * KV_LEN - 1)
SHARED = random(2 * KV_LEN - 1)
CLIPPED = random(HEADS, 5)
KEYS = random(KV_LEN)
BATCH_KEYS = random(BATCH, KV_LEN)

SCORE_MODS = {
    "alibi": (mods.alibi(SLOPES), lambda s, b, h, q, k: s + SLOPES[h] * (k - q)),
    "softcap": (mods.softcap(30.0), lambda s, b, h, q, k: 30.0 * math.tanh(s / 30.0)),
    "softcap int": (mods.softcap(50), lambda s, b, h, q, k: 50 * math.tanh(s / 50)),
    "relative bias": (
        mods.relative_bias(PER_HEAD),
        lambda s, b, h, q, k: s + PER_HEAD[h, q - k + KV_LEN - 1],
    ),
    "shared relative bias": (
        mods.relative_bias(SHARED),
        lambda s, b, h, q, k: s + SHARED[q - k + KV_LEN - 1],
    ),
    "clipped relative bias": (
        mods.relative_bias(CLIPPED),
        lambda s, b, h, q, k: s + CLIPPED[h, sorted((-2, q - k, 2))[1] + 2],
    ),
    "head bias": (mods.head_bias(SLOPES), lambda s, b, h, q, k: s + SLOPES[h]),
    "key bias": (mods.key_bias(KEYS), lambda s, b, h, q, k: s + KEYS[k]),
    "batch key bias": (mods.key_bias(BATCH_KEYS), lambda s, b, h, q, k: s + BATCH_KEYS[b, k]),
}


@pytest.mark.parametrize("name", SCORE_MODS)
@pytest.mark.parametrize("evaluate", [evaluate_by_broadcasting, evaluate_by_vmap])
def test_score_mod(name, evaluate):
    score_mod, definition = SCORE_MODS[name]
    mods.check_arity(score_mod, "score_mod")
    torch.testing.assert_close(evaluate(score_mod), evaluate_by_definition(definition))


def test_approximate_softcap_stays_within_half_precision():
    exact, approximate = mods.softcap(30.0), mods.softcap(30.0, approximate=True)
    torch.testing.assert_close(
        evaluate_by_broadcasting(approximate), evaluate_by_broadcasting(exact), rtol=2**-10, atol=0
    )


def test_learned_tables_get_gradients():
    table = CLIPPED.clone().requires_grad_()
    evaluate_by_broadcasting(mods.relative_bias(table)).sum().backward()
    counts = [0] * 5
    for q in range(Q_LEN):
        for k in range(KV_LEN):
            counts[min(2, max(-2, q - k)) + 2] += 1
    expected = BATCH * torch.tensor(counts, dtype=torch.float32).expand(HEADS, 5)
    torch.testing.assert_close(table.grad, expected)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [2.0**-8]),
        (8, [2.0**-i for i in range(1, 9)]),
        (16, [2.0 ** (-i / 2) for i in range(1, 17)]),
        (12, [2.0**-i for i in range(1, 9)] + [2.0 ** (-i / 2) for i in (1, 3, 5, 7)]),
    ],
)
def test_alibi_slopes(heads, expected):
    torch.testing.assert_close(mods.alibi_slopes(heads), torch.tensor(expected))


def t5_bucket(q, k, num_buckets, max_distance, bidirectional):
    """T5's rule for one pair, in float64."""
    bucket = 0
    if bidirectional:
        num_buckets //= 2
        bucket = num_buckets if k > q else 0
        distance = abs(q - k)
    else:
        distance = max(q - k, 0)
    exact = num_buckets // 2
    if distance < exact:
        return bucket + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return bucket + min(exact + int(share * (num_buckets - exact) + 1e-9), num_buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20)])
def test_t5_buckets(num_buckets, max_distance, bidirectional):
    buckets = mods.t5_buckets(num_buckets, max_distance, bidirectional)
    expected = [
        t5_bucket(distance, 0, num_buckets, max_distance, bidirectional)
        for distance in range(-max_distance, max_distance + 1)
    ]
    assert buckets.tolist() == expected


def test_t5_bias():
    weight = random(32, HEADS)
    score_mod = mods.relative_bias(weight[mods.t5_buckets()].T)
    expected = evaluate_by_definition(
        lambda s, b, h, q, k: s + weight[t5_bucket(q, k, 32, 128, True), h]
    )
    torch.testing.assert_close(evaluate_by_broadcasting(score_mod), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mods.softcap(0.0), "softcap: cap is 0.0, but must be positive."),
        (
            lambda: mods.relative_bias(torch.zeros(4, 6)),
            "relative_bias: the shape of table is [4, 6], but must be [Hq, 2R + 1] or [2R + 1].",
        ),
        (
            lambda: mods.key_bias(torch.zeros(1, 1, 1)),
            "key_bias: the rank of bias is 3, but must be 1 or 2.",
        ),
    ],
)
def test_impossible_arguments(make, message):
    with pytest.raises(ModArgumentError) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize("name", SCORE_MODS)
def test_compiles_without_graph_breaks(name):
    score_mod, _ = SCORE_MODS[name]
    compiled = torch.compile(
        lambda: score_mod(SCORES, *indices()), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(compiled().expand(SIZES), evaluate_by_broadcasting(score_mod))
