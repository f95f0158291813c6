"""Names that users import and pickle keep working when files move."""

import importlib
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import flexhop
from flexhop.compat.compilation import source_fingerprint
from flexhop.compat.operators.hop import Operator

DATA = Path(__file__).resolve().parents[1] / "data"
PACKAGE = Path(flexhop.__file__).parent
# Public modules, with the public names that version 0.1 had in them.
PUBLIC = {
    "flexhop": flexhop.__all__,
    "flexhop.block_mask": ["BlockMask"],
    "flexhop.errors": ["FlexhopError", "RankError", "EagerWarning", "FlexhopWarning"],
    "flexhop.flash": [
        "flash_attn_func",
        "flash_attn_kvpacked_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func",
        "flash_attn_varlen_kvpacked_func",
        "flash_attn_varlen_qkvpacked_func",
        "flash_attn_with_kvcache",
    ],
    "flexhop.masks": ["causal", "sliding_window", "prefix_lm", "document", "padding", "natten_2d"],
    "flexhop.mods": [
        *("ScoreMod", "MaskMod", "KeyMod", "noop_score", "noop_mask", "noop_key", "dequantize"),
        *("and_masks", "or_masks", "alibi", "alibi_slopes", "softcap", "relative_bias"),
        *("t5_buckets", "head_bias", "key_bias", "tanh_approx"),
    ],
    "flexhop.offline": ["generate"],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_there(module: str):
    found = importlib.import_module(module)
    assert [name for name in PUBLIC[module] if not hasattr(found, name)] == []


def test_a_mask_that_version_0_1_pickled_loads():
    mask = pickle.loads((DATA / "block_mask_0.1.pickle").read_bytes())
    causal = flexhop.masks.causal
    expected = flexhop.create_block_mask(causal, 1, 1, 256, 256, device="cpu")
    assert isinstance(mask, flexhop.BlockMask)
    assert mask.mask_mod is causal
    assert torch.equal(mask.to_dense(), expected.to_dense())


def test_pickles_name_the_public_module():
    assert flexhop.BlockMask.__module__ == "flexhop.block_mask"


def test_an_edit_of_any_source_changes_the_key_of_compiled_graphs(tmp_path: Path):
    """Templates in folders, and helpers of the definition, which CPU graphs contain, included."""
    copy = tmp_path / "flexhop"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    compute = source_fingerprint.__wrapped__
    keys = {before := compute(copy)}
    sources = [
        p for p in sorted(copy.rglob("*")) if p.is_file() and p.suffix not in (".md", ".typed", "")
    ]
    assert {".py", ".jinja", ".h"} <= {path.suffix for path in sources}
    for path in sources:
        text = path.read_bytes()
        path.write_bytes(text + b"\n# edited\n")
        keys.add(compute(copy))
        path.write_bytes(text)
    assert len(keys) == len(sources) + 1
    assert compute(copy) == before == source_fingerprint()


def test_every_operator_in_a_graph_holds_the_key():
    """In Dynamo's graphs and in those that reach a compiler: both have caches."""
    found: dict[str, set[bool]] = {}

    def look(graph, _):
        for module in graph.modules():
            for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                if isinstance(node.target, Operator):
                    holds = source_fingerprint() in torch.utils._pytree.tree_leaves(node.args)
                    found.setdefault(node.target.name(), set()).add(holds)
        return make_boxed_func(graph.forward)

    def backend(graph, inputs):
        look(graph, inputs)
        return aot_autograd(fw_compiler=look, bw_compiler=look)(graph, inputs)

    @torch.compile(fullgraph=True, backend=backend)
    def step(query, table):
        def hashed(b, h, q_idx, kv_idx):
            return table[(q_idx * 7 + kv_idx * 5) % 11] > q_idx % 3

        mask = flexhop.create_block_mask(hashed, 1, 1, 64, 64, "cpu", 16)
        return flexhop.flex_attention(query, query, query, block_mask=mask).sum()

    torch._dynamo.reset()
    step(torch.randn(1, 1, 64, 16, requires_grad=True), torch.arange(11) % 4).backward()
    names = ("attention", "attention_backward", "block_lists", "unknown_blocks")
    assert found == {f"flexhop_{name}": {True} for name in names}
