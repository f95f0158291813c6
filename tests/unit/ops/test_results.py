"""What score_mod returns: numbers of any real dtype, as in PyTorch, and nothing else."""

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.attention import flex_attention as in_tree

import flexhop
from flexhop.errors import ModResultError
from flexhop.offline.interpret import interpret

LENGTH = 16
pytestmark = pytest.mark.filterwarnings("ignore")
NUMBERS = {
    "integers": lambda s, b, h, q, k: (q - k).abs(),
    "int64": lambda s, b, h, q, k: (q - k).long() // 3,
    "uint8": lambda s, b, h, q, k: (q - k).abs().to(torch.uint8),
    "bools": lambda s, b, h, q, k: q >= k,
    "rounded scores": lambda s, b, h, q, k: (4 * s).to(torch.int32),
    "float64": lambda s, b, h, q, k: s.double() * 2,
    "float16": lambda s, b, h, q, k: (q - k).half() / 4,
}
OTHERS = {
    "tuple": lambda s, b, h, q, k: (s,),
    "list": lambda s, b, h, q, k: [s, s],
    "dict": lambda s, b, h, q, k: {"score": s},
    "NoneType": lambda s, b, h, q, k: None,
    "float": lambda s, b, h, q, k: 0.5,
    "int": lambda s, b, h, q, k: 1,
    "bool": lambda s, b, h, q, k: True,
    "str": lambda s, b, h, q, k: "score",
}


def _operands(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(1, 2, LENGTH, 16, dtype=dtype, requires_grad=True) for _ in range(3)]


def _expected(mod, tensors):
    """Plain PyTorch, for positions that broadcast."""
    places = torch.arange(LENGTH, dtype=torch.int32)
    scores = tensors[0] @ tensors[1].mT / 4
    changed = mod(scores, 0, 0, places[:, None], places[None]).to(scores.dtype)
    return changed.expand_as(scores).softmax(-1) @ tensors[2]


def _with_gradients(out, tensors):
    grads = torch.autograd.grad(out.square().sum(), tensors, allow_unused=True)
    zeros = map(torch.zeros_like, tensors)
    return [out, *(z if g is None else g for g, z in zip(grads, zeros, strict=True))]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_converted(name, dtype):
    """Eager, traced, and by PyTorch's definition; the gradient of a score is zero."""
    mod, tensors = NUMBERS[name], _operands(dtype)
    expected = _with_gradients(_expected(mod, tensors), tensors)
    for call in (flexhop.flex_attention, torch.compile(flexhop.flex_attention, backend=aot_eager)):
        found = _with_gradients(call(*tensors, mod), tensors)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if name == "float16":  # in which PyTorch computes the softmax, too
        return
    plain = [tensor.detach() for tensor in tensors]  # it has no gradients on a CPU
    torch.testing.assert_close(
        in_tree.flex_attention(*plain, mod), expected[0].detach(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["integers", "bools", "rounded scores"])
def test_kernels_convert_numbers(name):
    mod, tensors = NUMBERS[name], _operands()
    expected = _with_gradients(_expected(mod, tensors), tensors)
    found = interpret(
        lambda *x: flexhop.flex_attention(*x, mod), *tensors, grad=lambda out: out.square().sum()
    )
    grads = [leaf.grad for leaf in tensors]
    torch.testing.assert_close([found.result, *grads], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_is_no_tensor_is_named(name, is_compiled):
    call = flexhop.flex_attention
    if is_compiled:
        call = torch.compile(call, backend=aot_eager)
    words = f"score_mod '.*' must return a tensor of real numbers, .* an object of type {name}"
    with pytest.raises(ModResultError, match=words):
        call(*_operands(), OTHERS[name])


@pytest.mark.parametrize("is_compiled", [False, True])
def test_complex_numbers_and_rows_are_refused(is_compiled):
    call = flexhop.flex_attention
    if is_compiled:
        call = torch.compile(call, backend=aot_eager)
    with pytest.raises(ModResultError, match=r"a tensor of dtype torch\.complex64"):
        call(*_operands(), lambda s, b, h, q, k: s + 0j)
    with pytest.raises(ModResultError, match="one number per score"):
        call(*_operands(), lambda s, b, h, q, k: (q - k)[None])
