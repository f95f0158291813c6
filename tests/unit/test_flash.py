"""flexhop.flash against plain dense mathematics; compiled equals eager; mistakes."""

import inspect

import pytest
import torch

import flexhop
from flexhop import errors, flash
from flexhop.flash.options import Options
from tests.flash_cases import CASES, Case, attend_batch, attend_packed
from tests.varlen_cases import offsets

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")

SIZES = {"long_keys": (2, 37, 150), "long_queries": (2, 150, 37), "one_query": (3, 1, 140)}
BOTH = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])


def normal(*size, seed=0, dtype=torch.float64):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(case: Case, batch, queries, keys, dim=16):
    sizes = ((queries, case.heads), (keys, case.kv_heads), (keys, case.kv_heads))
    return [
        normal(batch, *size, dim, seed=seed).requires_grad_() for seed, size in enumerate(sizes)
    ]


def assert_same(result, expected, leaves):
    """out, lse and the gradients of both; expected is (out, lse)."""
    out, lse, probabilities = result
    assert probabilities is None
    torch.testing.assert_close(out, expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected[1], rtol=0, atol=1e-12)
    found, right = (
        torch.autograd.grad((t * weights(t)).sum(), leaves) for t in (out, expected[0])
    )
    for actual, gradient in zip(found, right, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=0, atol=1e-10)


def weights(like):
    return normal(*like.shape, seed=9)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_dense(name, size):
    case, leaves = CASES[name], operands(CASES[name], *SIZES[size])
    slopes = case.make_slopes(SIZES[size][0])
    result = flash.flash_attn_func(
        *leaves, **case.options, alibi_slopes=slopes, return_attn_probs=True
    )
    assert_same(result, attend_batch(case, *leaves, slopes), leaves)


def test_dense_over_many_blocks():
    case = Case(causal=True, window=(200, -1))
    leaves = operands(case, 1, 400, 530)
    result = flash.flash_attn_func(*leaves, **case.options, return_attn_probs=True)
    assert_same(result, attend_batch(case, *leaves, None), leaves)


@pytest.mark.parametrize("name", ["causal", "everything"])
def test_packed_keys_and_values(name):
    case = CASES[name]
    q, kv = normal(2, 30, case.heads, 16), normal(2, 70, 2, case.kv_heads, 16, seed=1)
    leaves = [q.requires_grad_(), kv.requires_grad_()]
    slopes = case.make_slopes(2)
    result = flash.flash_attn_kvpacked_func(
        q, kv, **case.options, alibi_slopes=slopes, return_attn_probs=True
    )
    assert_same(result, attend_batch(case, q, kv[:, :, 0], kv[:, :, 1], slopes), leaves)


@pytest.mark.parametrize("name", ["plain", "window", "alibi"])
def test_packed_queries_keys_and_values(name):
    case, qkv = CASES[name], normal(2, 70, 3, 2, 16).requires_grad_()
    slopes = case.make_slopes(2)
    result = flash.flash_attn_qkvpacked_func(
        qkv, **case.options, alibi_slopes=slopes, return_attn_probs=True
    )
    assert_same(result, attend_batch(case, *qkv.unbind(2), slopes), [qkv])


QUERIES, KEYS = (5, 0, 130, 1, 64), (7, 3, 100, 20, 90)


def packed_operands(case):
    sizes = ((sum(QUERIES), case.heads), *[(sum(KEYS), case.kv_heads)] * 2)
    return [normal(*size, 16, seed=seed).requires_grad_() for seed, size in enumerate(sizes)]


@pytest.mark.parametrize("name", CASES)
def test_sequences(name):
    case = CASES[name]
    leaves, slopes = packed_operands(case), case.make_slopes(len(QUERIES))
    result = flash.flash_attn_varlen_func(
        *leaves, offsets(QUERIES), offsets(KEYS), max(QUERIES), max(KEYS), **case.options,
        alibi_slopes=slopes, return_attn_probs=True,
    )  # fmt: skip
    assert_same(result, attend_packed(case, *leaves, slopes, QUERIES, KEYS), leaves)


