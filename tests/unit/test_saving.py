"""Ready mods and block masks are pickled, copied and saved, also for weights_only readers."""

import copy
import functools
import io
import pickle
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

import flexhop
from flexhop import masks, mods
from flexhop.errors import UnsupportedFeatureError

IDS = torch.arange(40) // 13
READY_MASKS: dict[str, Any] = {
    "causal": masks.causal,
    "noop": flexhop.noop_mask,
    "offset": masks.causal_with_offset(3),
    "offset tensor": masks.causal_with_offset(torch.tensor([3, 5])),
    "window": masks.sliding_window(7),
    "dilated": masks.dilated_sliding_window(4, 3, bidirectional=True),
    "prefix": masks.prefix_lm(torch.tensor(9)),
    "padding": masks.padding(torch.tensor([30, 11])),
    "global": masks.global_tokens(4),
    "global tensor": masks.global_tokens(IDS == 1),
    "document": masks.document(IDS),
    "packed": masks.packed_causal(IDS),
    "natten": masks.natten_2d(5, 8, 3, 3),
    "and, or": flexhop.or_masks(
        flexhop.and_masks(masks.causal, masks.document(IDS)), masks.sliding_window(3)
    ),
}
READY_MODS: dict[str, Any] = {
    "alibi": mods.alibi(torch.rand(2)),
    "softcap": mods.softcap(5.0),
    "softcap, approximate": mods.softcap(5.0, approximate=True),
    "relative": mods.relative_bias(torch.randn(2, 79)),
    "head": mods.head_bias(torch.rand(2)),
    "key": mods.key_bias(torch.rand(40)),
}


def again(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def visible(mask_mod: Any) -> Tensor:
    return flexhop.create_mask(mask_mod, 2, 2, 40, 40, "cpu")


@pytest.mark.parametrize("way", [again, copy.deepcopy])
@pytest.mark.parametrize("name", READY_MASKS)
def test_ready_masks(name: str, way: Any) -> None:
    assert torch.equal(visible(way(READY_MASKS[name])), visible(READY_MASKS[name]))


@pytest.mark.parametrize("way", [again, copy.deepcopy])
@pytest.mark.parametrize("name", READY_MODS)
def test_ready_score_mods(name: str, way: Any) -> None:
    b, h, q_idx, kv_idx = (torch.tensor(n) for n in (0, 1, 30, 12))
    score = torch.tensor(2.5)
    wanted = READY_MODS[name](score, b, h, q_idx, kv_idx)
    assert torch.equal(way(READY_MODS[name])(score, b, h, q_idx, kv_idx), wanted)


@pytest.mark.parametrize("way", [again, copy.deepcopy, saved])
@pytest.mark.parametrize("name", READY_MASKS)
def test_block_masks_of_ready_masks(name: str, way: Any) -> None:
    mask = flexhop.create_block_mask(READY_MASKS[name], 2, None, 40, 40, "cpu", BLOCK_SIZE=16)
    mask.__dict__["_note"] = (lambda: 0).__code__  # what others note down on it stays here
    made = way(mask)
    assert type(made) is flexhop.BlockMask
    assert made.same_structure(mask)
    assert torch.equal(visible(made.mask_mod), visible(mask.mask_mod))
    assert made.seq_lengths == (40, 40)
    if way is not copy.deepcopy:
        assert "_note" not in made.__dict__


def of_this_module(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx - kv_idx < 5


def test_users_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("somewhere")
    module.mine = of_this_module  # type: ignore[attr-defined]
    monkeypatch.setattr(of_this_module, "__module__", "somewhere")
    monkeypatch.setattr(of_this_module, "__qualname__", "mine")
    monkeypatch.setitem(sys.modules, "somewhere", module)
    mixed = flexhop.and_masks(masks.causal, of_this_module)
    for mask_mod in (of_this_module, mixed):
        mask = flexhop.create_block_mask(mask_mod, None, None, 40, 40, "cpu")
        for way in (again, saved, copy.deepcopy):
            assert torch.equal(visible(way(mask).mask_mod), visible(mask_mod))
    file = io.BytesIO()
    torch.save(mask, file)
    monkeypatch.delitem(sys.modules, "somewhere")
    for weights_only in (True, False):
        file.seek(0)
        with pytest.raises(UnsupportedFeatureError, match="Import somewhere before loading"):
            torch.load(file, weights_only=weights_only)


@pytest.mark.parametrize("way", [again, saved])
def test_a_function_inside_a_function_says_what_to_do(way: Any) -> None:
    mask = flexhop.create_block_mask(lambda b, h, q, k: q >= k, None, None, 40, 40, "cpu")
    with pytest.raises(UnsupportedFeatureError, match=r"at module level.*from_state_dict"):
        way(mask)


def test_strangers_files_call_no_functions_with_their_arguments() -> None:
    from flexhop.block_mask.saving import from_data

    with pytest.raises(UnsupportedFeatureError, match="ready"):
        from_data(["ready", "subprocess", "run", ["value", "touch /tmp/it"]])


def test_partials_of_users_are_pickled() -> None:
    mask = flexhop.create_block_mask(
        functools.partial(masks._causal_offset_mask, 4), None, None, 40, 40, "cpu"
    )
    assert torch.equal(visible(saved(mask).mask_mod), visible(mask.mask_mod))
