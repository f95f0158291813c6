"""Kernels from eager code; aot_eager stands for Inductor, which only the kernel tests wait for."""

import functools

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from flexhop import KernelOptions, create_block_mask, eager_kernels, flex_attention
from flexhop.compat.operators import alone
from flexhop.errors import MaskCaptureGradError, ModArityError, RankError
from flexhop.masks import causal
from flexhop.mods.closures import describe
from flexhop.ops import forward
from flexhop.ops.forward import attention
from flexhop.ops.uncompiled import bare
from tests.unit.ops.support import causal_mask, operands, quiet
from tests.unit.ops.test_derivatives import DERIVATIVES, dense, flexible, inputs

pytestmark = [
    quiet,
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def compilations(monkeypatch):
    """What would have been compiled; a list that grows."""
    from torch._dynamo.backends.debugging import aot_eager

    made = []

    def compile_graph(module, inputs, note):
        made.append(module)
        run = aot_eager(module, inputs)

        def noting(*values):
            results = run(*values)
            note(lambda values: run(*values), values, results)
            return results

        return noting

    monkeypatch.setattr(alone, "compile_graph", compile_graph)
    torch._dynamo.reset()
    return made


class Doubled(torch.autograd.Function):
    """Its own gradient: 3."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        del ctx, inputs, output

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


def fused(function):
    @functools.wraps(function)
    def run(*args):
        with eager_kernels():
            return function(*args)

    return run


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_of_any_order(name, compilations):
    found = fused(DERIVATIVES[name](flexible))(*inputs())
    assert compilations
    expected = DERIVATIVES[name](dense)(*inputs())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_one_compilation_for_closures_that_are_made_anew(compilations):
    mask = causal_mask()

    def attend(table, window):
        return flex_attention(*x, lambda s, b, h, q, k: s + table[h] * window, mask)

    x = operands()
    for _ in range(3):
        for window in (2.0, 3.0):
            table = torch.randn(2)
            torch.testing.assert_close(fused(attend)(table, window), attend(table, window))
    assert len(compilations) <= 2


def test_numbers_in_closures_are_noticed(compilations):
    x = operands()
    state = {"factor": 2}

    def attend():
        return flex_attention(*x, lambda s, b, h, q, k: s * state["factor"])

    for factor in (2, 5, 7):
        state["factor"] = factor
        torch.testing.assert_close(fused(attend)(), attend())


def test_any_length_after_the_second(compilations):
    def attend(x, table):
        mask = create_block_mask(
            lambda b, h, q, k: q >= k, None, None, x[0].size(2), x[0].size(2), "cpu",
        )  # fmt: skip
        return flex_attention(*x, lambda s, b, h, q, k: s + table[q - k], mask)

    for length in (20, 33, 47, 47, 130, 260):
        x, table = operands(length=length), torch.randn(length)
        torch.testing.assert_close(fused(attend)(x, table), attend(x, table))
    assert len(compilations) <= 4  # one block, several blocks, any number


def test_forward_mode_of_autograd():
    from tests.unit.ops.test_derivatives import ALONG, dual

    found = [t for pair in fused(dual)(flexible, inputs(), ALONG) for t in pair]
    expected = [t for pair in dual(dense, inputs(), ALONG) for t in pair]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_backward_outside_of_the_context(compilations):
    x = operands(grad=True)
    with eager_kernels():
        out = flex_attention(*x)
    before = len(compilations)
    seen = []
    out.register_hook(seen.append)
    grads = torch.autograd.grad(out.square().sum(), x)
    assert len(compilations) == before + 1
    assert len(seen) == 1
    torch.testing.assert_close(
        grads, torch.autograd.grad(flex_attention(*x).square().sum(), x)
    )  # fmt: skip


def test_equal_calls_share_a_plan(monkeypatch):
    """Mods made again, with other tensors, are neither traced nor differentiated again."""
    traced = []
    trace_joint = bare.trace_joint
    monkeypatch.setattr(bare, "trace_joint", lambda *x: traced.append(1) or trace_joint(*x))

    def call(*x):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score * x[3].exp()[h] + x[4][h]  # of which a part does not depend on scores

        return flex_attention(*x[:3], score_mod)

    for _ in range(3):
        x = [*operands(grad=True), *torch.randn(2, 2).unbind()]
        x[3].requires_grad_()
        expected = torch.autograd.grad(call(*x).square().sum(), x[:4])
        with eager_kernels():
            out = call(*x)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), x[:4]), expected)
    assert len(traced) == 1


def test_calls_that_differ_do_not_share_a_plan():
    """The same mod: with and without gradients, of which tensors, and in which precision."""
    table = torch.randn(2)

    def call(*x):
        return flex_attention(*x, lambda s, b, h, q, k: s * table[h])

    for has_table, has_query, is_enabled, precision in [
        (False, False, True, "highest"), (True, False, True, "highest"),
        (True, True, False, "highest"), (True, True, True, "highest"),
        (False, True, True, "high"), (False, False, True, "highest"),
    ]:  # fmt: skip
        query, key, value = operands()
        query.requires_grad_(has_query)
        table = torch.randn(2, requires_grad=has_table)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            with eager_kernels(), torch.set_grad_enabled(is_enabled):
                out = call(query, key, value)
        finally:
            torch.set_float32_matmul_precision(before)
        torch.testing.assert_close(out, call(query, key, value))
        wanted = [t for t in (query, table) if t.requires_grad]
        assert out.requires_grad == (is_enabled and bool(wanted))
        if out.requires_grad:
            torch.testing.assert_close(
                torch.autograd.grad(out.sum(), wanted),
                torch.autograd.grad(call(query, key, value).sum(), wanted),
            )


@pytest.mark.parametrize("keep", [False, True])
def test_policies_of_checkpointing_see_one_operator(keep, monkeypatch):
    x, table = operands(grad=True), torch.randn(2, requires_grad=True)
    seen, runs = [], []
    run_alone = forward.run_alone
    monkeypatch.setattr(forward, "run_alone", lambda *x: runs.append(1) or run_alone(*x))

    def policy(context, operator, *args, **keywords):
        seen.append(operator)
        chosen = keep and operator is attention
        return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(*x):
        return flex_attention(*x, lambda s, b, h, q, k: s * table[h])

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    with eager_kernels():
        out = checkpoint(layer, *x, use_reentrant=False, context_fn=contexts)
        grads = torch.autograd.grad(out.square().sum(), [*x, table])
    assert attention in seen
    assert len(runs) == (1 if keep else 2)
    expected = torch.autograd.grad(layer(*x).square().sum(), [*x, table])
    torch.testing.assert_close(grads, expected)


def test_modes_see_one_operator():
    x = operands()
    with FlopCounterMode(display=False) as flops, eager_kernels():
        flex_attention(*x, lambda s, b, h, q, k: s * 2)
    batch, heads, length, width = x[0].shape
    assert flops.get_total_flops() == 4 * batch * heads * length * length * width


def test_autocast():
    x = operands(grad=True)
    with torch.autocast("cpu", torch.bfloat16), eager_kernels():
        out = flex_attention(*x, lambda s, b, h, q, k: s.tanh())
    assert out.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), x))


def test_dropout_is_that_of_the_definition():
    x, seed = operands(grad=True), torch.tensor([3, 4])

    def attend(*x):
        return flex_attention(*x, dropout_p=0.3, dropout_seed=seed)

    def both(*x):
        out = attend(*x)
        return out, *torch.autograd.grad(out.square().sum(), x)

    torch.testing.assert_close(fused(both)(*x), both(*x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    with mode(), eager_kernels():
        x = operands()
        out = flex_attention(*x, lambda s, b, h, q, k: s * 2)
    assert not out.requires_grad
    torch.testing.assert_close(out, flex_attention(*x, lambda s, b, h, q, k: s * 2))


def test_parameters_of_a_module_under_functional_call():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(2))

        def forward(self, *x):
            return flex_attention(*x, self.score)

        def score(self, score, b, h, q_idx, kv_idx):
            return score + self.table[h]

    layer, x = Layer(), operands()

    def loss(parameters):
        return functional_call(layer, parameters, tuple(x)).square().sum()

    tables = {"table": torch.randn(3, 2)}
    expected = vmap(grad(loss))(tables)
    torch.testing.assert_close(fused(vmap(grad(loss)))(tables), expected)


def test_a_cache_is_read(compilations):
    x = operands()
    scale = torch.rand(2)

    def attend():
        return flex_attention(*x, k_mod=lambda k, b, h, i: k * scale[h])

    torch.testing.assert_close(fused(attend)(), attend())
    assert len(compilations) == 1


def test_which_calls_run_kernels(compilations):
    x = operands()
    flex_attention(*x, kernel_options=KernelOptions(eager_kernels=True))
    assert len(compilations) == 1
    with eager_kernels():
        flex_attention(*x, kernel_options=KernelOptions(eager_kernels=False))
        flex_attention(*x, kernel_options={"eager_kernels": False})
        with eager_kernels(False):
            flex_attention(*x)
        flex_attention(*x)
    assert len(compilations) == 1


def test_mistakes_are_those_of_other_calls():
    x = operands()
    lengths = torch.ones(2, requires_grad=True)
    mask = create_block_mask(causal, None, None, *[x[0].size(2)] * 2, "cpu", BLOCK_SIZE=16)
    mask.mask_mod = lambda b, h, q, k: k < lengths[b]
    with eager_kernels():
        with pytest.raises(RankError):
            flex_attention(x[0][0], *x[1:])
        with pytest.raises(ModArityError):
            flex_attention(*x, lambda s: s)
        with pytest.raises(MaskCaptureGradError):
            flex_attention(x[0].requires_grad_(), *x[1:], block_mask=mask)


FACTOR = 2.0


def test_globals_are_noticed(monkeypatch):
    x = operands()

    def attend():
        return flex_attention(*x, lambda s, b, h, q, k: s * FACTOR)

    for factor in (2.0, 3.0, 2.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        torch.testing.assert_close(fused(attend)(), attend())


def test_functions_by_what_they_read():
    table, window = torch.randn(4), 3

    def read(table, window, function=torch.relu):
        return lambda s, b, h, q, k: function(s) + table[h] * window

    first = describe([read(table, 3)])
    assert first is None  # torch.relu is a builtin function, of which nothing is known

    def plain(table, window):
        return lambda s, b, h, q, k: torch.relu(s) + table[h] * window

    keys = [
        describe([plain(t, w)]).key
        for t, w in ((table, 3), (table + 1, 3), (table, 3.0), (table, 4), (table[:3], 3))
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4
    assert describe([plain(table, object())]) is None
    assert describe([functools.partial(plain(table, window), table)]).tensors == [table]


def test_a_call_without_gradients_leaves_no_graph_for_one_with():
    """Such a call does not record the backward of a torch.autograd.Function: gradients were 2."""
    query, key, value = operands()

    def own(score, b, h, q_idx, kv_idx):
        return Doubled.apply(score)

    call = fused(flex_attention)
    expected = flex_attention(query, key, value, own)
    for values in (value, value.clone().requires_grad_()):
        torch.testing.assert_close(call(query, key, values, own), expected)
    with torch.no_grad():
        torch.testing.assert_close(call(query.clone().requires_grad_(), key, value, own), expected)
    key = key.clone().requires_grad_()
    found, wanted = (
        torch.autograd.grad(attend(query, key, value, own).sum(), key)
        for attend in (call, flex_attention)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_function_that_calls_itself():
    def fold(score, times):
        return score if times == 0 else fold(torch.tanh(score) * 1.1, times - 1)

    def attend(*inputs):
        return flex_attention(*inputs, lambda score, b, h, q, k: fold(score, 3))

    inputs = [torch.randn(1, 2, 32, 8) for _ in range(3)]
    with eager_kernels():
        found = attend(*inputs)
    torch.testing.assert_close(found, attend(*inputs))
