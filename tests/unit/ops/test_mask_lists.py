"""Block lists with fewer heads than query, or without batch and head."""

import pytest
import torch

import flexhop

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def by_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 40 * (h % 2 + 1))


def _of_keys():
    """For grouped heads, as a cache of PyTorch's users has it: one list for each head of keys."""
    return flexhop.create_block_mask(by_head, 2, 2, 256, 256, "cpu", BLOCK_SIZE=64)


def _without(dimensions):
    """The lists of the last dimensions alone."""
    mask = flexhop.create_block_mask(causal, None, 2, 256, 256, "cpu", BLOCK_SIZE=64)
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    lists = [getattr(mask, name)[(0,) * dimensions] for name in names]
    return flexhop.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=64, mask_mod=causal)


@pytest.mark.parametrize("way", ["eager", "kernels", "aot_eager"])
@pytest.mark.parametrize("lists", ["of keys", "without batch", "without head"])
def test_results_are_those_of_all_heads(lists, way):
    """Without batch or head, compiled results were silently wrong."""
    mask = _of_keys() if lists == "of keys" else _without(1 + (lists == "without head"))
    mod = by_head if lists == "of keys" else causal
    torch.manual_seed(0)
    sizes = ((2, 4, 256, 16), (2, 2, 256, 16), (2, 2, 256, 16))
    inputs = [torch.randn(*size).requires_grad_() for size in sizes]
    whole = flexhop.create_block_mask(mod, 2, 4, 256, 256, "cpu")

    def run(attend, block_mask):
        out = attend(*inputs, block_mask=block_mask, enable_gqa=True)
        return (out, *torch.autograd.grad(out.square().sum(), inputs))

    wanted = run(flexhop.flex_attention, whole)
    attend = flexhop.flex_attention
    if way == "aot_eager":
        attend = torch.compile(attend, backend=way, fullgraph=True)
    with flexhop.eager_kernels(way == "kernels"):
        for _ in range(2):  # the second call repeats the first
            torch.testing.assert_close(run(attend, mask), wanted, rtol=1e-4, atol=1e-4)


def test_a_number_of_heads_that_does_not_divide_is_refused():
    mask = flexhop.create_block_mask(causal, None, 3, 64, 64, "cpu")
    inputs = [torch.randn(1, 4, 64, 16) for _ in range(3)]
    with pytest.raises(flexhop.errors.BlockMaskHeadsError, match=r"3 heads; .* divide .* 4"):
        flexhop.flex_attention(*inputs, block_mask=mask)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 3])
def test_a_query_of_another_rank_is_refused(dim, is_masked):
    mask = flexhop.create_block_mask(causal, None, 2, 64, 64, "cpu") if is_masked else None
    query = torch.zeros((4, 64, 16)[:dim])
    with pytest.raises(flexhop.errors.RankError, match=f"must have 4 dimensions, but has {dim}"):
        flexhop.flex_attention(query, query, query, block_mask=mask)
