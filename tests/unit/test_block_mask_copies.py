"""A mask asked as if it were a tensor: copies, moves, and copies into a static mask."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

import flexhop
from flexhop.block_mask.fields import TENSOR_FIELDS
from flexhop.compat.mods.held import captured_tensors
from flexhop.errors import BlockMaskFieldError
from flexhop.masks import causal, document


class Shifted:
    """A mask_mod as an object."""

    def __init__(self, offset: Tensor) -> None:
        self.offset = offset

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx + self.offset >= kv_idx

    def keep(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self(b, h, q_idx, kv_idx)


def shifted(offset: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx + offset >= kv_idx


def closure(offset: Tensor) -> Any:
    def inner(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx + offset >= kv_idx

    return inner


MODS = {
    "closure": closure,
    "nested": lambda offset: flexhop.and_masks(causal, closure(offset)),
    "partial": lambda offset: functools.partial(shifted, offset),
    "object": Shifted,
    "method": lambda offset: Shifted(offset).keep,
    "default": lambda offset: lambda b, h, q, k, offset=offset: q + offset >= k,
}


def create(mod: Any, length: int = 300, **options: Any) -> flexhop.BlockMask:
    return flexhop.create_block_mask(mod, None, None, length, length, "cpu", **options)


def test_what_frameworks_ask() -> None:
    mask = create(causal)
    assert isinstance(mask, TorchBlockMask)  # as transformers and torch.distributed ask
    assert (mask.ndim, mask.dim(), mask.size(-1)) == (4, 4, 300)
    assert mask.size() == torch.Size([1, 1, 300, 300])
    assert not mask.is_cuda
    # transposed lists need not be contiguous
    assert mask.contiguous().is_contiguous()
    assert mask.contiguous().contiguous().kv_indices is mask.contiguous().kv_indices
    missing = set(dir(TorchBlockMask)) - set(dir(mask))
    assert missing == set()


@pytest.mark.parametrize("kind", MODS)
def test_copies_share_nothing(kind: str) -> None:
    offset = torch.tensor(3)
    mask = create(MODS[kind](offset))
    for made in (mask.clone(), copy.deepcopy(mask)):
        assert type(made) is flexhop.BlockMask
        assert made.same_structure(mask)
        for name in TENSOR_FIELDS:
            own, other = getattr(mask, name), getattr(made, name)
            assert (own is None) == (other is None)
            assert own is None or own.data_ptr() != other.data_ptr()
        (captured,) = captured_tensors(made.mask_mod)
        offset.fill_(100)
        assert captured.item() == 3
        offset.fill_(3)
        masks = [flexhop.create_mask(m.mask_mod, 1, 1, 9, 9, "cpu") for m in (mask, made)]
        assert torch.equal(*masks)


@pytest.mark.parametrize("kind", MODS)
def test_to_moves_what_was_captured(kind: str) -> None:
    moved = create(MODS[kind](torch.tensor(3))).to("meta", non_blocking=True)
    assert moved.device.type == "meta"
    assert [t.device.type for t in captured_tensors(moved.mask_mod)] == ["meta"]


@pytest.mark.parametrize(
    "target",
    [(torch.float16,), ("cpu", torch.float16), (torch.zeros(1).half(), False, True)],
    ids=["dtype", "device and dtype", "tensor"],
)
def test_to_a_dtype_converts_captured_floats_alone(target: Any) -> None:
    """As nn.Module.to: accelerate and mixed precision call `to` with a dtype."""
    bias, offset = torch.zeros(300), torch.tensor(3)
    mask = create(lambda b, h, q_idx, kv_idx: (bias[kv_idx] >= 0) & (q_idx + offset >= kv_idx))
    made = mask.to(*target)
    assert [t.dtype for t in captured_tensors(made.mask_mod)] == [torch.float16, torch.int64]
    assert made.same_structure(mask) and made.kv_indices.dtype == torch.int32
    same = mask.to(device="cpu", non_blocking=True)
    assert captured_tensors(same.mask_mod)[0] is bias


def test_a_mod_without_tensors_stays_itself() -> None:
    def recursive(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, depth: int = 1) -> Tensor:
        return recursive(b, h, q_idx, kv_idx, depth - 1) if depth else q_idx >= kv_idx

    for mod in (causal, recursive, flexhop.and_masks(causal, recursive)):
        assert create(mod).clone().mask_mod is mod


def test_deepcopy_of_a_module_keeps_what_is_shared() -> None:
    ids = torch.arange(300) // 70
    held = {"mask": create(document(ids)), "ids": ids}
    made = copy.deepcopy(held)
    assert captured_tensors(made["mask"].mask_mod)[0] is made["ids"]


@pytest.mark.parametrize("kind", MODS)
def test_copy_into_a_static_mask(kind: str) -> None:
    static = create(MODS[kind](torch.tensor(0)))
    lists = [id(getattr(static, name)) for name in TENSOR_FIELDS]
    captured = captured_tensors(static.mask_mod)
    source = create(MODS[kind](torch.tensor(140)))
    assert static.copy_(source) is static
    assert static.same_structure(source)
    assert [id(getattr(static, name)) for name in TENSOR_FIELDS] == lists
    assert captured[0].item() == 140
    wanted = flexhop.create_mask(source.mask_mod, 1, 1, 300, 300, "cpu")
    assert torch.equal(flexhop.create_mask(static.mask_mod, 1, 1, 300, 300, "cpu"), wanted)


def test_copy_of_narrower_lists_and_without_full_blocks() -> None:
    static = create(causal)
    plain = create(causal, separate_full_blocks=False)
    assert plain.full_kv_indices is None
    static.copy_(plain)
    assert static.num_full_blocks() == 0
    assert torch.equal(static.to_dense(), plain.to_dense())
    narrow = create(causal)
    narrow.kv_indices = narrow.kv_indices[..., :2]
    narrow.kv_num_blocks = narrow.kv_num_blocks.clamp(max=2)
    static.copy_(narrow)
    assert torch.equal(static.kv_num_blocks, narrow.kv_num_blocks)


@pytest.mark.parametrize(
    ("source", "field"),
    [
        (lambda: create(causal, 299), "seq_lengths"),
        (lambda: create(causal, BLOCK_SIZE=64), "BLOCK_SIZE"),
        (lambda: create(closure(torch.tensor(1))), "mask_mod"),
        (lambda: flexhop.create_block_mask(causal, 2, None, 300, 300, "cpu"), "kv_num_blocks"),
        (lambda: create(causal, compute_q_blocks=False), "q_num_blocks"),
    ],
)
def test_copy_refuses_what_does_not_fit(source: Any, field: str) -> None:
    static = create(causal)
    before = static.kv_num_blocks.clone()
    with pytest.raises(BlockMaskFieldError, match=field):
        static.copy_(source())
    assert torch.equal(static.kv_num_blocks, before)


def test_copy_of_a_mask_shares_its_tensors():
    """Also if its function cannot be pickled."""
    mask = flexhop.create_block_mask(lambda b, h, q, k: q >= k, None, None, 300, 300, "cpu")
    made = copy.copy(mask)
    assert made.kv_indices is mask.kv_indices
    assert made.mask_mod is mask.mask_mod
    made.mask_mod = flexhop.noop_mask
    assert mask.mask_mod is not flexhop.noop_mask
