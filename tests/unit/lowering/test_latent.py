"""What the Hopper kernel of latent attention serves, and its numbers."""

import pytest
import torch

from flexhop.compat.kernels import gluon_versions
from flexhop.errors import OptionConflictError
from flexhop.lowering.dialect import candidates, plan
from flexhop.lowering.hopper import latent
from flexhop.lowering.portable import kernels
from flexhop.lowering.problem import Cache, MaskBlocks
from flexhop.options import KernelOptions, TileRequest
from tests.problems import problem

AUTO = KernelOptions()
PAGES = Cache(64, torch.bfloat16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _a_checked_triton(monkeypatch):
    """The choice as on the versions that have the kernel."""
    monkeypatch.setattr(gluon_versions, "obstacle", lambda: "")


def step(**facts):
    """A step of 128 heads that share a key head."""
    usual = {
        "head_dim": 576, "value_head_dim": 512, "value_is_key": True, "query_heads": 128,
        "kv_heads": 1, "query_len": 1, "batch": 64, "key_len": 8192,
    }  # fmt: skip
    return problem(**usual | facts)


def choose(call, options=AUTO):
    choice = next(candidates("forward", call, options))
    return choice.dialect.name, next((reason for _, reason in choice.passed), "")


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"dtype": torch.float16, "query_len": 4096},
        {"head_dim": 520, "value_head_dim": 257, "query_heads": 16},
        {"blocks": MaskBlocks(128, 64, True), "has_mask_mod": True},
        {"blocks": MaskBlocks(100, 192, False, per_head=True), "query_len": 100},
        {"has_score_mod": True, "reads_per_element": True, "score_cost": 50.0},
        {"kv_batch_shared": True, "returns_max": True},
        {"value_is_key": False},
        {"cache": PAGES, "key_len_varies": True},
    ],
)
def test_it_serves(facts):
    assert choose(step(**facts)) == ("hopper", "")


@pytest.mark.parametrize(
    ("facts", "options", "reason"),
    [
        ({"value_head_dim": 576}, AUTO, "not 576 and 576"),
        ({"value_head_dim": 256}, AUTO, "not 576 and 256"),
        ({"head_dim": 512, "value_head_dim": 520}, AUTO, "not 512 and 520"),
        ({"dtype": torch.float32}, AUTO, "it supports bfloat16 and float16"),
        ({"bulk_obstacle": "rows of key do"}, AUTO, "rows of key do"),
        ({"dropout_p": 0.1}, AUTO, "it does not support dropout"),
        ({"blocks": MaskBlocks(128, 96, True)}, AUTO, "do not divide the mask's blocks of 96"),
        ({"cache": Cache(16, torch.bfloat16, torch.bfloat16)}, AUTO, "not of 16"),
        ({}, KernelOptions(decode=TileRequest(64, 16)), "kernel_options set a tile"),
        ({}, KernelOptions(prescale_qk=True), "it does not support prescale_qk"),
        ({"query_heads": 8}, AUTO, "the portable kernel is faster for 8 rows"),
    ],
)
def test_it_leaves_the_rest_to_the_portable_kernel(facts, options, reason):
    name, said = choose(step(**facts), options)
    assert name == "triton"
    assert reason in said


def test_who_demands_it_gets_it_or_a_reason():
    demanded = KernelOptions(backend="hopper")
    assert choose(step(query_heads=8), demanded) == ("hopper", "")
    with pytest.raises(OptionConflictError, match="not 576 and 256"):
        choose(step(value_head_dim=256), demanded)


@pytest.mark.parametrize(
    ("facts", "count"), [({}, 1), ({"batch": 1}, 64), ({"batch": 128, "query_heads": 16}, 1)]
)
def test_shares_fill_the_multiprocessors(facts, count):
    (made,) = plan("forward", step(**facts), AUTO)
    assert made.constants["SPLITS"] == count
    assert made.programs == count * facts.get("batch", 64) * (1 if "query_heads" in facts else 2)


@pytest.mark.parametrize(("heads", "waits"), [(16, False), (64, False), (65, True), (128, True)])
def test_the_second_consumer_waits_if_products_bound_the_time(heads, waits):
    """Programs of one key head share what they read; a single one is bound by reads."""
    assert latent.constants(step(query_heads=heads), AUTO).WAITS_FOR_SCORES == waits


def test_what_a_program_holds_fits():
    call = step()
    assert latent.shared_memory(call) <= call.device.shared_memory


def test_a_user_chooses_the_shares():
    options = KernelOptions(splits=7)
    assert latent.constants(step(), options).SPLITS == 7
    assert kernels.combine_constants(step(), options, 7).SPLITS_ROUNDED == 8
