"""The front door: mistakes surface as our classes, eager and compiled; statistics on request."""

import pytest
import torch

import flexhop
from flexhop import errors
from flexhop.masks import causal
from flexhop.options import FlexKernelOptions

pytestmark = pytest.mark.filterwarnings(
    "ignore::flexhop.errors.EagerWarning", "ignore::flexhop.errors.ReturnLseDeprecationWarning"
)


def operands(length: int = 64):
    return tuple(torch.randn(1, 2, length, 16) for _ in range(3))


def mistaken_calls():
    mask = flexhop.create_block_mask(causal, None, None, 64, 64, BLOCK_SIZE=32, device="cpu")
    return {
        "sliced": (errors.SlicedMaskModError, {"block_mask": mask[:, :, 0]}),
        "text": (errors.BlockMaskTypeError, {"block_mask": "causal"}),
        "dense": (errors.BlockMaskTypeError, {"block_mask": torch.ones(64, 64)}),
        "twice": (
            errors.AuxConflictError,
            {"return_lse": True, "return_aux": flexhop.AuxRequest(lse=True)},
        ),
        "option": (errors.UnknownOptionError, {"kernel_options": {"BLOK_M": 64}}),
    }


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
@pytest.mark.parametrize("name", mistaken_calls())
def test_mistakes_raise_our_classes(name: str, compiled: bool):
    kind, keywords = mistaken_calls()[name]
    attend = flexhop.flex_attention
    if compiled:
        attend = torch.compile(attend, fullgraph=True, backend="eager")
    query, key, value = operands()
    with pytest.raises(kind):
        attend(query[:, :, :32] if name == "sliced" else query, key, value, **keywords)


def test_a_sliced_mask_with_a_new_mask_mod_works():
    mask = flexhop.create_block_mask(causal, None, None, 64, 64, BLOCK_SIZE=32, device="cpu")
    second = mask[:, :, 1]
    second.mask_mod = lambda b, h, q_idx, kv_idx: causal(b, h, q_idx + 32, kv_idx)
    query, key, value = operands()
    whole = flexhop.flex_attention(query, key, value, block_mask=mask)
    part = flexhop.flex_attention(query[:, :, 32:], key, value, block_mask=second)
    torch.testing.assert_close(part, whole[:, :, 32:])


def test_kernel_options_keys_are_those_of_pytorch():
    from torch.nn.attention.flex_attention import FlexKernelOptions as Theirs

    ours = set(FlexKernelOptions.__annotations__)
    assert set(Theirs.__annotations__) <= ours
    assert {"FLOAT32_PRECISION"} == ours - set(Theirs.__annotations__)
