"""What a service does: packages compiled ahead of time, masks of long sequences."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flexhop
from flexhop.block_mask.fields import TENSOR_FIELDS
from flexhop.masks import causal, document, prefix_lm, sliding_window

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
LONG = 131072

PACKAGE = """
import sys
import torch
import flexhop
from flexhop.masks import causal

backend, queries, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
shape = lambda length: (2, 4, length, 64)
query = torch.randn(shape(queries), device="cuda", dtype=torch.bfloat16)
key, value = (torch.randn(shape(512), device="cuda", dtype=torch.bfloat16) for _ in range(2))
mask = flexhop.create_block_mask(
    lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 512 - queries, None, None, queries, 512,
    device="cuda",
)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # Named like an argument of score_mod.
        self.register_buffer("h", torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda"))

    def forward(self, query, key, value):
        slopes = self.h
        def score_mod(score, b, h, q_idx, kv_idx):
            return score + slopes[h] * (kv_idx - q_idx)
        options = flexhop.KernelOptions(backend=backend)
        return flexhop.flex_attention(
            query, key, value, score_mod, block_mask=mask, kernel_options=options
        )

with torch.no_grad():
    model = Model()
    program = torch.export.export(model, (query, key, value))
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    found = torch._inductor.aoti_load_package(path)(query, key, value)
    wanted = torch.compile(model, fullgraph=True)(query, key, value)
torch.testing.assert_close(found, wanted, rtol=0, atol=0)
"""


@pytest.mark.parametrize(
    ("backend", "queries"), [("triton", 512), ("auto", 512), ("auto", 1)],
    ids=["portable", "default", "decode"],
)  # fmt: skip
def test_a_package_computes_what_the_compiled_model_does(backend, queries, tmp_path):
    script = tmp_path / "package.py"
    script.write_text(PACKAGE)
    # docs/debugging.md: another copy of the C++ library in the process makes packages crash.
    library = subprocess.run(
        ["g++", "-print-file-name=libstdc++.so.6"], capture_output=True, text=True, check=True
    ).stdout.strip()
    done = subprocess.run(
        [sys.executable, str(script), backend, str(queries), str(tmp_path / "model.pt2")],
        capture_output=True,
        text=True,
        timeout=600,  # 80 s alone, more than 300 s among thirty workers
        env=os.environ | {"LD_PRELOAD": library, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]


ROWS = torch.arange(LONG // 128)
# Per row of blocks: how many blocks of 128 keys are not empty.
MASKS = {
    "causal": (lambda: causal, ROWS + 1),
    "window": (lambda: sliding_window(1024), ROWS.clamp(max=8) + 1),
    "documents": (
        lambda: document(torch.arange(LONG, device="cuda") // 1000),
        (((ROWS * 128 + 127) // 1000 + 1) * 1000 - 1).clamp(max=LONG - 1) // 128
        - ROWS * 128 // 1000 * 1000 // 128
        + 1,
    ),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", MASKS)
def test_masks_of_long_sequences_take_little_memory(kind, compiled):
    """A dense mask of 128k x 128k would be 16 GiB."""
    make, wanted = MASKS[kind]
    mod = make()
    create = torch.compile(flexhop.create_block_mask) if compiled else flexhop.create_block_mask
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mask = create(mod, None, None, LONG, LONG, device="cuda")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 256 * 2**20
    counts = mask.kv_num_blocks[0, 0] + mask.full_kv_num_blocks[0, 0]
    assert counts.cpu().equal(wanted.int())


@pytest.mark.parametrize("length", [2048, 16384, 65536])
@pytest.mark.parametrize("kind", ["causal", "window", "prefix"])
def test_compiled_masks_have_the_lists_of_eager_ones(kind, length):
    """Inductor keeps the fastest of several machine codes, of which some were wrong (16384)."""
    mods = {"causal": causal, "window": sliding_window(1024), "prefix": prefix_lm(700)}
    arguments = (mods[kind], None, None, length, length)
    found = torch.compile(flexhop.create_block_mask)(*arguments, device="cuda")
    expected = flexhop.create_block_mask(*arguments, device="cuda")
    for name in TENSOR_FIELDS:
        ours, eager = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (eager is None), name
        assert ours is None or torch.equal(ours, eager), name
