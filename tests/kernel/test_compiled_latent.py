"""The Hopper kernel of latent attention compiles as it must, on a machine without a GPU."""

import pytest
import torch

import flexhop
from flexhop.lowering.hopper import latent
from flexhop.offline import generate_code
from flexhop.offline.cubin import Cubin, compile_kernel, product_notes
from tests.needs import needs_hopper
from tests.problems import problem

HEADS, KEYS = 128, 1024


def compiled(queries: int, score_mod=None, block_mask=None, page: int = 0) -> Cubin:
    """The kernel of a step; with a page size, from pages."""
    query = torch.zeros(2, HEADS, queries, 576, dtype=torch.bfloat16)
    rows = (2 * KEYS // page, 1, page) if page else (2, 1, KEYS)
    cache = torch.zeros(*rows, 576, dtype=torch.bfloat16)
    tables = torch.zeros(2, KEYS // (page or KEYS), dtype=torch.int32)
    lengths = torch.full((2,), KEYS, dtype=torch.int32)
    slopes = torch.zeros(HEADS)

    def attend(query, cache, tables, lengths, slopes):
        made = score_mod and (lambda *call: score_mod(*call) * slopes[call[2]])
        table = flexhop.PageTable(tables, page, lengths) if page else None
        return flexhop.flex_attention(
            query, cache, cache[..., :512], made, block_mask, enable_gqa=True, page_table=table
        )

    generated = generate_code(attend, query, cache, tables, lengths, slopes, capability=(9, 0))
    return compile_kernel(generated.kernel_with("attend_steps"), 90)


@needs_hopper
@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "mods", "pages"])
def test_a_step(case):
    """No spills, no products that wait for each other, and shared memory as it is foretold."""
    if case == "mods":
        causal = flexhop.create_block_mask(
            lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + KEYS - 4, None, None, 4, KEYS, "cpu"
        )
        cubin = compiled(4, lambda s, b, h, q, k: s + 20 * torch.tanh(s / 20), causal)
    else:
        cubin = compiled(1, page=64 if case == "pages" else 0)
    call = problem(
        head_dim=576, value_head_dim=512, value_is_key=True, query_heads=HEADS, kv_heads=1
    )
    assert cubin.wgmma > 0
    assert cubin.spills == 0
    assert product_notes(cubin) == []
    assert cubin.shared <= latent.shared_memory(call) <= call.device.shared_memory
