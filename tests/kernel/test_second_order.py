"""Kernels of second orders: interpreted against fp64, and compiled for three architectures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp
from torch.testing._internal.common_utils import DeterministicGuard

import flexhop
from flexhop import AuxRequest, KernelOptions
from flexhop.compat.graphs import inline
from flexhop.lowering import chunked
from flexhop.lowering import derivative as derivative_lowering
from flexhop.masks import causal
from flexhop.offline import Kernel, generate_code, generate_codes
from flexhop.offline.cubin import compile_kernel
from flexhop.offline.interpret import Memory, interpret
from flexhop.ops.derivatives import smooth
from tests.kernel.test_tangents import gaps

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
OPTIONS = KernelOptions(backend="triton")
QKV = (0, 1, 2)
MARK = "push_grad_tile"
PADDED = {"padding_stride_threshold": 0}  # Inductor pads every stride that it may choose


def alibi(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, t: Tensor) -> Tensor:
    return s + t[h, 0] * (j - i)


def gentle(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, t: Tensor) -> Tensor:
    """Slopes as small as ALiBi's. With those of `alibi` the tangent of the slopes' gradient is a
    thousandth of its terms: what is left of fp32 then is luck, plain PyTorch's as well."""
    return s + t[h, 0] / 8 * (j - i)


def capped(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, t: Tensor) -> Tensor:
    """With a second derivative of its own."""
    return 2 * (s * t[h, 1]).tanh() + t[h, 2] * torch.clamp(i - j, 0, 8)


