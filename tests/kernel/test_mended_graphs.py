"""Inductor's own kernels of graphs with flexhop's operators are compiled without promises, too."""

import copy

import pytest
import torch
from torch._inductor.codecache import PyCodeCache
from triton import knobs
from triton.backends import backends

import flexhop
from flexhop.compat.kernels.gluon_versions import triton_version
from flexhop.compat.kernels.isolated import MENDED
from flexhop.compat.offline.fake_gpu import fake_gpu
from flexhop.offline import generate_code
from tests.kernel.test_promises import PAIR, run

COMPILER = backends["nvidia"].compiler
IS_FAULTY = triton_version() == (3, 6)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def distance(score, b, h, q_idx, kv_idx):
    return score - (q_idx - kv_idx).abs() / 8


def of_mask():
    """Lists of blocks: all of the operator that Dynamo traced is decomposed."""
    return generate_code(lambda: flexhop.create_block_mask(causal, 1, 1, 500, 500, "cpu"))


def of_call():
    """Kernels before and after attention, forward and backward."""
    x = torch.randn(1, 2, 128, 16, requires_grad=True)
    return generate_code(
        lambda x: flexhop.flex_attention(x + 1, x * 2, x, score_mod=distance).sin(), x, grad=True
    )


def of_branch():
    """Kernels of a part of a graph, such as a branch."""
    x = torch.randn(1, 2, 128, 16)

    def attend(x):
        return flexhop.flex_attention(x.sin(), x, x)

    return generate_code(lambda x: torch.cond(x.sum() > 0, attend, torch.cos, (x,)), x)


def own_of(generated):
    kernels = [kernel for kernel in generated.kernels if not kernel.is_template]
    assert kernels
    return kernels


@pytest.mark.parametrize("generated", [of_mask, of_call, of_branch])
def test_kernels_beside_ours_are_marked(generated):
    for kernel in own_of(generated()):
        assert kernel.inductor_meta.get(MENDED, False) == IS_FAULTY
        assert ("flexhop.compat.kernels" in kernel.source) == IS_FAULTY  # whoever compiles it


def test_other_graphs_are_not():
    generated = generate_code(lambda x: x.sin().cumsum(-1), torch.randn(4, 500))
    assert all(MENDED not in kernel.inductor_meta for kernel in own_of(generated))
    assert "import flexhop" not in generated.forward


def _compile(kernel, custom=False):
    """As Inductor compiles a kernel."""
    with fake_gpu((9, 0)):
        loaded = copy.copy(getattr(PyCodeCache.load(kernel.source), kernel.name))
        loaded.custom_kernel = custom
        loaded._precompile_config(loaded.configs[0])


@pytest.fixture
def given(monkeypatch, tmp_path):
    """LLVM's text of each kernel that is compiled in here, which is that of PAIR."""
    texts = []
    lower, write = COMPILER.make_llir, COMPILER.make_ptx

    def make_llir(self, *args, **keywords):
        lower(self, *args, **keywords)  # notes in the metadata what a kernel needs
        return PAIR

    def make_ptx(self, text, *args, **keywords):
        texts.append((text, write(self, text, *args, **keywords)))
        return texts[-1][1]

    monkeypatch.setattr(COMPILER, "make_llir", make_llir)
    monkeypatch.setattr(COMPILER, "make_ptx", make_ptx)
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield texts


@pytest.mark.skipif(not IS_FAULTY, reason="only Triton 3.6 believes the promises")
def test_a_number_that_nobody_uses_is_nowhere(given):
    kernel = own_of(of_mask())[0]
    _compile(kernel)
    ((text, ptx),) = given
    assert " nuw" not in text and run(ptx, 5) == [10] * 128
    # What the user wrote is the user's, in these graphs too. Triton's cache knows both apart.
    _compile(kernel, custom=True)
    assert given[1][0] == PAIR and run(given[1][1], 5) != [10] * 128