def test_sequences_of_packed_keys_and_values():
    case = CASES["everything"]
    q = normal(sum(QUERIES), case.heads, 16).requires_grad_()
    kv = normal(sum(KEYS), 2, case.kv_heads, 16, seed=1).requires_grad_()
    slopes = case.make_slopes(len(QUERIES))
    result = flash.flash_attn_varlen_kvpacked_func(
        q, kv, offsets(QUERIES), offsets(KEYS), max(QUERIES), max(KEYS), **case.options,
        alibi_slopes=slopes, return_attn_probs=True,
    )  # fmt: skip
    expected = attend_packed(case, q, kv[:, 0], kv[:, 1], slopes, QUERIES, KEYS)
    assert_same(result, expected, [q, kv])


@pytest.mark.parametrize("name", ["causal_window", "alibi_both_sides"])
def test_sequences_of_packed_queries_keys_and_values(name):
    case, qkv = CASES[name], normal(sum(KEYS), 3, 2, 16).requires_grad_()
    slopes = case.make_slopes(len(KEYS))
    result = flash.flash_attn_varlen_qkvpacked_func(
        qkv, offsets(KEYS), max(KEYS), **case.options, alibi_slopes=slopes, return_attn_probs=True
    )
    assert_same(result, attend_packed(case, *qkv.unbind(1), slopes, KEYS, KEYS), [qkv])


def test_without_statistics_only_the_output_is_returned():
    leaves = operands(Case(), 1, 8, 8)
    out = flash.flash_attn_func(*leaves, deterministic=True)
    assert isinstance(out, torch.Tensor) and out.is_contiguous()


def test_determinism_is_an_option_of_the_kernels():
    given = Options(0.0, None, False, (-1, -1), 0.0, None, False, deterministic=True)
    assert given.kernel_options == flexhop.KernelOptions(deterministic=True)
    assert given._replace(deterministic=False).kernel_options == flexhop.KernelOptions()


def test_slopes_get_no_gradient():
    leaves, slopes = operands(Case(), 1, 8, 8), torch.rand(2, requires_grad=True)
    flash.flash_attn_func(*leaves, alibi_slopes=slopes).sum().backward()
    assert leaves[0].grad is not None and slopes.grad is None


@pytest.mark.parametrize("name", ["causal_window", "everything"])
def test_compiled_dense(name):
    case, leaves = CASES[name], operands(CASES[name], *SIZES["long_keys"])
    slopes = case.make_slopes(2)
    call = torch.compile(flash.flash_attn_func, fullgraph=True)
    result = call(*leaves, **case.options, alibi_slopes=slopes, return_attn_probs=True)
    assert_same(result, attend_batch(case, *leaves, slopes), leaves)


def test_compiled_sequences():
    case = CASES["everything"]
    leaves, slopes = packed_operands(case), case.make_slopes(len(QUERIES))
    call = torch.compile(flash.flash_attn_varlen_func, fullgraph=True)
    result = call(
        *leaves, offsets(QUERIES), offsets(KEYS), max(QUERIES), max(KEYS), **case.options,
        alibi_slopes=slopes, return_attn_probs=True,
    )  # fmt: skip
    assert_same(result, attend_packed(case, *leaves, slopes, QUERIES, KEYS), leaves)


def test_other_lengths_need_no_new_graph():
    torch._dynamo.reset()
    graphs = []

    def count(module, _):
        graphs.append(module)
        return module.forward

    call = torch.compile(flash.flash_attn_func, fullgraph=True, dynamic=True, backend=count)
    # From 256 on: one block, or one whole block, is a size of 1, which PyTorch specialises on.
    for queries, keys in ((290, 400), (257, 600), (600, 300)):
        leaves = [t.detach() for t in operands(Case(), 2, queries, keys)]
        options = {"causal": True, "window_size": (30, 0), "alibi_slopes": torch.ones(2)}
        torch.testing.assert_close(
            call(*leaves, **options), flash.flash_attn_func(*leaves, **options)
        )
    assert len(graphs) == 1


