import math
import traceback

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl

from flexhop.offline import interpreter, kept_types, rewriting
from flexhop.offline import kernel as kernel_parts
from flexhop.offline.interpret import Memory, OutOfBoundsError, interpret, run_kernel
from flexhop.offline.interpreter import interpreting, launch
from tests.programs import run_code
from tests.unit.offline.kernels import POINTERS, kernel

_ASSEMBLY = "v = tl.inline_asm_elementwise('{}', '=f,f', [v], tl.float32, True, 1)"
WATCHED = {"poison": True, "check_bounds": True}


def _run(body: str, x: torch.Tensor, helpers: str = "", **watch: bool) -> torch.Tensor:
    out = torch.full_like(x, -7)
    run_kernel(kernel(POINTERS, body, helpers), (1,), {"x": x, "out": out}, Memory(**watch))
    return out


def _block(lines: str) -> str:
    return f"i = tl.arange(0, 8)\nv = tl.load(x + i)\n{lines}\ntl.store(out + i, v)"


def _x() -> torch.Tensor:
    return torch.linspace(-2.0, 1.5, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_inductor_kernels_forward_and_backward(dtype):
    def layer(x, weight):
        return F.layer_norm(F.gelu(x), (300,), weight) * torch.erf(x)

    def inputs(dtype):
        torch.manual_seed(0)
        x, weight = torch.randn(20, 300), torch.randn(300)
        return [t.to(dtype).requires_grad_() for t in (x, weight)]

    ours, exact = inputs(dtype), inputs(dtype)
    got = interpret(layer, *ours, grad=True, memory=Memory(**WATCHED)).result
    exact = [t.detach().double().requires_grad_() for t in exact]
    want = layer(*exact)
    want.sum().backward()
    bound = 20 * torch.finfo(dtype).eps
    grads = [(a.grad, b.grad) for a, b in zip(ours, exact, strict=True)]
    for actual, expected in ((got, want), *grads):
        assert (actual.double() - expected).abs().max() <= bound * expected.abs().max()


def test_dynamic_shapes():
    result = interpret(lambda x: x.exp().sum(-1), torch.ones(7, 9), dynamic=True).result
    torch.testing.assert_close(result, torch.full((7,), 9 * math.e))


def test_one_text_in_two_kernels_is_rewritten_once_and_keeps_its_place():
    failing = "@triton.jit\ndef halve(v):\n    return v.to(tl.float32).no_such_member\n"
    places = []
    misses = rewriting._rewritten.cache_info().misses
    for above in ("", "# one line\n"):
        with pytest.raises(AttributeError) as error:
            _run(_block("v = halve(v)"), _x(), above + failing)
        last = traceback.extract_tb(error.value.__traceback__)[-1]
        places.append((last.filename, last.lineno))
        assert "no_such_member" in last.line
    assert places[1][1] == places[0][1] + 1
    assert places[1][0] != places[0][0]
    # The helper, and the kernel around it.
    assert rewriting._rewritten.cache_info().misses == misses + 2


def test_a_kernel_is_read_in_parts_that_other_kernels_share():
    """A function is parsed and compiled once; a decorator of several lines is not cut off."""
    shared = "@triton.jit\ndef third(v):\n    return v * 3\n\n"
    one, two = (
        kernel(POINTERS, _block("v = third(v)"), above + shared) for above in ("", "# one line\n")
    )
    parsed = [part.body for part in kernel_parts.parts_of(one.source)]
    assert len(parsed) == 3 and one.functions == ["third", "kernel"]
    assert [part.body is parsed[n] for n, part in enumerate(kernel_parts.parts_of(two.source))][1]
    assert two.function_text("third") == shared.strip() + "\n"
    for place in (one, two):
        first = place.module().third.fn.__code__.co_firstlineno
        assert place.source.splitlines()[first - 1] == "@triton.jit"
    cut = "@call(1,\n      2)\n@triton.jit\ndef f(v):\n    return v\n"
    (whole,) = kernel_parts.parts_of("import triton\n" + cut)
    assert len(whole.body) == 2


_MIXED = ["v = (v > 0) & (v < 1)", "v = i * 3 // 2", "v = v[None] + v[:, None]"]


@pytest.mark.parametrize("lines", _MIXED)
def test_kept_types_are_those_that_triton_makes(lines, monkeypatch):
    """Shape, element type and values of a result, with and without them."""
    body = _block(lines + "\ntl.static_print(v)\nv = tl.load(x + i)")

    def found():
        seen = []
        with interpreting(), monkeypatch.context() as inside:
            inside.setattr(tl, "static_print", seen.append)
            module = kernel(POINTERS, body).module()
            launch(module.kernel, (1,), {"x": _x(), "out": _x()})
            return [str((str(v.type), v.shape, v.numel, v.handle.data)) for v in seen]

    kept = found()
    monkeypatch.setattr(kept_types, "repairs", lambda: iter(()))
    interpreter._patches.cache_clear()
    plain = found()
    interpreter._patches.cache_clear()
    assert kept == plain and len(kept) == 1


def test_library_functions():
    out = _run(_block("v = libdevice.tanh(v) + libdevice.pow(v, 2.0) + tl_math.exp(v)"), _x())
    torch.testing.assert_close(out, _x().tanh() + _x() ** 2 + _x().exp())


@pytest.mark.parametrize("name", ["add", "div", "mul", "sub"])
def test_arithmetic_that_nothing_fuses(name):
    out = _run(_block(f"v = libdevice.{name}_rn(v, v + 2.0)"), _x())
    torch.testing.assert_close(out, getattr(torch, name)(_x(), _x() + 2))


def test_single_instruction_assembly():
    out = _run(_block(_ASSEMBLY.format("tanh.approx.f32 $0, $1;")), _x())
    torch.testing.assert_close(out, _x().tanh())


def test_unknown_assembly_is_named():
    with pytest.raises(NotImplementedError, match=r"not: shfl.x \$0, \$1;"):
        _run(_block(_ASSEMBLY.format("shfl.x $0, $1;")), _x())


def test_device_functions_and_reductions():
    helpers = "@triton.jit\ndef score_mod(v):\n    return v * tl.sum(v, 0) + v.max(0)\n"
    x = _x()
    out = _run(_block("v = score_mod(v)"), x, helpers)
    torch.testing.assert_close(out, x * x.sum() + x.max())


def test_maximum_ignores_nan_as_the_gpu_does():
    x = torch.tensor([math.nan] + [1.0] * 7)
    assert _run(_block("v = tl.maximum(v, 0.0)"), x)[0] == 0


def test_bfloat16_arithmetic_rounds_to_even():
    # 1 + 3/256 lies between two bfloat16 numbers; 1 + 1/64 has the even mantissa.
    line = "v = (v.to(tl.bfloat16) * 1.0).to(tl.float32)"
    out = _run(_block(line), torch.full((8,), 1 + 3 / 256))
    torch.testing.assert_close(out, torch.full((8,), 1 + 1 / 64))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_dot(dtype):
    body = """
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    v = tl.load(a + at)
    tl.store(out + at, tl.dot(v, tl.trans(v), input_precision='ieee'))
    """
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    a, out = torch.randn(16, 16).to(kind), torch.empty(16, 16)
    run_kernel(kernel({"a": f"*{dtype}", "out": "*fp32"}, body), (1,), {"a": a, "out": out})
    torch.testing.assert_close(out, a.float() @ a.float().T)


def test_atomic_add():
    out = torch.zeros(4)
    body = "i = tl.arange(0, 8)\ntl.atomic_add(out + i % 4, tl.load(x + i), sem='relaxed')"
    x = torch.arange(8.0)
    run_kernel(kernel(POINTERS, body), (2,), {"x": x, "out": out}, Memory(**WATCHED))
    torch.testing.assert_close(out, 2 * (x[:4] + x[4:]))


def test_device_made_descriptors():
    body = """
    source = tl.make_tensor_descriptor(x, [5, 8], [8, 1], [4, 8])
    target = tl.make_tensor_descriptor(out, [5, 8], [8, 1], [4, 8])
    target.store([4 * tl.program_id(0), 0], source.load([4 * tl.program_id(0), 0]) + 1)
    """
    x = torch.randn(5, 8)
    out = torch.zeros(5, 8)
    run_kernel(kernel(POINTERS, body), (2,), {"x": x, "out": out}, Memory(**WATCHED))
    torch.testing.assert_close(out, x + 1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("tl.store(out + i, tl.load(x + i + 1))", "load of x at element 8, but it has 8 elements"),
        ("tl.store(out + i, tl.load(x + i - 3))", "load of x at element -3, but it has 8"),
        ("tl.store(out + 2 * i, 0.0, mask=i < 5)", "store of out at element 8, but it has 8"),
        ("tl.atomic_add(out + i + 8, 1.0)", "atomic of out at element 15, but it has 8"),
    ],
)
def test_stray_access_is_named(body, message):
    with pytest.raises(OutOfBoundsError, match=f"^kernel: {message}"):
        _run(f"i = tl.arange(0, 8)\n{body}", _x(), check_bounds=True)


