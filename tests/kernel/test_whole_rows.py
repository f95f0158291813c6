"""Rows of captured tensors that no kernel computes: computed before it, for all places."""

import pytest
import torch
import torch.nn.functional as F

import flexhop
import flexhop.offline.interpret
from flexhop.errors import ModLoweringError
from flexhop.ops.graphs.beyond import is_beyond_kernels
from flexhop.ops.graphs.subgraphs import trace_score
from tests.case_inputs import Shape
from tests.fuzz.checks import check_results
from tests.fuzz.plan import Plan
from tests.learned import check_kernels

HEADS, LENGTH = 2, 20
pytestmark = [
    pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation"),
]


def _around(row):
    return F.pad(row[None, None], (2, 1), mode="circular")[0, 0]


FUNCTIONS = {
    "sum so far": lambda x: x.cumsum(-1),
    "product so far": lambda x: (x * 0.1 + 1).cumprod(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "maximum so far": lambda x: x.cummax(-1).values,
    "sum of the rest": lambda x: x.flip(-1).cumsum(-1).flip(-1),
    "sorted": lambda x: x.sort(-1).values,
    "best": lambda x: x.topk(5, -1).values,
    "padded": lambda x: F.pad(x, (1, 0))[..., :-1],
    "padded around": _around,
    "differences": lambda x: x.diff(dim=-1, prepend=x[..., :1]),
    "smoothed": lambda x: F.conv1d(x[None, None], torch.ones(1, 1, 3) / 3, padding=1)[0, 0],
    "spectrum": lambda x: torch.view_as_real(torch.fft.rfft(x)).square().sum(-1) * 0.05,
    "longer": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="linear")[0, 0],
}


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("FLEXHOP_STRICT", "1")


def _operands():
    torch.manual_seed(11)
    return [torch.randn(1, HEADS, LENGTH, 16).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_a_head_s_row(name):
    """Read at a distance, and at a place that both positions decide."""
    function = FUNCTIONS[name]
    torch.manual_seed(12)
    table = torch.randn(HEADS, 8).requires_grad_()

    def mod(s, b, h, q, k):
        row = function(table[h])
        return s + row[(q - k).abs() % 4] * row[(q * k) % 3]

    check_kernels(_operands(), [table], mod)


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "normalize", "mean", "product"])
def test_long_rows_of_a_head(name):
    """Of more numbers than a kernel adds."""
    torch.manual_seed(13)
    table, weights = torch.randn(HEADS, 90).requires_grad_(), torch.randn(90, 90) * 0.1
    function = {
        "softmax": lambda x: x.softmax(-1) * 90,
        "layer_norm": lambda x: F.layer_norm(x, (90,)),
        "normalize": lambda x: F.normalize(x, dim=-1) * 9,
        "mean": lambda x: x - x.mean(-1, keepdim=True),
        "product": lambda x: torch.einsum("i,ij->j", x, weights),
    }[name]

    def mod(s, b, h, q, k):
        return s + function(table[h])[(q * k) % 90]

    check_kernels(_operands(), [table], mod)


def test_rows_of_positions_and_batches():
    """Rows of keys, sorted and summed up; those of a batch and head, without a gradient."""
    torch.manual_seed(14)
    learned = torch.randn(LENGTH, 6).requires_grad_()
    plain = torch.randn(1, HEADS, 6)

    def mod(s, b, h, q, k):
        ordered = learned[k].sort().values
        s = s + ordered[q % 6] + learned[q].cumsum(0)[k % 6] * plain[b, h].cumsum(0)[(q + k) % 6]
        return s + plain[b, h].median()

    check_kernels(_operands(), [learned], mod)


