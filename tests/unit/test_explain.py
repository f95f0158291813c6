"""flexhop.explain: its report, and that it needs neither a GPU nor data."""

import dataclasses
import html
import inspect
import typing
from xml.etree import ElementTree

import pytest
import torch
from torch.nn.functional import hardsigmoid, softshrink

import flexhop
from flexhop import errors
from flexhop.errors import ModLoweringError, OptionValueError
from flexhop.lowering.portable.rules import Kernel
from flexhop.masks import causal
from flexhop.offline import generate
from flexhop.reports.page import estimate
from flexhop.reports.report import Report
from tests.needs import needs_hopper

WIDTH = 64


def operands(length: int = 256, device: str = "meta", heads: int = 2, width: int = WIDTH):
    return tuple(
        torch.empty(1, heads, length, width, dtype=torch.bfloat16, device=device) for _ in range(3)
    )


def causal_mask(length: int = 256, **keywords):
    return flexhop.create_block_mask(causal, None, None, length, length, device="cpu", **keywords)


def with_bias(bias: torch.Tensor):
    def biased(score, b, h, q_idx, kv_idx):
        return score + bias[h, q_idx - kv_idx + 255]

    return biased


def test_plain_attention_is_trivial():
    report = flexhop.explain(*operands())
    assert report.score_mod.is_trivial
    assert report.mask_mod.is_trivial
    assert report.mask is None
    assert report.score_mod_grad is None
    assert "sm_90" in report.device
    assert [part.kernel for part in report.passes] == ["forward", "grad_query", "grad_key_value"]
    assert report.forward.flops == report.unmasked_flops == 4 * 2 * 256 * 256 * WIDTH
    assert any("No operand requires a gradient" in note for note in report.notes)


def test_mods_are_shown_with_their_own_argument_names():
    bias = torch.zeros(2, 511, requires_grad=True)
    report = flexhop.explain(*operands(), score_mod=with_bias(bias), block_mask=causal_mask())
    assert report.score_mod.code.splitlines()[0] == (
        "def score_mod(score, b, h, q_idx, kv_idx, capture_0):"
    )
    assert report.mask_mod.code == (
        "def mask_mod(b, h, q_idx, kv_idx):\n    ge = aten.ge.Tensor(q_idx, kv_idx)\n    return ge"
    )
    (capture,) = report.score_mod.captures
    assert str(capture) == "capture_0: float32 [2, 511] on cpu, needs a gradient"
    assert report.score_mod_grad is not None
    assert report.score_mod_grad.startswith("def joint(score, b, h, q_idx, kv_idx, grad_score")
    assert any("atomically" in note for note in report.notes)


def test_it_takes_every_argument_of_the_call():
    asked = set(inspect.signature(flexhop.explain).parameters)
    assert asked - set(inspect.signature(flexhop.flex_attention).parameters) == {"capability"}
    assert set(inspect.signature(flexhop.flex_attention).parameters) <= asked
    seed = torch.tensor([1, 2])
    report = flexhop.explain(*operands(), dropout_p=0.1, dropout_seed=seed)
    assert "dropout" in report.forward.reason


