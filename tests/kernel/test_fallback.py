"""A call whose kernel does not compile is served by the next candidate, with one warning."""

import re
import warnings
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch
from torch._inductor.async_compile import CompiledTritonKernels
from torch._inductor.codecache import LambdaFuture

import flexhop
from flexhop import KernelOptions, create_block_mask, errors, flex_attention
from flexhop.compat.kernels import machine_code
from flexhop.compat.offline import fake_gpu
from flexhop.lowering import fallback
from flexhop.lowering.hopper import emit as hopper
from flexhop.offline import generate
from flexhop.offline.cubin import compile_kernel
from tests.needs import needs_hopper

pytestmark = [
    pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning"),
    pytest.mark.filterwarnings("ignore:Please add support for subgraph args"),
]


class Failure(Exception):
    """What a compiler might raise."""


@pytest.fixture(autouse=True)
def _lenient(monkeypatch):
    monkeypatch.setenv("FLEXHOP_STRICT", "0")
    yield
    fallback.forget()


@pytest.fixture
def compiled(monkeypatch):
    """Compiling a candidate succeeds at once; the fixture is the list of what was compiled."""
    seen = []

    def shared_memory(choice):
        seen.append(choice.name)
        return 1000

    monkeypatch.setattr(machine_code, "shared_memory", shared_memory)
    return seen


def fail_in(monkeypatch, *stages):
    """Inductor fails after all of our kernels were generated, as if one did not compile."""
    plain = fake_gpu.GraphLowering.codegen

    def codegen(self):
        if fallback._state.stage in stages:
            raise Failure("PassManager::run failed\nand more")
        return plain(self)

    monkeypatch.setattr(fake_gpu.GraphLowering, "codegen", codegen)


def operands(dtype=torch.bfloat16, length=256):
    return [torch.randn(1, 2, length, 64, dtype=dtype, requires_grad=True) for _ in range(3)]


def capped(q, k, v):
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + 0.1 * (i - j))


def kernels(function, tensors, **keywords):
    """The generated kernels, and our one warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = generate(function, *tensors, capability=(9, 0), **keywords).templates
    ours = [w for w in caught if issubclass(w.category, errors.KernelFallbackWarning)]
    return found, [str(w.message) for w in ours]


@needs_hopper
def test_another_dialect_serves_if_generation_fails(monkeypatch, compiled):
    assert kernels(capped, operands())[0][0].is_gluon  # what fails now

    def fill_kernel(*_):
        raise Failure("bufN")

    monkeypatch.setattr(hopper, "fill_kernel", fill_kernel)
    found, (message,) = kernels(capped, operands())
    assert [kernel.is_gluon for kernel in found] == [False]
    assert "forward, Hopper kernel: Failure: bufN." in message
    assert len(compiled) == 1


def test_another_tile_serves_if_a_kernel_does_not_compile(monkeypatch, compiled):
    fail_in(monkeypatch, "usual")
    sizes = []

    def shared_memory(choice):
        text = open(choice.bmreq.module_path).read()
        sizes.append(re.search(r"BLOCK_M : tl.constexpr = (\d+)", text)[1])
        if len(sizes) == 1:
            raise Failure("ptxas died")
        return 1 << 30 if len(sizes) == 2 else 1000

    monkeypatch.setattr(machine_code, "shared_memory", shared_memory)
    tensors = operands(torch.float32)
    found, (message,) = kernels(capped, tensors)
    assert len(found) == 1 and len(sizes) == 3
    assert "Failure: ptxas died" in message and "bytes of shared memory" in message
    notes = " ".join(flexhop.explain(*tensors, score_mod=_score, capability=(9, 0)).notes)
    assert "ptxas died" in notes


def _score(s, b, h, i, j):
    return s + 0.1 * (i - j)


@pytest.mark.parametrize("grad", [False, True])
def test_the_definition_serves_if_nothing_compiles(monkeypatch, grad):
    fail_in(monkeypatch, "usual")

    def shared_memory(choice):
        raise Failure("no luck")

    monkeypatch.setattr(machine_code, "shared_memory", shared_memory)
    found, messages = kernels(capped, operands(torch.float32, 48), grad=grad)
    assert found == []
    assert len(messages) == 1 + grad and all("no luck" in message for message in messages)


def test_the_definition_serves_if_inductor_fails_after_every_kernel(monkeypatch, compiled):
    fail_in(monkeypatch, "usual", "careful")
    found, (message,) = kernels(capped, operands())
    assert found == []
    assert "Failure: PassManager::run failed." in message


def test_the_first_error_is_raised_if_nothing_helps(monkeypatch, compiled):
    fail_in(monkeypatch, "usual", "careful", "definition")
    with pytest.raises(Exception, match="PassManager::run failed"):
        kernels(capped, operands())


def test_failed_jobs_are_not_waited_for_again(monkeypatch, compiled):
    # If a worker dies, Inductor's jobs of all kernels fail, and it would keep them.
    plain, kept = fake_gpu.GraphLowering.codegen, []

    def codegen(self):
        if fallback._state.stage == "careful":
            kept.append(CompiledTritonKernels.get("text"))
            return plain(self)
        CompiledTritonKernels.save("text", LambdaFuture(dict))
        raise BrokenProcessPool("a worker died")

    monkeypatch.setattr(fake_gpu.GraphLowering, "codegen", codegen)
    assert len(kernels(capped, operands())[0]) == 1
    assert kept == [None]


def test_strict(monkeypatch, compiled):
    monkeypatch.setenv("FLEXHOP_STRICT", "1")
    fail_in(monkeypatch, "usual")
    with pytest.raises(Exception, match="PassManager::run failed"):
        kernels(capped, operands())
    assert compiled == []


def test_a_mistake_of_the_user_is_no_failure(monkeypatch, compiled):
    options = KernelOptions(forward=flexhop.Tile(block_m=1024, block_n=1024), backend="triton")

    def attend(q, k, v):
        return flex_attention(q, k, v, kernel_options=options)

    # The graph itself raises it, when it runs.
    assert kernels(attend, operands()) == ([], [])
    assert compiled == []


def test_a_mask_that_triton_cannot_compile_in_a_branch(monkeypatch):
    # Triton 3.6 and 3.7: "PassManager::run failed" for a table read transposed, in fp32.
    fail_in(monkeypatch, "usual")
    kept = torch.rand(150, 140) > 0.4
    blocks = create_block_mask(lambda b, h, i, j: kept[j, i], None, None, 140, 150, device="cpu")

    def attend(q, k, v):
        return flex_attention(
            q, k, v, block_mask=blocks, kernel_options=KernelOptions(deterministic=True)
        )

    tensors = [torch.randn(1, 2, n, 64, requires_grad=True) for n in (140, 150, 150)]
    found, _ = kernels(attend, tensors, grad=True)
    for kernel in found:
        compile_kernel(kernel, 90)
