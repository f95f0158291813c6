"""flexhop.nn: the module against PyTorch's own, with a cache, compiled; and masks in modules."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexhop
from flexhop import masks
from flexhop.compat.mods.held import captured_tensors
from flexhop.errors import ModArgumentError, RankError
from flexhop.nn import Attention, Cache, HeldMask
from flexhop.nn.attention import rotate

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
F64: dict[str, Any] = {"dtype": torch.float64}


def blocks(mask_mod: Any, queries: int, keys: int) -> flexhop.BlockMask:
    return flexhop.create_block_mask(mask_mod, None, None, queries, keys, "cpu")


def test_as_multi_head_attention() -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(48, 4, batch_first=True, **F64)
    ours = Attention(48, 4, bias=True, **F64)
    parts = zip((ours.query, ours.key, ours.value), theirs.in_proj_weight.chunk(3), strict=True)
    for linear, weight in parts:
        linear.weight.data.copy_(weight)
        linear.bias.data.zero_()
    ours.out.load_state_dict(theirs.out_proj.state_dict())
    hidden, context = torch.randn(2, 19, 48, **F64), torch.randn(2, 23, 48, **F64)
    wanted, _ = theirs(hidden, context, context, need_weights=False)
    torch.testing.assert_close(ours(hidden, context), wanted)
    hides = torch.ones(19, 19, dtype=torch.bool).triu(1)
    wanted, _ = theirs(hidden, hidden, hidden, attn_mask=hides, need_weights=False)
    found = ours(hidden, block_mask=blocks(masks.causal, 19, 19))
    torch.testing.assert_close(found, wanted)


def everything() -> Attention:
    torch.manual_seed(0)
    made = Attention(40, 6, 2, 8, rotary_base=100.0, qk_norm=True, sinks=True, dropout=0.5, **F64)
    assert made.sinks is not None
    made.sinks.data.normal_()
    return made.eval()


def by_hand(module: Attention, hidden: Tensor) -> Tensor:
    """The same with loops over heads, and turns of complex numbers."""
    tokens = hidden.size(1)
    angle = torch.arange(tokens)[:, None] * 100.0 ** -(torch.arange(4, **F64) / 4)
    turn = torch.polar(torch.ones_like(angle), angle)

    def turned(rows: Tensor, norm: Any) -> Tensor:
        rows = norm(rows)
        pairs = torch.complex(rows[..., :4], rows[..., 4:]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    parts = []
    for head in range(6):
        own, shared = slice(8 * head, 8 * head + 8), slice(8 * (head // 3), 8 * (head // 3) + 8)
        q = module.query(hidden)[..., own]
        k, v = module.key(hidden)[..., shared], module.value(hidden)[..., shared]
        scores = turned(q, module.query_norm) @ turned(k, module.key_norm).mT / 8**0.5
        scores = scores.masked_fill(~visible, -torch.inf)
        sink = module.sinks[head].expand(*scores.shape[:-1], 1)
        parts.append(torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v)
    return module.out(torch.cat(parts, -1))


def test_grouped_rotated_normalized_with_sinks() -> None:
    module = everything()
    hidden = torch.randn(2, 21, 40, requires_grad=True, **F64)
    found = module(hidden, block_mask=blocks(masks.causal, 21, 21))
    torch.testing.assert_close(found, by_hand(module, hidden))
    found.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
    module.train()
    dropped = module(hidden, block_mask=blocks(masks.causal, 21, 21))
    assert not torch.allclose(dropped, found)


@pytest.mark.parametrize("steps", [(21,), (9, 5, 1, 1, 5)])
def test_with_a_cache(steps: tuple[int, ...]) -> None:
    module = everything()
    hidden = torch.randn(2, 21, 40, **F64)
    wanted = module(hidden, block_mask=blocks(masks.causal, 21, 21))
    cache = Cache(2, 2, 30, 8, **F64)
    with torch.no_grad():
        for again in range(2):
            found = []
            for part in hidden.split(steps, dim=1):
                mask = blocks(masks.causal_with_offset(cache.length), part.size(1), 30)
                found.append(module(part, block_mask=mask, cache=cache))
                cache.advance(part.size(1))
            torch.testing.assert_close(torch.cat(found, 1), wanted, msg=f"time {again}")
            cache.clear()


def test_positions_of_packed_documents() -> None:
    module = everything()
    parts = [torch.randn(1, n, 40, **F64) for n in (5, 9)]
    wanted = [module(p, block_mask=blocks(masks.causal, p.size(1), p.size(1))) for p in parts]
    ids = torch.tensor([0] * 5 + [1] * 9)
    positions = torch.cat([torch.arange(5), torch.arange(9)])
    packed = blocks(masks.packed_causal(ids), 14, 14)
    for rows in (positions, positions[None]):
        found = module(torch.cat(parts, 1), positions=rows, block_mask=packed)
        torch.testing.assert_close(found, torch.cat(wanted, 1))
    torch.testing.assert_close(
        rotate(torch.ones(1, 1, 1, 8), torch.zeros(1), 10.0), torch.ones(1, 1, 1, 8)
    )


def test_in_one_graph() -> None:
    module = everything()
    hidden = torch.randn(2, 21, 40, **F64)
    mask = blocks(masks.causal, 21, 21)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden, block_mask=mask), module(hidden, block_mask=mask))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"heads": 4, "kv_heads": 3}, "kv_heads"),
        ({"heads": 5}, "divisor of the width 48"),
        ({"heads": 2, "head_dim": 7, "rotary_base": 10.0}, "even"),
        ({"heads": 0}, "heads is 0, but must be at least 1"),
        ({"heads": 4, "head_dim": 0}, "head_dim is 0"),
        ({"heads": 4, "rotary_base": -1.0}, "rotary_base is -1.0, but must be positive"),
    ],
)
def test_sizes_that_do_not_fit(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ModArgumentError, match=words):
        Attention(48, **arguments)


def test_one_sequence_needs_a_batch() -> None:
    with pytest.raises(RankError, match="query must have 4 dimensions, but has 3"):
        Attention(48, 4, rotary_base=10.0)(torch.randn(9, 48))


def test_masks_move_with_their_module() -> None:
    ids = torch.arange(40) // 9
    module = nn.ModuleDict({"mask": HeldMask(blocks(masks.packed_causal(ids), 40, 40))})
    assert module.state_dict() == {}
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert made["mask"]().same_structure(module["mask"]())
    module.half()  # numbers of blocks are no floating point numbers
    assert module["mask"]().kv_indices.dtype == torch.int32
    moved = module.to("meta")["mask"]()
    assert moved.device.type == "meta"
    assert {t.device.type for t in captured_tensors(moved.mask_mod)} == {"meta"}