def bad_calls():
    q = normal(2, 8, 2, 16)
    t, cut = normal(8, 2, 16), offsets((3, 5))
    varlen = (flash.flash_attn_varlen_func, (t, t, t, cut, cut, 5, 5))
    dense = (flash.flash_attn_func, (q, q, q))
    return {
        "dropout": (*dense, {"dropout_p": 1.0}, errors.OptionValueError, "dropout_p value 1.0"),
        "window": (*dense, {"window_size": (1,)}, errors.FlashArgumentError, "1 entries"),
        "one window": (*dense, {"window_size": 3}, errors.FlashArgumentError, "is 3, but must be"),
        "slopes": (*dense, {"alibi_slopes": torch.ones(3)}, errors.FlashArgumentError, "[2, 2]"),
        "slopes_dtype": (
            *dense, {"alibi_slopes": torch.ones(2).int()}, errors.FlashArgumentError, "int32",
        ),
        "rank": (flash.flash_attn_func, (q, t, q), {}, errors.RankError, "k must have 4"),
        "qkv": (flash.flash_attn_qkvpacked_func, (q,), {}, errors.RankError, "qkv must have 5"),
        "kv": (
            flash.flash_attn_kvpacked_func, (q, normal(2, 8, 3, 2, 16)), {},
            errors.FlashArgumentError, "kv has 3 tensors in dimension 2, but must have 2",
        ),
        "heads": (
            flash.flash_attn_func, (normal(2, 8, 3, 16), q, q), {}, errors.GroupSizeError, "3",
        ),
        "offsets": (
            flash.flash_attn_varlen_func, (t, t, t, cut.float(), cut, 5, 5), {},
            errors.SequenceOffsetsError, "float32",
        ),
        "offsets_rank": (
            flash.flash_attn_varlen_func, (t, t, t, cut[None], cut, 5, 5), {},
            errors.RankError, "cu_seqlens_q must have 1",
        ),
        "pages": (
            *varlen, {"block_table": cut}, errors.RankError, "k must have 4 dimensions",
        ),
    }  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", bad_calls())
def test_mistakes(name, compiled):
    call, arguments, options, error, text = bad_calls()[name]
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="eager")
    with pytest.raises(error) as caught:
        call(*arguments, **options)
    assert text in str(caught.value)


def test_the_names_are_those_of_flash_attn():
    options = (
        "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes",
        "deterministic", "return_attn_probs",
    )  # fmt: skip
    cuts = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    expected = {
        "flash_attn_func": ("q", "k", "v", *options),
        "flash_attn_kvpacked_func": ("q", "kv", *options),
        "flash_attn_qkvpacked_func": ("qkv", *options),
        "flash_attn_varlen_func": ("q", "k", "v", *cuts, *options, "block_table"),
        "flash_attn_varlen_kvpacked_func": ("q", "kv", *cuts, *options),
        "flash_attn_varlen_qkvpacked_func": ("qkv", "cu_seqlens", "max_seqlen", *options),
        "flash_attn_with_kvcache": (
            "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens",
            "cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale", "causal",
            "window_size", "softcap", "rotary_interleaved", "alibi_slopes", "num_splits",
            "return_softmax_lse",
        ),
    }  # fmt: skip
    assert sorted(expected) == flexhop.flash.__all__
    for name, parameters in expected.items():
        assert tuple(inspect.signature(getattr(flexhop.flash, name)).parameters) == parameters


@pytest.mark.parametrize("page", [16, 5])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "alibi"])
def test_packed_queries_read_keys_in_pages(name, page):
    """As the same call with packed keys, sequence by sequence."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(0)
    cut_q, cut_k = (torch.tensor(c, dtype=torch.int32) for c in ((0, 3, 3, 10), (0, 20, 25, 58)))
    counts = cut_k.diff().tolist()
    q = torch.randn(10, case.heads, 16, generator=generator, dtype=torch.float64)
    k, v = (
        torch.randn(58, case.kv_heads, 16, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    width = -(-max(counts) // page)
    order = torch.randperm(3 * width, generator=generator).view(3, width).to(torch.int32)
    pools = [torch.full((3 * width, page, case.kv_heads, 16), torch.nan).double() for _ in "kv"]
    for s, count in enumerate(counts):
        for i in range(count):
            for pool, packed in zip(pools, (k, v), strict=True):
                pool[order[s, i // page], i % page] = packed[int(cut_k[s]) + i]
    options = {**case.options, "alibi_slopes": case.make_slopes(3), "return_attn_probs": True}
    arguments = (cut_q, cut_k, 7, 33)
    expected = flash.flash_attn_varlen_func(q, k, v, *arguments, **options)
    found = flash.flash_attn_varlen_func(q, *pools, *arguments, **options, block_table=order)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])