def test_lanes_that_are_off_may_stray():
    body = "i = tl.arange(0, 8)\ntl.store(out + i, tl.load(x + i + 4, mask=i < 4, other=1.0))"
    out = _run(body, _x(), check_bounds=True)
    torch.testing.assert_close(out, torch.cat((_x()[4:], torch.ones(4))))


def test_extent_of_a_view_is_its_own():
    whole = torch.randn(16)
    with pytest.raises(OutOfBoundsError, match="load of x at element 7"):
        run_kernel(
            kernel(POINTERS, _block("")),
            (1,),
            {"x": whole[:7], "out": torch.empty(8)},
            Memory(check_bounds=True),
        )


def test_poison_shows_open_lanes_and_unwritten_buffers():
    body = "i = tl.arange(0, 8)\ntl.store(out + i, tl.load(x + i, mask=i < 6))"
    assert _run(body, _x(), poison=True).isnan().tolist() == [False] * 6 + [True] * 2
    memory = Memory(poison=True)
    assert memory.allocate((2, 3), (3, 1), torch.bfloat16).isnan().all()
    assert (memory.allocate((2,), (1,), torch.int32) > 1 << 29).all()


def test_poison_fills_gaps_between_rows():
    memory = Memory(poison=True).allocate((2, 3), (5, 1), torch.float32)
    assert memory.as_strided((8,), (1,)).isnan().all()


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_tf32_products_truncate(precision):
    """As tensor cores do: an H200's errors are those of truncated operands."""
    body = f"""
    i = tl.arange(0, 16)
    tile = i[:, None] * 16 + i[None, :]
    product = tl.dot(tl.load(x + tile), tl.load(x + tile), input_precision="{precision}")
    tl.store(out + tile, product)
    """
    x, out = torch.full((16, 16), 1 + 2.0**-10 + 2.0**-11), torch.empty(16, 16)
    run_kernel(kernel(POINTERS, body), (1,), {"x": x, "out": out})
    read = x if precision == "ieee" else torch.full_like(x, 1 + 2.0**-10)
    torch.testing.assert_close(out, read @ read, rtol=1e-6, atol=0.0)


def test_triton_is_left_as_it_was():
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    names = [name for name in vars(tl) if not name.startswith("__")]
    before = {name: getattr(tl, name) for name in names}
    library = set(vars(tl.standard)) | {"interpreter_semantic"}
    _run(_block("v = v + tl.sum(v, 0)"), _x(), **WATCHED)
    assert {name: getattr(tl, name) for name in names} == before
    assert isinstance(tl.sum, JITFunction)
    assert set(vars(tl.standard)) <= library


def test_nothing_imported_while_interpreting_keeps_what_is_replaced():
    """Gluon copied `static_range` then, and its kernels did not compile afterwards."""
    program = """
import sys
from flexhop.offline.interpreter import interpreting

with interpreting():
    from triton.experimental.gluon import language
import triton.language as tl

sys.exit(language.static_range is not tl.static_range)
"""
    assert run_code(program).returncode == 0
