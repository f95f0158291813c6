"""Names that users import and pickle keep working when files move."""

import importlib
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import flexhop
from flexhop.ops.fingerprint import source_fingerprint

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
