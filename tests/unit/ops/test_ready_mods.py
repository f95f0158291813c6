"""Derivatives of every ready mod and mask, numerically: gradcheck in both modes and both orders.

Public mods are discovered, so one without an example here is an error. Values of mods are tested
in test_mods.py and test_masks.py; rules for derivatives in test_derivatives.py.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flexhop import AuxRequest, create_block_mask, flex_attention, masks, mods
from flexhop.ops import dispatch
from flexhop.ops.uncompiled import calls as eager_calls
from tests.unit.ops.support import quiet

pytestmark = [
    quiet,
    # Gradients of some mods meet PyTorch's own batching rules, some of which say they are slow.
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    # Dynamo looks at .grad of captured tensors that are no leaves.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
B, H, S, D = 2, 2, 4, 2


class Example(NamedTuple):
    """A mod made from learned tensors: `make` gets one leaf of each of `shapes`."""

    make: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ()


def fixed(mod: Any) -> Example:
    """A mod that learns nothing."""
    return Example(lambda: mod)


LENGTHS = torch.tensor([3, 1])
IDS = torch.tensor([0, 0, 1, 1])
BATCH_IDS = torch.tensor([[0, 1, 1, 2], [0, 0, 0, 1]])
CHOSEN = torch.tensor([True, False, False, True])
BATCH_CHOSEN = torch.tensor([[True, False, False, False], [False, True, False, True]])

# By function, so that a public name without an example is found; by what differs in it.
SCORES: dict[Any, dict[str, Example]] = {
    mods.noop_score: {"": fixed(mods.noop_score)},
    mods.alibi: {"": Example(mods.alibi, ((H,),))},
    mods.softcap: {
        "": fixed(mods.softcap(0.7)),
        "approximate": fixed(mods.softcap(0.7, approximate=True)),
    },
    mods.relative_bias: {
        "": Example(mods.relative_bias, ((5,),)),
        "per head": Example(mods.relative_bias, ((H, 2 * S - 1),)),
        "t5": Example(
            lambda weight: mods.relative_bias(weight[mods.t5_buckets(4, 4)].T), ((4, H),)
        ),
    },
    mods.head_bias: {"": Example(mods.head_bias, ((H,),))},
    mods.key_bias: {
        "": Example(mods.key_bias, ((S,),)),
        "per batch": Example(mods.key_bias, ((B, S),)),
    },
}
MASKS: dict[Any, dict[str, Example]] = {
    mods.noop_mask: {"": fixed(mods.noop_mask)},
    mods.and_masks: {"": fixed(mods.and_masks(masks.causal, masks.sliding_window(2, True)))},
    mods.or_masks: {"": fixed(mods.or_masks(masks.sliding_window(1), masks.prefix_lm(1)))},
    masks.causal: {"": fixed(masks.causal)},
    masks.causal_with_offset: {
        "": fixed(masks.causal_with_offset(1)),
        "tensor": fixed(masks.causal_with_offset(torch.tensor(1))),
        "rows that see nothing": fixed(masks.causal_with_offset(torch.tensor([-2, 1]))),
    },
    masks.sliding_window: {
        "": fixed(masks.sliding_window(2)),
        "bidirectional": fixed(masks.sliding_window(2, bidirectional=True)),
    },
    masks.dilated_sliding_window: {"": fixed(masks.dilated_sliding_window(2, 2))},
    masks.prefix_lm: {
        "": fixed(masks.prefix_lm(2)),
        "per batch": fixed(masks.prefix_lm(LENGTHS)),
    },
    masks.padding: {"": fixed(masks.padding(LENGTHS))},
    masks.global_tokens: {
        "": fixed(mods.or_masks(masks.sliding_window(1), masks.global_tokens(1))),
        "chosen": fixed(masks.global_tokens(CHOSEN)),
        "per batch": fixed(masks.global_tokens(BATCH_CHOSEN)),
    },
    masks.document: {
        "": fixed(masks.document(IDS)),
        "per batch": fixed(masks.document(BATCH_IDS)),
        "rows that see nothing": fixed(masks.document(BATCH_IDS, BATCH_IDS + 1)),
    },
    masks.packed_causal: {"": fixed(masks.packed_causal(BATCH_IDS))},
    masks.natten_2d: {"": fixed(masks.natten_2d(2, 2, 1, 2))},
}
# Public functions of the two modules that are no mods of attention.
OTHERS = {
    mods.alibi_slopes,
    mods.t5_buckets,
    mods.tanh_approx,
    mods.check_arity,
    mods.check_mask_result,
    mods.check_score_result,
    mods.is_score_mod,
    mods.dequantize,  # reads a cache, which has no gradients
    mods.noop_key,
    masks.ids_from_lengths,
    masks.ids_from_offsets,
}


def public_functions(module: ModuleType) -> set[Any]:
    """Functions that a module or its submodules define under public names."""
    return {
        value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and inspect.isfunction(value)
        and value.__module__.startswith(module.__name__)
    }


def test_every_public_mod_has_an_example():
    public = public_functions(mods) | public_functions(masks)
    assert public == {*SCORES, *MASKS, *OTHERS}


def cases() -> list[Any]:
    return [
        pytest.param(kind, example, id=" ".join(filter(None, (function.__name__, name))))
        for kind, ready in (("score", SCORES), ("mask", MASKS))
        for function, examples in ready.items()
        for name, example in examples.items()
    ]


def attend(kind: str, make: Any, query: Tensor, key: Tensor, value: Tensor, *learned: Tensor):
    """Output and log-sum-exps, 0 for a query that sees nothing: -inf has no differences."""
    mod = make(*learned)
    block_mask = None
    if kind == "mask":
        block_mask = create_block_mask(mod, B, H, S, S, device="cpu", BLOCK_SIZE=16)
    out, aux = flex_attention(
        query, key, value, mod if kind == "score" else None, block_mask,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, torch.where(aux.lse > -torch.inf, aux.lse, 0.0)


@pytest.mark.parametrize("runs", ["uncompiled", "operator"])
@pytest.mark.parametrize(("kind", "example"), cases())
def test_derivatives_are_those_of_differences(
    kind: str, example: Example, runs: str, monkeypatch: pytest.MonkeyPatch
):
    """By PyTorch's rules for the definition, and by those of the operator and its derivatives."""
    if runs == "operator":  # as under selective checkpointing, which keeps results of operators
        monkeypatch.setattr(dispatch, "has_checkpoint_policy", lambda: True)
        monkeypatch.setattr(eager_calls, "is_bare", lambda tensors: False)
    # One vector of all inputs, and one of all results: fast mode looks along random directions.
    shapes = [*[(B, H, S, D)] * 3, *example.shapes]
    sizes = [math.prod(shape) for shape in shapes]

    def function(whole: Tensor) -> Tensor:
        parts = [t.reshape(n) for t, n in zip(whole.split(sizes), shapes, strict=True)]
        return torch.cat([result.flatten() for result in attend(kind, example.make, *parts)])

    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(sum(sizes), dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(function, whole, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, whole, check_fwd_over_rev=True, fast_mode=True)