def test_masks_of_rows():
    words = torch.randn(HEADS, LENGTH, 4)

    def mask_mod(b, h, q, k):
        return (words[h, q].cumsum(0)[k % 4] > 0) | (q == k)

    mask = flexhop.create_block_mask(mask_mod, 1, HEADS, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
    wanted = words.cumsum(-1)[:, :, torch.arange(LENGTH) % 4] > 0
    wanted = wanted | torch.eye(LENGTH, dtype=torch.bool)
    tensors = _operands()
    scores = (tensors[0] @ tensors[1].mT / 4).masked_fill(~wanted, -torch.inf)
    found = flexhop.offline.interpret.interpret(
        lambda *x: flexhop.flex_attention(*x, block_mask=mask), *tensors
    )
    expected = scores.softmax(-1) @ tensors[2]
    torch.testing.assert_close(found.result, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["paged", "cached"])
@pytest.mark.parametrize("queries", [1, 7])
def test_calls_that_read_a_cache(family, queries):
    """They have a kernel if the call that trained has one."""
    pages = {"keys": (40, 33), "page": 16} if family == "paged" else {"stored": torch.int8}
    plan = Plan(
        family=family, shape=Shape(2, 4, 2, queries, 48, 16, 16), train="", dynamic=queries > 1,
        scores=("ordered", "summed_steps"), masks=("causal",), key_mod="head", **pages,
    )  # fmt: skip
    assert not check_results(plan, 3, backend="interpreter")


@pytest.mark.parametrize("k_mod", [None, flexhop.mods.dequantize(0.5)])
def test_few_queries(k_mod):
    """A table by distance has as many entries as there are scores, but there is no other way."""
    torch.manual_seed(16)
    steps = torch.randn(HEADS, 60, 5)

    def attend(q, k, v):
        mod = lambda s, b, h, q, k: s + steps[h, q - k + 50].sort().values[2]  # noqa: E731
        return flexhop.flex_attention(q, k, v, mod, k_mod=k_mod)

    query, key = torch.randn(1, HEADS, 1, 16), torch.randn(1, HEADS, 50, 16)
    found = flexhop.offline.interpret.interpret(attend, query, key, key)
    torch.testing.assert_close(found.result, attend(query, key, key))


def test_a_mask_of_rows_over_a_cache():
    torch.manual_seed(15)
    words, factors = torch.randn(2, HEADS, 4), torch.rand(HEADS) + 0.5

    def mask_mod(b, h, q, k):
        return words[b, h].sort().values[k % 4] > -0.5

    def attend(q, k, v):
        return flexhop.flex_attention(
            q, k, v, block_mask=mask, k_mod=flexhop.mods.dequantize(factors)
        )

    query, key = torch.randn(2, HEADS, 1, 16), torch.randn(2, HEADS, 48, 16)
    mask = flexhop.create_block_mask(mask_mod, 2, HEADS, 1, 48, "cpu", BLOCK_SIZE=16)
    found = flexhop.offline.interpret.interpret(attend, query, key, key)
    torch.testing.assert_close(found.result, attend(query, key, key))


def test_infinite_derivatives_of_rows_that_no_score_reads():
    """A mask hides a head: its row has a derivative that is infinite, and no gradient."""
    table = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 2.0]]).requires_grad_()

    def mod(s, b, h, q, k):
        return s + table[h].log().cumsum(0)[(q * k) % 3]

    def only_first(b, h, q, k):
        return h == 0

    mask = flexhop.create_block_mask(only_first, 1, HEADS, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
    tensors = _operands()
    out = flexhop.offline.interpret.interpret(
        lambda *x: flexhop.flex_attention(*x, mod, block_mask=mask), *tensors,
        grad=lambda out: out[:, 0].sum(),
    )  # fmt: skip
    assert out.result.isfinite().all()
    assert table.grad.isfinite().all() and (table.grad[1] == 0).all()


def test_complex_numbers_of_two_positions_are_refused_by_name():
    """A table of complex numbers, or of their conjugates, could not be read."""
    turns = torch.polar(torch.ones(LENGTH), torch.arange(LENGTH) * 0.1)

    def mod(s, b, h, q, k):
        return s * (turns[q] * turns[k].conj()).real

    with pytest.raises(ModLoweringError, match="score_mod"):
        flexhop.offline.interpret.interpret(
            lambda *x: flexhop.flex_attention(*x, mod), *_operands(), grad=lambda out: out.sum()
        )


@pytest.mark.parametrize("padding", [(1, 0), (0, 2), (2, 1), (-1, 2), (1, -2)])
def test_padded_rows_of_the_score(padding):
    """In the kernel: the row is made of the score."""
    weights = torch.randn(4).requires_grad_()

    def mod(s, b, h, q, k):
        row = torch.stack([s, s * weights[0], s.sin(), weights[1] * s])
        return F.pad(row, padding, value=0.5)[(q + k) % 2] + F.pad(row, padding).sum()

    check_kernels(_operands(), [weights], mod)


def test_slices_of_rows_of_the_score():
    weights = torch.randn(6).requires_grad_()

    def mod(s, b, h, q, k):
        row = s * weights
        return (row[1:] * row[:-1]).sum() + row[::2].sum() * row[2:5].amax() + row[1::3][k % 2]

    check_kernels(_operands(), [weights], mod)


def test_products_of_rows_of_the_score():
    """Their derivatives by PyTorch take products of all that come before, even if one is 0."""
    weights = torch.randn(6).requires_grad_()

    def mod(s, b, h, q, k):
        row = torch.stack([s, 1 + weights[h], weights[k % 6], (q - k) * 0.1])
        return row.prod() + (1 + 0.1 * weights).prod(0, keepdim=True)[0] + torch.prod(row[:2], 0)

    check_kernels(_operands(), [weights], mod)


def test_what_kernels_compute_is_not_beyond_them():
    points, form = torch.randn(LENGTH, 6), torch.randn(6, 6)

    def mod(s, b, h, q, k):
        row = F.layer_norm(points[q] - points[k], (6,)) @ form
        row = torch.cat([row.softmax(0), torch.stack([s, s.sin()])]).flip(0).roll(2)
        return row.norm() + row.var() + row.logsumexp(0) + F.one_hot(k.long() % 8, 8).sum()

    query = torch.randn(1, HEADS, 4, 8)
    graph = trace_score(lambda *x: mod(*x), query, ())
    assert not [node for node in graph.graph.nodes if is_beyond_kernels(node)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, learned: torch.polygamma(1, x + 1.0) * learned,
        lambda x, learned: torch.special.i0e(x * learned),
        lambda x, learned: torch.igammac(x + 1.0, x * 0.5 + 1) * learned,
        lambda x, learned: torch.special.zeta(x + 2.0, 1.5) * learned,
    ],
    ids=["polygamma", "i0e", "igammac", "zeta"],
)
def test_functions_without_triton_code(function):
    """Of a distance, and of a position of one head."""
    learned = torch.tensor([0.5, 0.8]).requires_grad_()

    def mod(s, b, h, q, k):
        return s + function((q - k).abs(), learned[0]) - function(k, learned[h])

    check_kernels(_operands(), [learned], mod)


def test_rows_of_positions_that_pytorch_writes_to():
    """Writes inside of PyTorch's functions are as much a part of a mod as its own."""
    torch.manual_seed(14)
    left, right = (torch.randn(LENGTH, 5).requires_grad_() for _ in range(2))

    def mod(s, b, h, q, k):
        return s + _around(left[q])[k % 8] * _around(right[k]).amax()

    check_kernels(_operands(), [left, right], mod)
