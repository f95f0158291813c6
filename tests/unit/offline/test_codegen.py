import pytest
import torch
import torch.nn.functional as F

import flexhop
from flexhop.compat.offline.fake_gpu import GPUS, fake_gpu
from flexhop.offline import generate, generate_code, generate_codes


def _layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.gelu(x), x.shape[-1:], weight).relu()


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 40, requires_grad=True), torch.randn(40, requires_grad=True)


def test_forward_only_has_no_backward_code():
    generated = generate(lambda x: x.sin() + 1, torch.ones(8))
    assert generated.backward is None
    assert [kernel.kind for kernel in generated.kernels] == ["pointwise"]
    torch.testing.assert_close(generated.result, torch.ones(8).sin() + 1)


def test_gradients_are_those_of_the_cpu():
    x, weight = _inputs()
    generated = generate(_layer, x, weight, grad=lambda out: out.square().sum())
    assert generated.backward is not None
    x2, weight2 = _inputs()
    _layer(x2, weight2).square().sum().backward()
    torch.testing.assert_close(x.grad, x2.grad)
    torch.testing.assert_close(weight.grad, weight2.grad)


def test_code_is_the_same_every_time():
    first = generate(_layer, *_inputs(), grad=True)
    second = generate(_layer, *_inputs(), grad=True)
    assert (first.forward, first.backward) == (second.forward, second.backward)


def test_kernel_facts_and_text():
    (kernel,) = generate(lambda x: (x + 1).sum(-1), torch.ones(8, 40)).kernels
    assert kernel.kind == "persistent_reduction"
    assert kernel.parameters == ["in_ptr0", "out_ptr0", "xnumel", "r0_numel"]
    assert kernel.constexprs == ["XBLOCK"]
    assert kernel.meta["signature"]["in_ptr0"] == "*fp32"
    assert kernel.size_hints == {"x": 8, "r0_": 64}
    text = kernel.text()
    assert text.startswith("@triton.jit\ndef triton_per")
    assert "triton_meta" not in text
    assert kernel.function_text(kernel.name) == text
    with pytest.raises(KeyError, match="no function score_mod"):
        kernel.function_text("score_mod")


def test_kernel_is_found_by_part_of_its_name():
    generated = generate(_layer, *_inputs(), grad=True)
    names = [kernel.name for kernel in generated.kernels]
    assert generated.kernel(names[-1][-6:]).name == names[-1]
    with pytest.raises(LookupError, match="0 kernels have 'attention' in their names"):
        generated.kernel("attention")


def test_dynamic_shapes_become_arguments():
    (kernel,) = generate(lambda x: x.exp(), torch.ones(7, 9), dynamic=True).kernels
    assert "xnumel = " not in kernel.text()


@pytest.mark.parametrize("capability", GPUS)
def test_each_gpu_is_what_inductor_sees(capability):
    (kernel,) = generate(lambda x: x.exp(), torch.ones(64), capability=capability).kernels
    assert kernel.meta["device"]["cc"] == capability[0] * 10 + capability[1]
    assert kernel.meta["device"]["multi_processor_count"] == GPUS[capability].multiprocessors


def test_fake_gpu_leaves_no_trace():
    before = torch.cuda.is_available(), torch.cuda.device_count(), torch.version.cuda
    with fake_gpu((8, 9)) as gpu:
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == (8, 9)
        properties = torch.cuda.get_device_properties(0)
        assert properties.shared_memory_per_block_optin == gpu.shared_memory == 101376
    assert before == (torch.cuda.is_available(), torch.cuda.device_count(), torch.version.cuda)


def test_unknown_gpu_is_refused():
    message = r"capability must be one of .*, but is \(7, 0\)"
    with pytest.raises(ValueError, match=message), fake_gpu((7, 0)):
        pass


def test_a_number_that_the_function_makes_a_tensor_of():
    generated = generate(lambda x: torch.maximum(x, torch.tensor(0.5)), torch.zeros(8))
    torch.testing.assert_close(generated.result, torch.full((8,), 0.5))


def test_several_gpus_get_what_each_gets_alone():
    """Graphs are traced once. What is known of one GPU, such as tiles, must not reach the next."""

    def attend(x, weight):
        kernel_options = {"backend": "triton"}
        return flexhop.flex_attention(_layer(x, weight), x, x, kernel_options=kernel_options)

    x, weight = torch.zeros(1, 1, 130, 256), torch.ones(256)
    capabilities = [(8, 0), (12, 0)]
    found = generate_codes(attend, x, weight, capabilities=capabilities)
    for capability, together in zip(capabilities, found, strict=True):
        alone = generate_code(attend, x, weight, capability=capability)
        assert together.forward == alone.forward
    tiles = [[kernel.constants["BLOCK_N"] for kernel in one.templates] for one in found]
    assert tiles[0] != tiles[1]