@needs_hopper
def test_kernels_are_those_of_the_compiler_which_decomposes_mods():
    """As written this gradient takes 55 instructions, and decomposed 65: more than 60."""
    tensors = [
        torch.zeros(2, 16, 1024, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]

    def gated(score, b, h, q_idx, kv_idx):
        gelu, silu = torch.nn.functional.gelu, torch.nn.functional.silu
        return gelu(score) + gelu(2 * score) + silu(score)

    report = flexhop.explain(*tensors, score_mod=gated, capability=(9, 0))
    generated = generate(
        lambda q, k, v: flexhop.flex_attention(q, k, v, score_mod=gated), *tensors, grad=True
    )
    is_hopper = any("differentiate" in kernel.functions for kernel in generated.templates)
    assert is_hopper == (report.backward[0].kernel == "backward")
    assert not is_hopper
    assert "gelu" in report.score_mod.code


def test_blocks_and_density_are_counted():
    mask = flexhop.explain(*operands(512), block_mask=causal_mask(512)).mask
    assert mask is not None
    assert (mask.partial, mask.full, mask.total) == (4, 6, 16)
    assert mask.density == pytest.approx(10 / 16)
    assert mask.unmasked == pytest.approx((512 * 513 / 2) / 512**2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_operands_are_packed_tokens():
    lengths = (300, 200, 12)
    tokens = torch.nested.nested_tensor(
        [torch.randn(n, 2, 8) for n in lengths], layout=torch.jagged
    )
    query = tokens.transpose(1, 2)
    mask = flexhop.explain(query, query, query).mask
    assert mask is not None
    assert mask.shape == (1, 1, 512, 512)
    assert mask.unmasked == pytest.approx(sum(n * n for n in lengths) / 512**2)
    blocks = flexhop.create_nested_block_mask(causal, None, None, query)
    mask = flexhop.explain(query, query, query, block_mask=blocks).mask
    assert mask is not None
    assert mask.unmasked == pytest.approx(sum(n * (n + 1) / 2 for n in lengths) / 512**2)


def test_work_follows_the_visited_blocks():
    dense = flexhop.explain(*operands(512))
    sparse = flexhop.explain(*operands(512), block_mask=causal_mask(512))
    for whole, part in zip(dense.passes, sparse.passes, strict=True):
        assert part.flops == whole.flops * 10 // 16
        assert part.bytes == whole.bytes


def test_a_mask_without_data_has_no_counts():
    report = flexhop.explain(*operands(), block_mask=causal_mask().to("meta"))
    assert report.mask is not None
    assert (report.mask.partial, report.mask.density, report.forward.flops) == (None, None, None)
    assert "no data" in str(report)


def test_pytorchs_block_mask_is_understood():
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(causal, None, None, 256, 256, device="cpu")
    ours, theirs = (flexhop.explain(*operands(), block_mask=m).mask for m in (causal_mask(), mask))
    assert ours == theirs


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("width", [64, 256])
def test_every_kernel_fits_every_gpu(capability: tuple[int, int], width: int):
    report = flexhop.explain(*operands(width=width), capability=capability)
    assert all(part.shared_memory <= part.available for part in report.passes)
    assert report.device.endswith(f"sm_{capability[0]}{capability[1]}")


def test_an_unknown_gpu_is_refused():
    with pytest.raises(OptionValueError, match="capability"):
        flexhop.explain(*operands(), capability=(7, 0))


def test_reasons_say_where_a_tile_comes_from():
    tile = flexhop.Tile(64, 32)
    chosen = flexhop.explain(*operands(), kernel_options=flexhop.KernelOptions(forward=tile))
    assert chosen.forward.tile == tile
    assert "your kernel_options" in chosen.forward.reason
    assert "table for sm_90" in chosen.backward[0].reason
    options = flexhop.KernelOptions(backend="triton")
    mask = causal_mask(BLOCK_SIZE=32)
    small = flexhop.explain(*operands(), block_mask=mask, kernel_options=options)
    assert "divide the mask's blocks of 32 x 32" in small.forward.reason


@needs_hopper
def test_the_hopper_kernel_is_named_or_the_reason_against_it():
    served = flexhop.explain(*operands(width=128))
    assert served.forward.reason == (
        "the Hopper kernel supports this call; its steps have one loop"
    )
    assert "three loops: heads of 256 columns" in str(flexhop.explain(*operands(width=256)))
    assert "warps (1 loads)" in str(served)
    assert any("multiples of 16 bytes" in note for note in served.notes)
    options = flexhop.KernelOptions(backend="triton")
    forbidden = flexhop.explain(*operands(width=128), kernel_options=options)
    assert forbidden.forward.reason.endswith(
        "; not the Hopper kernel: kernel_options select backend 'triton'"
    )


def test_calls_are_explained_independently():
    """Dynamo would refuse the ninth variant of one function."""
    for factor in range(10):
        report = flexhop.explain(*operands(), score_mod=lambda s, b, h, m, n, f=factor: s * f)
        assert f"aten.mul.Tensor(score, {factor})" in report.score_mod.code


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_neither_result_nor_gradient_is_computed(device: str):
    query, key, value = (t.requires_grad_() for t in operands(device=device))
    report = flexhop.explain(query, key, value, return_aux=flexhop.AuxRequest(lse=True))
    assert query.grad is None
    assert not any("No operand requires a gradient" in note for note in report.notes)


def test_fake_tensors_are_explained_inside_and_outside_their_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tensors = operands(device="cpu")
        inside = flexhop.explain(*tensors)
    assert inside == flexhop.explain(*tensors)
    assert inside.passes == flexhop.explain(*operands()).passes


def test_where_there_is_no_kernel_the_report_says_so():
    double = [tensor.double() for tensor in operands()]
    report = flexhop.explain(*double)
    assert report.passes == ()
    assert "fp64 has no kernels" in str(report)
    assert "query is on the CPU" in str(flexhop.explain(*operands(device="cpu")))
    assert "query is on the CPU" not in str(
        flexhop.explain(*operands(device="cpu"), capability=(8, 0))
    )


def test_wide_heads_have_a_kernel_per_gradient():
    report = flexhop.explain(*operands(width=256))
    assert [part.kernel for part in report.backward] == ["grad_query", "grad_key", "grad_value"]


def test_mistakes_raise_what_the_call_raises():
    with pytest.raises(errors.HeadDimError):
        flexhop.explain(*operands(width=32)[:1], *operands()[1:])
    with pytest.raises(errors.BlockMaskTypeError):
        flexhop.explain(*operands(), block_mask=3)
    with pytest.raises(errors.UnknownOptionError):
        flexhop.explain(*operands(), kernel_options={"BLOK_M": 64})


def test_the_report_is_a_page_and_frozen():
    report = flexhop.explain(*operands(200), block_mask=causal_mask(200))
    text = str(report)
    for title in ("call", "device", "score_mod", "mask_mod", "block mask", "options", "notes"):
        assert f"\n{title}\n" in f"\n{text}"
    assert "kernel grad_query" in text
    assert "extends past" in text
    assert max(map(len, text.splitlines())) < 220
    assert max(map(len, text[text.index("\nnotes\n") :].splitlines())) <= 100
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.device = "another"  # type: ignore[misc]


def test_short_queries_are_decoded():
    query = torch.empty(1, 32, 1, 128, dtype=torch.bfloat16, device="meta")
    key = torch.empty(1, 8, 8192, 128, dtype=torch.bfloat16, device="meta")
    report = flexhop.explain(query, key, key, enable_gqa=True, capability=(9, 0))
    assert report.forward.kernel == "decode"
    assert report.forward.programs == 8 * 16
    assert any("16 splits" in note for note in report.notes)
    asked = {"short_queries": "forward"}
    report = flexhop.explain(
        query, key, key, enable_gqa=True, capability=(9, 0), kernel_options=asked
    )
    assert report.forward.kernel == "forward"
    assert not any("splits" in note for note in report.notes)


def test_sinks_are_accepted_and_checked():
    plain = flexhop.explain(*operands())
    report = flexhop.explain(*operands(), sinks=torch.empty(2, device="meta"))
    assert report.forward.kernel == plain.forward.kernel
    with pytest.raises(OptionValueError, match="sinks"):
        flexhop.explain(*operands(), sinks=torch.empty(3, device="meta"))


@needs_hopper
def test_one_hopper_kernel_computes_all_gradients():
    query = torch.empty(4, 8, 2048, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    report = flexhop.explain(query, query, query, capability=(9, 0))
    (backward,) = report.backward
    assert (backward.kernel, backward.programs) == ("backward", 132)
    assert any("without a fixed order" in note for note in report.notes)
    options = flexhop.KernelOptions(deterministic=True)
    report = flexhop.explain(query, query, query, capability=(9, 0), kernel_options=options)
    assert [part.kernel for part in report.backward] == ["backward"]
    assert not any("without a fixed order" in note for note in report.notes)
    assert any("in the order of the keys" in note for note in report.notes)


@needs_hopper
def test_exact_sums_of_captured_tensors_take_the_portable_kernels():
    query = torch.empty(4, 8, 2048, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    slopes = torch.zeros(8, requires_grad=True)
    report = flexhop.explain(
        query, query, query, lambda s, b, h, q, k: s + slopes[h] * (k - q), capability=(9, 0),
        kernel_options=flexhop.KernelOptions(deterministic=True),
    )  # fmt: skip
    assert [part.kernel for part in report.backward] == ["grad_query", "grad_key_value"]
    assert "deterministic mode is on" in report.backward[0].reason


def test_the_report_says_what_computes_second_derivatives():
    query, key, value = operands()
    query.requires_grad_()

    def note(*x: torch.Tensor, **more: object) -> str:
        notes = flexhop.explain(*x, **more).notes
        return next(note for note in notes if note.startswith("Second derivatives"))

    assert "run the kernels jvp_forward, jvp_grad_query" in note(query, key, value)
    assert "run the kernels" in note(query, key, value, dropout_p=0.1)
    wide = operands(width=320)
    assert "head size is 320, and the kernels have registers for at most 256" in note(
        wide[0].requires_grad_(), *wide[1:]
    )
    bias = torch.zeros(2, 511, requires_grad=True)
    assert "run the kernels" in note(query, key, value, score_mod=with_bias(bias))


def test_the_docstring_of_passes_names_every_kernel():
    names = (*typing.get_args(Kernel), "backward")
    assert [name for name in names if f'"{name}"' not in Report.__doc__] == []


def test_notebooks_show_a_picture_and_a_bar_for_each_kernel():
    report = flexhop.explain(*operands(), block_mask=causal_mask())
    shown = report._repr_html_()
    root = ElementTree.fromstring(shown)  # well-formed
    assert root.find(".//{http://www.w3.org/2000/svg}svg") is not None
    assert shown == report.to_html()
    cells = [cell.text for cell in root.iter("td")]
    assert [part.kernel for part in report.passes] == cells[::4]
    assert html.unescape(str(report)).strip() == root.findtext(".//pre").strip()
    assert "svg" not in flexhop.explain(*operands()).to_html()


def test_least_times_are_rooflines():
    assert estimate("NVIDIA H200, sm_90", 989 * 10**6, 48) == (1.0, "µs", "bounded by products")
    assert estimate("NVIDIA H200, sm_90", None, 48 * 10**5) == (1.0, "µs", "bounded by memory")
    assert estimate("some chip", 3 * 10**9, 1) == (3.0, "GFLOP", "")


REFUSED = {
    "a sum of scores so far": lambda s, b, h, q, k: torch.stack([s, 2 * s]).cumsum(0)[h % 2],
    "sorted scores": lambda s, b, h, q, k: torch.stack([s, 2 * s]).sort().values[0],
    "a long sum": lambda s, b, h, q, k: s + (LONG[q] * LONG[k]).sum(),
}
LONG = torch.randn(64, 100)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_computes_is_refused_as_by_the_compiler(name):
    """No kernels are promised for a call that would only be refused."""
    tensors = [torch.zeros(1, 2, 64, 32, requires_grad=True)] * 3
    with pytest.raises(ModLoweringError, match="score_mod cannot be compiled"):
        flexhop.explain(*tensors, REFUSED[name], capability=(9, 0))


@pytest.mark.parametrize("name", REFUSED)
def test_the_same_is_refused_of_a_call_that_reads_a_cache(name):
    tensors = [torch.zeros(1, 2, 64, 32)] * 3
    halve = flexhop.mods.dequantize(0.5)
    with pytest.raises(ModLoweringError, match="score_mod cannot be compiled"):
        flexhop.explain(*tensors, REFUSED[name], k_mod=halve, capability=(9, 0))


def test_a_call_that_reads_a_cache_has_the_tables_that_it_needs():
    """Others would take longer to make than a step of decoding saves by reading them."""
    steps, buckets = torch.rand(2, 6), torch.rand(64)

    def mod(s, b, h, q, k):
        return s + steps[h].cumsum(0)[(q - k).abs() % 6] + buckets[(q - k + 64).log2().int()].exp()

    tensors = [torch.zeros(1, 2, 64, 32)] * 3
    report = flexhop.explain(*tensors, mod, capability=(9, 0))
    cached = flexhop.explain(*tensors, mod, k_mod=flexhop.mods.dequantize(0.5), capability=(9, 0))
    sizes = [[note for note in of.notes if "as tables of" in note] for of in (report, cached)]
    assert "[2, 6], [127]" in sizes[0][0]
    assert "as tables of [2, 6]. Kernels cannot compute them." in sizes[1][0]


def test_a_mask_that_no_kernel_computes_is_refused():
    def mask_mod(b, h, q, k):
        return (LONG[q] * LONG[k]).sum() > 0

    mask = flexhop.create_block_mask(mask_mod, None, None, 64, 64, "cpu")
    tensors = [torch.zeros(1, 2, 64, 32)] * 3
    with pytest.raises(ModLoweringError, match="mask_mod cannot be compiled"):
        flexhop.explain(*tensors, block_mask=mask, capability=(9, 0))


def test_a_derivative_that_no_kernel_computes_is_refused():
    """The forward kernel would be generated."""
    rates = torch.ones(2, requires_grad=True)

    def mod(s, b, h, q, k):
        return s + torch.stack([s * rates[0], s * rates[1]]).logcumsumexp(0)[1]

    tensors = [torch.zeros(1, 2, 64, 32, requires_grad=True)] * 3
    with pytest.raises(ModLoweringError, match="cannot be compiled"):
        flexhop.explain(*tensors, mod, capability=(9, 0))


DERIVATIVES = {
    "minimum": lambda s, b, h, q, k: torch.minimum(s, 1.0 - s),
    "maximum": lambda s, b, h, q, k: torch.maximum(s, s * 0.5),
    "fmax": lambda s, b, h, q, k: torch.fmax(s, -s),
    "copysign": lambda s, b, h, q, k: torch.copysign(s, (q - k) + 0.5),
    "softshrink": lambda s, b, h, q, k: softshrink(s, 0.3),
    "hardsigmoid": lambda s, b, h, q, k: hardsigmoid(s),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_that_write_in_place_or_have_no_kernel_of_their_own(name):
    """Compilation makes them functional, and decomposes the function first."""
    tensors = [torch.zeros(1, 2, 64, 32, requires_grad=True)] * 3
    report = flexhop.explain(*tensors, DERIVATIVES[name], capability=(9, 0))
    assert report.score_mod_grad


def test_a_function_in_place_of_query():
    inputs = [torch.zeros(1, 2, 16, 8) for _ in range(3)]
    with pytest.raises(OptionValueError, match="Invalid query value 'function'"):
        flexhop.explain(flexhop.flex_attention, *inputs)