def blocks(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, t: Tensor) -> Tensor:
    """An entry for a block of pairs, to which kernels add sums of groups."""
    return s * t[h, 1] + t[i // 8 % 4, j // 16]


def computed(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, t: Tensor) -> Tensor:
    """The table is computed with before it is read."""
    return capped(s, b, h, i, j, t.exp().cumsum(1) / 4)


def detached(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, t: Tensor) -> Tensor:
    """Inductor's decompositions drop `detach`."""
    return s * t[h, 1] + 0.5 * s.detach() * t[h, 2]


def waning(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, t: Tensor) -> Tensor:
    """The same with a part that is a table of distances, of which a half is detached."""
    wave = (torch.cos((i - j) * t[h, 0]) + torch.sin((i - j) * t[h, 3])).exp()
    return detached(s, b, h, i, j, t) + torch.sin(wave) * wave.detach()


def classes(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, t: Tensor) -> Tensor:
    """A whole row of the table times a row without a tangent."""
    return s + (torch.nn.functional.one_hot(j.long() % 9, 9) * t[h]).sum(-1)


def weighed(results: Any) -> Tensor:
    """A number that depends on out and lse."""
    out, aux = results
    lse = torch.where(torch.isinf(aux.lse), 0.0, aux.lse)
    return out.float().sin().sum() + lse.square().sum()


def twice(attend: Callable[..., Any], more: tuple[int, ...] = ()) -> Callable[..., Any]:
    """Gradients of a product of gradients; more: inputs that get gradients besides q, k, v."""

    def product(*x: Tensor) -> Tensor:
        grads = grad(lambda *y: weighed(attend(*y, *x[6:])), QKV)(*x[:3])
        return sum((g * a).sum() for g, a in zip(grads, x[3:6], strict=True))

    return lambda *x: grad(product, (*QKV, *more))(*x)


def of_tangent(attend: Callable[..., Any], more: tuple[int, ...] = ()) -> Callable[..., Any]:
    """Gradients of a loss on out and its tangent, for inputs and tangents."""

    def loss(*x: Tensor) -> Tensor:
        def out(*y: Tensor) -> Tensor:
            return attend(*y, *x[6:])[0]

        found, moved = jvp(out, x[:3], x[3:6])
        return (found - moved).square().sum()

    return lambda *x: grad(loss, (*range(6), *more))(*x)


def of_gradient(attend: Callable[..., Any], more: tuple[int, ...] = ()) -> Callable[..., Any]:
    """A Hessian times a vector in forward mode, beside the gradient."""
    wanted = (*QKV, *(i - 3 for i in more))

    def run(*x: Tensor) -> Any:
        gradient = grad(lambda *y: weighed(attend(*y)), wanted)
        return jvp(lambda *y: gradient(*y, *x[6:]), x[:3], x[3:6])

    return run


def of_moved_lse(attend: Callable[..., Any], more: tuple[int, ...] = ()) -> Callable[..., Any]:
    """Gradients of a loss on lse and its tangent alone."""

    def loss(*x: Tensor) -> Tensor:
        found, moved = jvp(lambda *y: attend(*y, *x[6:])[1].lse, x[:3], x[3:6])
        return (found.clamp(-9, 9) * moved).square().sum()

    return lambda *x: grad(loss, (*range(2), *range(3, 5), *more))(*x)


def forces(attend: Callable[..., Any], more: tuple[int, ...] = ()) -> Callable[..., Any]:
    """Gradients of a loss on the gradient of query alone, for the table too."""

    def loss(*x: Tensor) -> Tensor:
        force = grad(lambda q: weighed(attend(q, *x[1:3], *x[6:])))(x[0])
        return (force * x[3]).sum()

    return lambda *x: grad(loss, (*QKV, *more))(*x)


ALL = (0, 1, 2, 3)


def twice_along(attend: Callable[..., Any], more: tuple[int, ...] = ()) -> Callable[..., Any]:
    """`twice`, where the table of the mod is an input like the others: it has a tangent."""

    def product(*x: Tensor) -> Tensor:
        grads = grad(lambda *y: weighed(attend(*y)), ALL)(*x[:4])
        return sum((g * a).sum() for g, a in zip(grads, x[4:], strict=True))

    return lambda *x: grad(product, ALL)(*in_order(x))


def of_tangent_along(attend: Callable[..., Any], more: tuple[int, ...] = ()) -> Callable[..., Any]:
    """`of_tangent`, along a tangent of the table too."""

    def loss(*x: Tensor) -> Tensor:
        found, moved = jvp(lambda *y: attend(*y)[0], x[:4], x[4:])
        return (found - moved).square().sum()

    return lambda *x: grad(loss, tuple(range(8)))(*in_order(x))


def of_gradient_along(
    attend: Callable[..., Any], more: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """`of_gradient`, along a tangent of the table too."""

    def run(*x: Tensor) -> Any:
        x = in_order(x)
        return jvp(grad(lambda *y: weighed(attend(*y)), ALL), x[:4], x[4:])

    return run


def of_table_alone(attend: Callable[..., Any], more: tuple[int, ...] = ()) -> Callable[..., Any]:
    """A gradient of the gradient of the table: nothing else has a tangent."""

    def run(*x: Tensor) -> Any:
        def product(*y: Tensor) -> Tensor:
            slopes = grad(lambda t: weighed(attend(*y[:3], t)))(y[3])
            return (slopes * x[6].cos()).sum()

        return grad(product, ALL)(*x[:3], x[6])

    return run


def in_order(x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Query, key, value and the table, then the tangents of all four."""
    return (*x[:3], x[6], *x[3:6], x[6].cos())


# name: derivative, score_mod (whose table gets a gradient unless it is fixed), mask_mod, dtype
CASES: dict[str, tuple[Any, Any, Any, torch.dtype]] = {
    "twice": (twice, None, None, torch.float32),
    "twice-alibi-mask-deterministic": (twice, alibi, gaps, torch.bfloat16),
    "twice-detached": (twice, detached, None, torch.float32),
    "twice-detached-table": (twice, waning, None, torch.float32),
    "twice-capped": (twice, capped, gaps, torch.float32),
    "twice-blocks": (twice, blocks, gaps, torch.float32),
    "of_tangent": (of_tangent, None, gaps, torch.float32),
    "of_tangent-capped": (of_tangent, capped, None, torch.float16),
    "of_gradient-fixed": (of_gradient, alibi, gaps, torch.float32),
    "of_gradient-dropout": (of_gradient, gentle, gaps, torch.float32),
    "twice_along-alibi-deterministic": (twice_along, gentle, None, torch.bfloat16),
    "twice_along-capped": (twice_along, capped, gaps, torch.float32),
    "of_tangent_along-capped": (of_tangent_along, capped, gaps, torch.float32),
    "of_gradient_along-capped": (of_gradient_along, capped, None, torch.float32),
    "twice_along-classes": (twice_along, classes, None, torch.float32),
    "of_tangent-computed": (of_tangent, computed, None, torch.float32),
    "of_tangent_along-computed": (of_tangent_along, computed, gaps, torch.float32),
    "forces-computed": (forces, computed, None, torch.float32),
    "of_moved_lse-capped": (of_moved_lse, capped, None, torch.float32),
    "of_table_alone-capped": (of_table_alone, capped, gaps, torch.float32),
    "wide-twice-capped": (twice, capped, gaps, torch.float32),
    "wide-of_tangent": (of_tangent, None, gaps, torch.float32),
}


def derivative(name: str) -> Callable[..., Any]:
    """Of three inputs and three tangents, and the table of the mods."""
    make, score, mask_mod, _ = CASES[name]
    mask, dropout = None, {}
    if mask_mod is not None:
        mask = flexhop.create_block_mask(mask_mod, None, 4, 37, 45, "cpu", BLOCK_SIZE=32)
    if "dropout" in name:
        dropout = {"dropout_p": 0.3, "dropout_seed": torch.tensor([5, 6])}

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
        return flexhop.flex_attention(
            q, k, v, None if score is None else lambda *y: score(*y, table), mask,
            enable_gqa=True, kernel_options=OPTIONS, return_aux=AuxRequest(lse=True), **dropout,
        )  # fmt: skip

    return make(attend, () if score is None or "fixed" in name else (6,))


def check(
    result: Any, run: Callable[..., Any], inputs: Sequence[Tensor], dtype: Any = torch.float32
) -> None:
    """Compare a result with the definition's in fp64; dtype: what the kernel rounds to."""
    gold, plain = run(*(t.double() for t in inputs)), run(*inputs)
    flat = [torch.utils._pytree.tree_leaves(r) for r in (result, gold, plain)]
    for found, exact, rounded in zip(*flat, strict=True):
        assert found.dtype == rounded.dtype
        # The definition computes in fp32 and rounds once; kernels round weights and gradients.
        unit = 6 * torch.finfo(found.dtype if dtype == torch.float32 else dtype).eps
        error = (found.double() - exact).abs().max()
        budget = 2 * (rounded.double() - exact).abs().max() + unit * exact.abs().max()
        assert error <= budget, (float(error), float(budget))


@pytest.fixture
def deterministic(name: str) -> Iterator[None]:
    """Deterministic algorithms for the cases that ask for them."""
    with DeterministicGuard("deterministic" in name):
        yield


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("deterministic")
def test_interpreted(name: str, monkeypatch: pytest.MonkeyPatch):
    traced: list[str] = []

    def trace_fresh(*given: Any) -> Any:
        graph = original(*given)
        traced.append(graph.code)
        return graph

    original = inline.trace_fresh
    monkeypatch.setattr(inline, "trace_fresh", trace_fresh)
    dtype = CASES[name][3]
    width, value_width = (100, 120) if name.startswith("wide") else (20, 24)
    shapes = [(2, 4, 37, width), (2, 2, 45, width), (2, 2, 45, value_width)]
    inputs = [torch.randn(shape, dtype=dtype) for shape in (*shapes * 2, (4, 9))]
    memory = Memory(poison=True, check_bounds=True)
    generated = interpret(derivative(name), *inputs, memory=memory, options=PADDED)
    assert len([k for k in generated.templates if MARK in k.functions]) >= 3
    assert len(traced) == len(set(traced)) > 1  # all results share the derivatives of the mod
    check(generated.result, derivative(name), inputs, dtype)


@pytest.mark.parametrize("chunks", [1, 2])
def test_chunks_are_traced_without_a_gpu(chunks: int, monkeypatch: pytest.MonkeyPatch):
    """Third orders have no kernel. PyTorch's autograd asks the device, and ended the process.
    Several chunks are a loop, which PyTorch traces by itself."""
    if chunks == 2:
        monkeypatch.setattr(chunked, "GPU_CHUNK_ELEMENTS", 1)
    query, key, value = (torch.randn(1, 2, 21, 8) for _ in range(3))

    def attend(table: Tensor) -> Tensor:
        def biased(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return capped(s, b, h, i, j, table.exp())

        # In fp64 if the table is: what the results are compared with.
        q, k, v = (t.to(table.dtype) for t in (query, key, value))
        return flexhop.flex_attention(q, k, v, biased, kernel_options=OPTIONS)

    def slopes(table: Tensor) -> Tensor:
        gradient = grad(lambda t: attend(t).sin().sum())
        return jvp(gradient, (table,), (table.cos(),))[1].sum()

    orders = []

    def note(args: Any, formula: Any) -> Any:
        orders.append(len(args.program))
        return chunked.lower_definition(args, formula)

    monkeypatch.setattr(derivative_lowering, "lower_definition", note)
    table = torch.randn(2, 3)
    generated = interpret(grad(slopes), table, memory=Memory(poison=True, check_bounds=True))
    assert orders == [3]  # the derivative of out's tangent has kernels
    check(generated.result, grad(slopes), [table])


@pytest.mark.parametrize("mod", [capped, computed])
def test_detached_tangents_leave_the_backward_pass(mod: Any):
    """MeanFlow's loss, whose target is detached."""
    inputs = [*(torch.randn(2, 2, 37, 20) for _ in range(3)), torch.randn(2, 3)]
    mask = flexhop.create_block_mask(gaps, None, 2, 37, 37, "cpu", BLOCK_SIZE=32)

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
        return flexhop.flex_attention(
            q, k, v, lambda *y: mod(*y, table), mask, kernel_options=OPTIONS
        )

    def loss(*x: Tensor) -> Tensor:
        found, moved = jvp(attend, x, tuple(t.detach().cos() for t in x))
        return (found - moved.detach()).square().sum()

    memory = Memory(poison=True, check_bounds=True)
    generated = interpret(grad(loss, ALL), *inputs, memory=memory)
    names = [kernel.functions for kernel in generated.templates]
    assert len(names) == 3 and not any(MARK in each for each in names)
    check(generated.result, grad(loss, ALL), inputs)


ARCHITECTURES = (80, 90, 100)


@functools.cache
def kernels(width: int, dtype: torch.dtype) -> dict[int, list[Kernel]]:
    inputs = [torch.zeros(1, 2, 1024, width, dtype=dtype) for _ in range(3)]
    mask = flexhop.create_block_mask(causal, None, None, 1024, 1024, "cpu")

    def attend(*x: Tensor) -> Any:
        return flexhop.flex_attention(
            *x, block_mask=mask, kernel_options=OPTIONS, return_aux=AuxRequest(lse=True)
        )

    generated = generate_codes(
        twice(attend), *inputs, *inputs, capabilities=[divmod(a, 10) for a in ARCHITECTURES]
    )
    return {
        architecture: [kernel for kernel in one.templates if MARK in kernel.functions]
        for architecture, one in zip(ARCHITECTURES, generated, strict=True)
    }


def cubins(architecture: int, width: int, dtype: torch.dtype) -> list[Any]:
    found = kernels(width, dtype)[architecture]
    assert len(found) == 3
    return [compile_kernel(kernel, architecture) for kernel in found]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_default_tiles_do_not_spill(architecture: int, width: int):
    for found in cubins(architecture, width, torch.bfloat16):
        assert (found.spills, found.stack) == (0, 0)
        assert found.mma + found.wgmma + found.tcgen05 > 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_default_tiles_of_float32(architecture: int):
    """Heads of more than 64 columns ran in chunks."""
    for found in cubins(architecture, 128, torch.float32):
        assert (found.spills, found.stack, found.mma) == (0, 0, 0)


def test_exact_float32_with_a_mask_that_reads_by_distance():
    """Triton 3.6 could not compile such a mask in a branch."""
    near = torch.rand(2, 65) > 0.5

    def near_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return near[h, i - j]

    mask = flexhop.create_block_mask(near_mask, 2, 2, 5, 65, "cpu", BLOCK_SIZE=20)

    def attend(*x: Tensor) -> Any:
        return flexhop.flex_attention(
            *x, lambda s, *_: torch.nn.functional.hardtanh(s), mask, kernel_options=OPTIONS,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip

    shapes = [(2, 2, 5, 8), (2, 2, 65, 8), (2, 2, 65, 24)]
    inputs = [torch.randn(shape) for shape in shapes * 2]
    found = generate_code(twice(attend), *inputs).templates
    second = [kernel for kernel in found if MARK in kernel.functions]
    assert len(second) == 3
    for kernel in second:
        compile_kernel(kernel, 90)


def test_signs_have_derivatives_under_symbolic_sizes():
    """PyTorch 2.11 cannot trace them there, in chunks, as in fp64."""
    query, key, value = (torch.zeros(1, 1, n, 16, dtype=torch.float64) for n in (5, 6, 6))

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * s.abs() + s * torch.sgn(s) + (i - j).abs()

    def slope(query: Tensor) -> Tensor:
        loss = lambda q: flexhop.flex_attention(q, key, value, mod).square().sum()  # noqa: E731
        return grad(loss)(query).sum()

    generated = generate_code(grad(slope), query, dynamic=True)
    assert not any(MARK in kernel.source for kernel in generated.templates)


def test_absolute_values_that_can_be_traced_have_the_same_derivatives():
    numbers = torch.tensor([-2.0, -0.0, 0.0, 0.5, torch.inf], dtype=torch.float64)
    for replaced, usual in ((smooth.magnitude, torch.abs), (smooth.sign, torch.sgn)):
        for derivative in (lambda f: f, grad, lambda f: grad(grad(f))):
            found, expected = (torch.vmap(derivative(f))(numbers) for f in (replaced, usual))
            torch.testing.assert_close(found, expected)
    assert bool(smooth.magnitude(torch.tensor(torch.nan)).isnan())
    assert torch.equal(smooth.magnitude(torch.tensor([-3, 2])), torch.tensor([3, 2]))
