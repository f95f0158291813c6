"""The choice between the portable kernels and those of Hopper GPUs, and its reasons."""

import dataclasses

import pytest
import torch

from flexhop.compat.kernels import gluon_versions
from flexhop.errors import OptionConflictError
from flexhop.lowering.dialect import Direction, candidates, plan
from flexhop.lowering.hopper import backward as hopper_grad
from flexhop.lowering.hopper import bits, schedule, tiles
from flexhop.lowering.hopper import forward as hopper
from flexhop.lowering.mods.bands import Band
from flexhop.lowering.problem import Cache, GradFacts, MaskBlocks, ModFacts, Problem
from flexhop.options import KernelOptions, Tile, TileRequest
from flexhop.reports import flop_counts
from tests.problems import problem

AUTO = KernelOptions()


def chosen(direction: Direction, call: Problem, options: KernelOptions) -> tuple[str, str]:
    """The dialect that serves, and why the preferred one does not; empty if it does."""
    choice = next(candidates(direction, call, options))
    return choice.dialect.name, next((reason for _, reason in choice.passed), "")


def choose_forward(call: Problem, options: KernelOptions) -> tuple[str, str]:
    return chosen("forward", call, options)


def choose_backward(call: Problem, options: KernelOptions) -> tuple[str, str]:
    return chosen("backward", call, options)


@pytest.fixture(autouse=True)
def _a_checked_triton(monkeypatch):
    """The choice as on the versions that have the kernel."""
    monkeypatch.setattr(gluon_versions, "obstacle", lambda: "")


NARROW = {"head_dim": 32, "value_head_dim": 32}
TABLE = {"has_score_mod": True, "has_distances": True, "reads_per_element": True}


@pytest.mark.parametrize(
    "facts",
    [
        {},
        NARROW | {"has_score_mod": True, "has_key_slope": True},
        NARROW | TABLE,
        NARROW | TABLE | {"blocks": MaskBlocks(128, 128, True, has_ranges=True)},
        {"head_dim": 128, "value_head_dim": 128},
        {"head_dim": 192, "value_head_dim": 128},
        {"head_dim": 256, "value_head_dim": 256, "blocks": MaskBlocks(128, 128, True)},
        {"blocks": MaskBlocks(256, 512, True), "has_mask_mod": True},
        {"dtype": torch.float16, "kv_heads": 2},
        {"has_score_mod": True, "reads_per_element": True},
        {"has_score_mod": True, "score_cost": 13.0},
        TABLE | {"score_cost": 15.0},
        {"kv_batch_shared": True},
        {"returns_max": True},
    ],
)
def test_the_hopper_kernel_serves(facts):
    assert choose_forward(problem(**facts), AUTO) == ("hopper", "")


@pytest.mark.parametrize(
    ("facts", "options", "reason"),
    [
        ({"architecture": 80}, {}, "it supports sm_90, and the GPU is sm_80"),
        ({"architecture": 100}, {}, "it supports sm_90, and the GPU is sm_100"),
        ({"dtype": torch.float32}, {}, "it supports bfloat16 and float16, not torch.float32"),
        ({"head_dim": 264}, {}, "it supports head sizes up to 256, not 264"),
        ({"value_head_dim": 512}, {}, "it supports value head sizes up to 256, not 512"),
        ({"bulk_obstacle": "rows of key overlap"}, {}, "rows of key overlap"),
        (
            {"cache": Cache(16, torch.bfloat16, torch.bfloat16)}, {},
            "it copies contiguous keys unchanged, but these keys are paged",
        ),
        (
            {"cache": Cache(0, torch.int8, torch.int8, has_key_mod=True)}, {},
            "it copies contiguous keys unchanged, but these keys are converted by a mod",
        ),
        (
            {"blocks": MaskBlocks(48, 128, True)}, {},
            "its tiles of 64 x 128 and the mask's blocks of 48 x 128 do not divide each other",
        ),
        (
            {"blocks": MaskBlocks(64, 8, True)}, {},
            "it supports mask blocks of at least 16 tokens a side, not 64 x 8",
        ),
        (
            {"blocks": MaskBlocks(64, 64, True, has_ranges=True)}, {},
            "its tiles hold several of the blocks of 64 x 64, which are ranges, not lists",
        ),
        ({}, {"forward": Tile(64, 64)}, "kernel_options set a tile of the portable kernel"),
        (
            {}, {"forward": TileRequest(num_stages=2)},
            "kernel_options set a tile of the portable kernel",
        ),
        ({}, {"prescale_qk": True}, "it does not support prescale_qk"),
        (
            {"query_len": 1}, {"short_queries": "decode"},
            "kernel_options select the decode kernel",
        ),
    ],
)  # fmt: skip
def test_reasons_against_it(facts, options, reason):
    call = problem(**facts)
    assert choose_forward(call, KernelOptions(**options)) == ("triton", reason)
    with pytest.raises(OptionConflictError) as caught:
        choose_forward(call, KernelOptions(backend="hopper", **options))
    assert str(caught.value) == f"backend='hopper' cannot be combined with this call: {reason}."


def test_packed_sequences_have_it():
    packed = problem(blocks=MaskBlocks(128, 128, True, has_ranges=True), has_mask_mod=True)
    assert choose_forward(packed, AUTO) == ("hopper", "")


@pytest.mark.parametrize(
    "facts",
    [{}, {"has_score_mod": True}, {"blocks": MaskBlocks(128, 128, True, has_ranges=True)}],
)
def test_few_columns_and_little_to_compute(facts):
    call = problem(**NARROW | facts)
    reason = "up to 32 columns the portable kernel is as fast"
    assert choose_forward(call, AUTO) == ("triton", reason)
    assert choose_forward(call, ANY) == ("hopper", "")


@pytest.mark.parametrize("blocks", [None, MaskBlocks(128, 128, True, has_ranges=True)])
@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"score_cost": 10.0, "score_uses_keys": True}, "hopper"),
        ({"score_cost": 9.0, "score_uses_keys": True}, "triton"),
        ({"score_cost": 14.0}, "triton"),  # a function of the score alone
    ],
)
def test_few_columns_and_coordinates_of_positions(blocks, facts, expected):
    long = {"query_len": 4096, "key_len": 4096}
    call = problem(**NARROW | long, has_score_mod=True, blocks=blocks, **facts)
    assert choose_forward(call, AUTO)[0] == expected


PAIR_ROWS = {"has_score_mod": True, "row_bytes": 4, "reads_per_element": True}
CAUSAL_BLOCKS = {
    "blocks": MaskBlocks(128, 128, True, kv_columns=8),
    "has_mask_mod": True,
    "mask_cost": 1.5,
}


@pytest.mark.parametrize(
    ("facts", "backend"),
    [
        ({}, "triton"),
        (CAUSAL_BLOCKS, "triton"),
        (CAUSAL_BLOCKS | {"row_bytes": 1}, "hopper"),
        (CAUSAL_BLOCKS | {"mask_cost": 12.0, "mask_reads": True, "batch": 32}, "hopper"),
        ({"copied_bytes": 4}, "hopper"),
        ({"copied_bytes": 4, "head_dim": 32, "value_head_dim": 32}, "triton"),
        (CAUSAL_BLOCKS | {"copied_bytes": 2}, "hopper"),
        # Consumers of several heads, or of blocks of their own, copy no tiles together.
        ({"copied_bytes": 2, "blocks": MaskBlocks(32, 32, True, kv_columns=8)}, "triton"),
    ],
)
def test_rows_of_keys_are_loaded_ahead_if_they_are_not_copied_or_a_mask_has_bits(facts, backend):
    assert choose_forward(problem(**PAIR_ROWS | facts), AUTO)[0] == backend


def test_it_can_be_forbidden():
    found = choose_forward(problem(), KernelOptions(backend="triton"))
    assert found == ("triton", "kernel_options select backend 'triton'")


def test_an_unknown_triton_has_the_portable_kernel(monkeypatch):
    monkeypatch.setattr(gluon_versions, "obstacle", lambda: "it is checked with Triton 3.6")
    assert choose_forward(problem(), AUTO) == ("triton", "it is checked with Triton 3.6")


@pytest.mark.parametrize(("version", "known"), [("3.6.0", True), ("3.7.1", True), ("3.9", False)])
def test_versions(monkeypatch, version, known):
    monkeypatch.undo()
    monkeypatch.setattr(gluon_versions.metadata, "version", lambda name: version)
    assert (gluon_versions.obstacle() == "") == known


@pytest.mark.parametrize("width", [16, 48, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("value_width", [64, 128, 256])
@pytest.mark.parametrize(
    "blocks", [None, MaskBlocks(128, 128, True), MaskBlocks(64, 64, True, kv_columns=8)]
)
@pytest.mark.parametrize(
    "facts",
    [{}, {"score_cost": 40.0}, *({"copied_bytes": size, "row_bytes": size} for size in (2, 4))],
)
def test_tiles_fit(width, value_width, blocks, facts):
    sizes = {"head_dim": width, "value_head_dim": value_width, "blocks": blocks}
    call = problem(**sizes, **facts, has_score_mod=bool(facts))
    tile = hopper.table_tile(call)
    assert tiles.shared_memory(call, tile) <= call.device.shared_memory
    assert tile.num_slots >= 2
    grad_tile = hopper_grad.table_tile(call)
    assert hopper_grad.shared_memory(call, grad_tile) <= call.device.shared_memory


def test_pairs_of_four_bytes_beside_256_columns_are_not_copied():
    wide = {"head_dim": 256, "value_head_dim": 256, "has_score_mod": True}
    calls = [problem(**wide, copied_bytes=size) for size in (2, 4)]
    assert [tiles.copies_pairs(call, hopper.table_tile(call)) for call in calls] == [True, False]


def test_three_consumers_only_where_no_mask_has_blocks():
    long = {"query_len": 8192}
    assert hopper.table_tile(problem(**long)).block_m == 192
    assert hopper.table_tile(problem(**long, blocks=MaskBlocks(128, 128, True))).block_m == 128
    assert hopper.table_tile(problem(**long, has_score_mod=True)).block_m == 128


@pytest.mark.parametrize(("queries", "rows"), [(192, 192), (197, 128), (1024, 128), (2048, 192)])
def test_three_consumers_only_where_they_pad_little(queries, rows):
    assert hopper.table_tile(problem(query_len=queries)).block_m == rows


def test_the_plan_names_the_kernel_or_the_reason():
    (found,) = plan("forward", problem(head_dim=128), AUTO)
    assert found.reason == "the Hopper kernel supports this call; its steps have one loop"
    assert found.tile.words() == "128 queries x 128 keys, 9 warps (1 loads), 2 slots"
    assert found.programs == 128  # fewer tiles than multiprocessors
    (portable,) = plan("forward", problem(head_dim=264), AUTO)
    assert portable.reason.endswith(
        "; not the Hopper kernel: it supports head sizes up to 256, not 264"
    )
    (other,) = plan("forward", problem(architecture=80), AUTO)
    assert "Hopper" not in other.reason


def test_a_negative_scale_is_applied_to_scores():
    constants = hopper.constants(problem(scale=-0.5), AUTO, hopper.table_tile(problem()))
    assert constants.SCALE_SCORES
    assert constants.EXP_SCALE == pytest.approx(1.4426950408889634)


def test_lengths_that_tiles_overhang_are_checked():
    whole = problem(head_dim=128)
    odd = dataclasses.replace(
        whole, is_query_multiple=lambda n: False, is_key_multiple=lambda n: False
    )
    for call, checked in ((whole, False), (odd, True)):
        constants = hopper.constants(call, AUTO, hopper.table_tile(call))
        assert (constants.CHECK_Q, constants.CHECK_KV) == (checked, checked)


TABLES = {
    "blocks": MaskBlocks(128, 128, True, kv_columns=8, q_columns=16), "has_mask_mod": True,
    "mask_reads": True, "mask_cost": 8.0, "head_dim": 128, "value_head_dim": 128, "batch": 4,
    "query_heads": 16, "query_len": 2048,
}  # fmt: skip


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"mask_reads": False, "asked_grad_cost": 10.0},
        {"head_dim": 256, "value_head_dim": 256},
        {"blocks": MaskBlocks(256, 384, True, kv_columns=3, q_columns=8)},
        {"mask_cost": 5.0},  # mask_mod would wait for what it reads
    ],
)
def test_masks_that_take_long_are_stored_as_bits(facts):
    call = problem(**TABLES | facts)
    assert call.blocks is not None
    forward = hopper.constants(call, AUTO, hopper.table_tile(call))
    backward = hopper_grad.constants(call, hopper_grad.table_tile(call))
    assert forward.STORED_BLOCKS == call.blocks.kv_columns
    assert backward.STORED_BLOCKS == call.blocks.q_columns
    assert forward.HOLDS_ALL_BITS and backward.HOLDS_ALL_BITS
    assert (forward.BITS_ROWS, backward.BITS_ROWS) == (call.blocks.q_size, call.blocks.kv_size)
    assert not forward.BITS_BY_BATCH


def test_a_mask_that_leaves_no_block_full_needs_to_save_less():
    facts = TABLES | {"mask_reads": False, "mask_cost": 4.3}
    for is_scattered, stored in ((False, 0), (True, 8)):
        call = problem(**facts | {"mask_is_scattered": is_scattered})
        assert bits.of_queries(call).blocks == stored


@pytest.mark.parametrize(
    ("head_dim", "cost", "stored"), [(64, 6.8, 0), (64, 7.3, 16), (128, 9.3, 0), (128, 10.05, 16)]
)
def test_backward_kernels_read_bits_if_they_save_more(head_dim, cost, stored):
    widths = {"head_dim": head_dim, "value_head_dim": head_dim}
    facts = {"mask_reads": False, "mask_cost": 0.0, "asked_grad_cost": cost}
    assert bits.of_keys(problem(**TABLES | widths | facts)).blocks == stored


def test_bits_of_batches():
    blocks = MaskBlocks(128, 128, True, per_batch=True)
    for facts in ({"mask_uses_batch": True}, {"blocks": blocks}):
        assert bits.of_queries(problem(**TABLES | facts)).by_batch


def test_bits_of_long_sequences_take_no_more_memory_than_half_of_query_and_at_least_some_blocks():
    long = {"batch": 1, "query_len": 2**19, "key_len": 2**19, "mask_cost": 20.0}
    blocks = MaskBlocks(128, 128, True, kv_columns=4096, q_columns=4096)
    stored = bits.of_queries(problem(**TABLES | long | {"blocks": blocks}))
    query_bytes = 2**19 * 16 * 128 * 2
    assert 32 <= stored.blocks < 4096 and not stored.holds_all
    assert 4096 * stored.blocks * stored.words * 4 <= query_bytes / 2
    few = bits.of_queries(problem(**TABLES | long | {"blocks": blocks, "query_heads": 4}))
    assert few.blocks == 32


def test_a_mask_that_may_leave_blocks_to_mask_mod_must_save_more():
    blocks = MaskBlocks(128, 128, True)  # with as many columns as there will be
    for cost, stored in ((6.0, 0), (20.0, 8)):
        facts = {"blocks": blocks, "mask_reads": False, "mask_cost": cost}
        assert bits.of_queries(problem(**TABLES | facts)).blocks == stored


@pytest.mark.parametrize(("cost", "chosen"), [(10.0, "triton"), (11.0, "hopper")])
def test_few_columns_and_a_mask_that_becomes_bits(cost, chosen):
    call = problem(**TABLES | NARROW | {"mask_cost": cost})
    assert bits.of_queries(call).blocks
    assert choose_forward(call, AUTO)[0] == chosen


@pytest.mark.parametrize(
    "facts",
    [
        {"blocks": None},
        {"blocks": MaskBlocks(128, 128, True, per_head=True)},
        {"blocks": MaskBlocks(128, 128, True, has_ranges=True)},
        {"mask_uses_head": True},
        {"mask_cost": 3.0},  # a comparison
        {"mask_band": Band(-10, 10)},
        {"mask_uses_batch": True, "query_heads": 1, "kv_heads": 1, "batch": 64},
        {"query_len": 128},
    ],
)
def test_other_masks_stay_functions(facts):
    call = problem(**TABLES | facts)
    assert bits.of_queries(call).blocks == bits.of_keys(call).blocks == 0


ONE_OF_QUERIES = {
    "has_score_mod": True, "captured_reads": ("head", "query"), "captured_follow_score": True,
}  # fmt: skip
LARGE = {"batch": 4, "query_len": 2048, "key_len": 2048}
ANY = KernelOptions(backend="hopper")


@pytest.mark.parametrize(
    "facts",
    [
        {},
        NARROW | {"has_score_mod": True},
        NARROW | {"blocks": MaskBlocks(128, 128, True, has_ranges=True), "has_mask_mod": True},
        {"head_dim": 128, "value_head_dim": 128},
        {"head_dim": 96, "value_head_dim": 64},
        {"head_dim": 192, "value_head_dim": 128},
        {"head_dim": 256, "value_head_dim": 256},
        {"blocks": MaskBlocks(256, 512, True), "has_mask_mod": True},
        {"blocks": MaskBlocks(128, 128, True), "has_mask_mod": True, "mask_reads": True},
        {"blocks": MaskBlocks(128, 128, True, has_ranges=True), "has_mask_mod": True},
        {"dtype": torch.float16, "kv_heads": 4},
        {"has_score_mod": True, "reads_per_element": True},
        {"kv_batch_shared": True, "kv_heads": 8, "key_len": 4096},
        {"has_score_mod": True, "captured_reads": ("head", "key", "query", "distance")},
        ONE_OF_QUERIES | {"head_dim": 128},
        ONE_OF_QUERIES | {"grad_has_functions": True},
        {"head_dim": 256, "has_score_mod": True, "captured_reads": ("key", "query")},
        {"head_dim": 128, "has_score_mod": True, "captured_reads": ("distance",)},
        {
            "head_dim": 128,
            "has_score_mod": True,
            "captured_reads": ("head", "query", "distance"),
            "blocks": MaskBlocks(128, 128, True, has_ranges=True),
        },
        {
            "head_dim": 256,
            "has_score_mod": True,
            "has_score_grad": True,
            "captured_reads": ("key",),
        },
    ],
)
def test_the_hopper_backward_kernel_serves(facts):
    call = problem(**LARGE | {"query_heads": 16, "kv_heads": 16} | facts)
    assert choose_backward(call, AUTO) == ("hopper", "")
    (found,) = plan("backward", call, AUTO)
    assert (found.kernel, found.reason) == ("backward", "the Hopper kernel supports this call")
    assert found.shared_memory <= call.device.shared_memory
    assert found.programs == call.device.multiprocessors


@pytest.mark.parametrize(
    ("facts", "options", "reason"),
    [
        ({"architecture": 80}, {}, "it supports sm_90, and the GPU is sm_80"),
        ({"head_dim": 264}, {}, "it supports head sizes up to 256, not 264"),
        ({"head_dim": 100}, {}, "it supports only head sizes that are multiples of 8"),
        ({"bulk_obstacle": "rows of key overlap"}, {}, "rows of key overlap"),
        (
            {"is_deterministic": True, "captured_reads": ("head",)}, {},
            "it sums gradients of captured tensors in no fixed order, "
            "but deterministic mode is on",
        ),
        ({"dropout_p": 0.1}, {}, "it does not support dropout"),
        (
            {"captured_reads": ("key", "score")}, {},
            "score_mod reads a captured tensor that needs a gradient at one entry per score",
        ),
        (
            {"blocks": MaskBlocks(64, 128, True)}, {},
            "its tiles of 128 x 128 do not divide the mask's blocks of 64 x 128",
        ),
        ({}, {"prescale_qk": True}, "it does not support prescale_qk"),
        (
            {}, {"grad_query": Tile(64, 64)},
            "kernel_options set a tile of the portable kernels",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["auto", "hopper"])
def test_reasons_against_the_backward_kernel(facts, options, reason, backend):
    call, asked = problem(**LARGE | facts), KernelOptions(backend=backend, **options)
    assert choose_backward(call, asked) == ("triton", reason)
    if backend == "auto" and "architecture" not in facts:
        first = plan("backward", call, asked)[0]
        assert first.kernel == "grad_query"
        assert first.reason.endswith(f"; not the Hopper kernel: {reason}")


ROWS = "the portable kernels sum in registers what a query adds to captured tensors"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (
            NARROW,
            "with so few columns the portable kernels are faster if all scores count as they are",
        ),
        (
            {"batch": 1, "kv_heads": 2},
            "its 32 tiles of keys do not keep 132 multiprocessors busy",
        ),
        (
            {"batch": 15, "query_len": 900},
            "below 1025 queries its setup and post-processing dominate",
        ),
        (
            {"batch": 12, "query_len": 300, "head_dim": 128},
            "below 384 queries its setup and post-processing dominate",
        ),
        (
            {"batch": 12, "query_len": 255, "head_dim": 128, "blocks": MaskBlocks(128, 128, True)},
            "below 256 queries its setup and post-processing dominate",
        ),
        (
            {"batch": 16, "query_len": 192},
            "below 193 queries its setup and post-processing dominate",
        ),
        (
            {"batch": 64, "key_len": 64, "head_dim": 128, "value_head_dim": 128},
            "one portable kernel computes all gradients of so few keys",
        ),
        (
            {"batch": 16, "key_len": 60, "head_dim": 128, "key_len_varies": True},
            "for 60 keys, sums for the gradient of query are not worth it",
        ),
        (
            {"batch": 64, "key_len": 128, "head_dim": 128, "value_head_dim": 128},
            "for 128 keys, sums for the gradient of query are not worth it",
        ),
        (
            {"batch": 64, "query_len": 959, "head_dim": 128, "is_deterministic": True},
            "below 960 queries its setup and post-processing dominate",
        ),
        (
            {"has_score_mod": True, "grad_cost": 86.0},
            "the gradient of score_mod takes about 86 instructions per score: above 60 the "
            "portable kernels are faster",
        ),
        (ONE_OF_QUERIES, ROWS),
        (ONE_OF_QUERIES | {"head_dim": 128, "captured_follow_score": False}, ROWS),
        ({"head_dim": 128, "has_score_mod": True, "captured_reads": ("query", "key")}, ROWS),
        (
            {
                "head_dim": 128,
                "has_score_mod": True,
                "captured_reads": ("query",),
                "captured_follow_score": True,
                "queries_meet": True,
            },
            ROWS,
        ),
    ],
)
def test_where_the_portable_backward_kernels_are_faster(facts, reason):
    call = problem(**LARGE | facts)
    assert choose_backward(call, AUTO) == ("triton", reason)
    assert choose_backward(call, ANY) == ("hopper", "")


BLOCKS = MaskBlocks(128, 128, True)


@pytest.mark.parametrize(
    ("facts", "narrow", "wide"),
    [
        ({}, 1025, 384),
        ({"blocks": BLOCKS}, 960, 256),
        ({"blocks": BLOCKS, "has_mask_mod": True, "mask_reads": True}, 512, 256),
        ({"has_score_mod": True, "reads_per_element": True}, 384, 256),
        (
            {
                "has_score_mod": True, "reads_per_element": True, "captured_reads": ("distance",),
            }, 128, 128,
        ),
    ],
)  # fmt: skip
def test_from_how_many_queries_on_the_backward_kernel_is_faster(facts, narrow, wide):
    """Times of kernels at 128 to 1024 queries; see docs/lab/unusual.md."""
    for width, fewest in ((64, narrow), (128, wide)):
        call = LARGE | {"batch": 12, "head_dim": width, "value_head_dim": width} | facts
        enough = choose_backward(problem(**call | {"query_len": fewest}), AUTO)
        below = choose_backward(problem(**call | {"query_len": fewest - 1}), AUTO)
        assert (enough, below[0]) == (("hopper", ""), "triton")


def test_many_tiles_of_few_queries_have_the_backward_kernel():
    """At 64 columns, with some 30 tiles per multiprocessor."""
    sizes = {"batch": 64, "query_heads": 32, "kv_heads": 16, "key_len": 1024}
    for facts, fewest in (({}, 768), ({"blocks": BLOCKS}, 512)):
        calls = [problem(**sizes, **facts, query_len=n) for n in (fewest, fewest - 1)]
        assert [choose_backward(call, AUTO)[0] for call in calls] == ["hopper", "triton"]


@pytest.mark.parametrize(
    ("facts", "owns"),
    [
        ({}, True),
        ({"query_len": 640}, True),
        ({"query_len": 660}, False),  # sums of all programs exceed their share of the cache
        ({"head_dim": 128, "value_head_dim": 128}, False),
        ({"head_dim": 128, "value_head_dim": 128, "query_len": 256}, True),
        ({"query_heads": 32}, False),
        ({"query_heads": 32, "query_len": 128}, True),
        ({"batch": 18}, False),  # 144 heads: the second round would keep 12 of 132 programs busy
        ({"batch": 17 * 16}, True),
        ({"is_deterministic": True}, False),
        ({"kv_batch_shared": True}, False),
        ({"head_dim": 256, "query_len": 64}, False),
    ],
)
def test_programs_own_heads_of_short_sequences(facts, owns):
    sizes = {"batch": 64, "query_heads": 8, "kv_heads": 8, "query_len": 512, "key_len": 512}
    call = problem(**sizes | facts)
    constants = hopper_grad.constants(call, hopper_grad.table_tile(call))
    assert schedule.owns_heads(call) == constants.OWNS_HEADS == owns
    if owns:
        assert constants.HEADS_PER_SECTION == 1  # tiles of a head follow each other


@pytest.mark.parametrize(
    ("queries", "keys", "is_hopper"), [(64, 64, False), (65, 64, True), (64, 65, True)]
)
def test_up_to_64_tokens_have_the_portable_forward_kernel(queries, keys, is_hopper):
    """49 tokens took 0.116 ms instead of 0.055: half of each tile was empty."""
    call = problem(batch=512, query_len=queries, key_len=keys)
    assert (choose_forward(call, AUTO)[0] == "hopper") == is_hopper


def test_an_unknown_triton_has_the_portable_backward_kernels(monkeypatch):
    monkeypatch.setattr(gluon_versions, "obstacle", lambda: "it is checked with Triton 3.6")
    found = choose_backward(problem(**LARGE), ANY)
    assert found == ("triton", "it is checked with Triton 3.6")


def test_a_tile_of_queries_fits_blocks_of_64_where_heads_are_wide():
    call = problem(head_dim=128, value_head_dim=128, blocks=MaskBlocks(64, 128, True))
    assert choose_backward(call, ANY) == ("hopper", "")


@pytest.mark.parametrize("width", [16, 48, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("has_score_mod", [False, True])
def test_tiles_of_the_backward_kernel_fit(width, has_score_mod):
    call = problem(head_dim=width, value_head_dim=64, has_score_mod=has_score_mod)
    tile = hopper_grad.table_tile(call)
    assert hopper_grad.shared_memory(call, tile) <= call.device.shared_memory
    assert tile.shares_keys == (width == 256 or (width == 192 and has_score_mod))


@pytest.mark.parametrize(
    ("facts", "keys"),
    [
        ({"head_dim": 192, "value_head_dim": 128}, 128),
        ({"head_dim": 136, "value_head_dim": 40}, 128),
        ({"head_dim": 192, "value_head_dim": 136}, 64),
        ({"head_dim": 200, "value_head_dim": 128}, 64),
        ({"head_dim": 128, "value_head_dim": 192}, 64),
        ({"head_dim": 192, "value_head_dim": 128, "has_score_mod": True}, 64),
        ({"head_dim": 192, "value_head_dim": 128, "blocks": MaskBlocks(64, 128, True)}, 128),
        ({"head_dim": 192, "value_head_dim": 128, "blocks": MaskBlocks(128, 64, True)}, 64),
    ],
)
def test_the_widths_of_latent_attention_have_tiles_of_their_own(facts, keys):
    call = problem(**facts)
    tile = hopper_grad.table_tile(call)
    assert (tile.block_m, tile.block_n) == (64, keys)
    assert bool(tile.rest_width) == (keys == 128)
    assert hopper_grad.shared_memory(call, tile) <= call.device.shared_memory


KEPT = {"has_score_grad": True, "grad_reads_score": True, "grad_has_functions": True}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"has_score_grad": True, "grad_reads_score": True}, True),
        ({"has_score_grad": True}, False),
        (KEPT, False),
        (KEPT | {"captured_reads": ("head",)}, True),
        (KEPT | {"captured_reads": ("head",), "captured_follow_score": True}, False),
        ({"has_score_grad": True, "grad_reads_score": True, "head_dim": 64}, False),
        ({"has_score_grad": True, "grad_reads_score": True, "head_dim": 256}, False),
    ],
)
def test_scores_are_set_aside_where_their_gradient_is_cheap(facts, expected):
    """At 128 columns; computing functions once more takes longer than what registers lack."""
    facts = facts | {"value_head_dim": facts.get("head_dim", 128)}
    call = problem(
        **LARGE | {"head_dim": 128, "value_head_dim": 128, "has_score_mod": True} | facts
    )
    constants = hopper_grad.constants(call, hopper_grad.table_tile(call))
    assert constants.STASH_SCORES == expected


@pytest.mark.parametrize(
    ("reads", "shares_keys"), [(("head", "key"), False), (("head", "distance"), True)]
)
def test_learned_factors_have_the_backward_kernel(reads, shares_keys):
    gradient = {"has_score_grad": True, "grad_reads_score": True, "grad_has_functions": True}
    facts = {
        "head_dim": 128,
        "value_head_dim": 128,
        "has_score_mod": True,
        "captured_reads": reads,
    }
    call = problem(**LARGE | gradient | facts)
    assert choose_backward(call, AUTO) == ("hopper", "")
    tile = hopper_grad.table_tile(call)
    assert tile.shares_keys == shares_keys
    assert hopper_grad.constants(call, tile).STASH_SCORES != shares_keys


def test_the_work_of_the_backward_kernel_is_five_products():
    assert flop_counts.flops("backward", problem(), 10) == 2 * 10 * 5 * 64
    assert flop_counts.least_bytes("backward", problem()) > flop_counts.least_bytes(
        "forward", problem()
    )


@pytest.mark.parametrize(("width", "fewest"), [(128, 16), (256, 8)])
def test_sections_of_the_backward_kernel_have_a_few_heads_or_an_eighth_of_the_cache(width, fewest):
    facts = {"head_dim": width, "value_head_dim": width, "batch": 16, "kv_heads": 8}
    fitting = problem().device.l2_bytes // 8 // (128 * 1024 * width // 128)
    for length, heads in ((8192, fewest), (128, fitting)):
        call = problem(**facts, query_len=length, key_len=length, is_deterministic=True)
        constants = hopper_grad.constants(call, hopper_grad.table_tile(call))
        assert constants.HEADS_PER_SECTION == heads


@pytest.mark.parametrize(
    ("width", "cost", "most", "facts"),
    [
        (64, 14.0, 13, {}),
        (64, 25.0, 24, {"score_uses_keys": True}),
        (96, 25.0, 24, {}),
        (128, 25.0, 24, {}),
        (256, 21.0, 20, {"score_uses_keys": True}),
    ],
)
def test_where_the_portable_forward_kernel_is_faster(width, cost, most, facts):
    facts = facts | {"has_score_mod": True, "score_cost": cost}
    call = problem(head_dim=width, value_head_dim=width, **facts)
    reason = (
        f"score_mod takes about {cost:.0f} instructions per score: above {most} the portable "
        "kernel is faster"
    )
    assert choose_forward(call, AUTO) == ("triton", reason)
    assert choose_forward(call, ANY) == ("hopper", "")


SMALL = MaskBlocks(64, 64, True)
BIAS_AND_MASK = {
    "has_score_mod": True,
    "key_bytes": frozenset({4}),
    "has_mask_mod": True,
    "mask_cost": 8.0,
}


BY_HEAD = {"has_mask_mod": True, "mask_uses_head": True, "mask_cost": 8.0}
IDS = {"has_score_mod": True, "has_mask_mod": True, "mask_reads": True, "mask_cost": 9.0}
TABLE = {
    "has_score_mod": True, "score_cost": 7.0, "has_distances": True, "reads_per_element": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "chosen"),
    [
        ({"has_score_mod": True, "key_bytes": frozenset({4})}, "triton"),
        ({"has_score_mod": True, "key_bytes": frozenset({4}), "head_dim": 128}, "hopper"),
        # A table by distance has sums of its own.
        (
            {"has_score_mod": True, "key_bytes": frozenset({4}), "reads_per_element": True},
            "hopper",
        ),
        (BIAS_AND_MASK | {"mask_reads": True}, "triton"),
        (BIAS_AND_MASK, "hopper"),
        ({"has_score_mod": True, "key_bytes": frozenset({4}), "blocks": SMALL}, "hopper"),
        (BIAS_AND_MASK | {"mask_reads": True, "mask_reads_per_element": True}, "hopper"),
        ({"has_mask_mod": True, "mask_uses_head": True, "mask_cost": 8.0}, "triton"),
        ({"has_mask_mod": True, "mask_uses_head": True, "mask_cost": 5.0}, "hopper"),
        ({"has_mask_mod": True, "mask_cost": 8.0}, "hopper"),  # bits of all heads
        (BY_HEAD | TABLE, "hopper"),
        (IDS | {"score_cost": 6.0}, "triton"),
        (IDS | {"score_cost": 5.0}, "hopper"),
        (IDS | {"score_cost": 6.0, "mask_reads_per_element": True}, "hopper"),
        (IDS | TABLE, "hopper"),
        (IDS | {"score_cost": 6.0, "has_key_slope": True}, "hopper"),
    ],
)
def test_reads_at_keys_and_masks_of_heads_have_the_portable_kernel_at_64_columns(facts, chosen):
    columns = MaskBlocks(128, 128, True, kv_columns=8, q_columns=8)
    blocks = columns if "mask_cost" in facts else None
    widths = {"head_dim": 64, "value_head_dim": facts.get("head_dim", 64)}
    call = problem(**LARGE | widths | {"blocks": blocks} | facts)
    assert choose_forward(call, AUTO)[0] == chosen
    assert choose_forward(call, ANY)[0] == "hopper"


@pytest.mark.parametrize(
    ("facts", "keys", "chosen"),
    [
        ({"score_cost": 1.0}, 1024, "triton"),
        ({"score_cost": 1.0}, 2048, "hopper"),
        ({"score_cost": 1.0, "mask_band": (-22, 1)}, 2048, "triton"),
        ({"score_cost": 1.0, "mask_band": (-22, 1)}, 4096, "hopper"),
        ({"score_cost": 1.0, "mask_cost": 9.0}, 1024, "hopper"),
        ({"score_cost": 1.0, "head_dim": 128}, 1024, "hopper"),
        ({"score_cost": 1.0, "has_distances": True}, 1024, "hopper"),
        ({"score_cost": 0.0, "has_score_mod": False}, 1024, "hopper"),
        ({"score_cost": 1.0, "blocks": None}, 1024, "hopper"),
    ],
)
def test_a_score_mod_under_a_short_mask_has_the_portable_kernel(facts, keys, chosen):
    sizes = {"batch": 64, "query_heads": 8, "kv_heads": 8, "query_len": keys, "key_len": keys}
    usual = {"blocks": MaskBlocks(128, 128, True), "has_score_mod": True, "has_mask_mod": True}
    width = facts.get("head_dim", 64)
    call = problem(**sizes | usual | {"mask_cost": 5.0, "value_head_dim": width} | facts)
    assert choose_forward(call, AUTO)[0] == chosen
    assert choose_forward(call, ANY)[0] == "hopper"


@pytest.mark.parametrize(
    ("facts", "chosen"),
    [
        ({}, "triton"),
        ({"reads_score": True}, "hopper"),
        ({"head_dim": 192}, "hopper"),
        ({"captured_reads": ("head",)}, "hopper"),
        (TABLE, "hopper"),
    ],
)
def test_the_gradient_of_value_alone_has_a_portable_kernel(facts, chosen):
    facts = {"has_score_mod": True, "head_dim": 128, "value_head_dim": 128} | facts
    facts = {"reads_score": False} | facts
    assert choose_backward(problem(**LARGE | facts), AUTO)[0] == chosen


@pytest.mark.parametrize(("cost", "chosen"), [(30.0, "triton"), (8.0, "hopper")])
def test_long_masks_of_heads_have_portable_gradients_at_64_columns(cost, chosen):
    facts = {"has_mask_mod": True, "mask_uses_head": True, "mask_cost": cost}
    blocks = MaskBlocks(128, 128, True, kv_columns=8, q_columns=8)
    for width, expected in ((64, chosen), (128, "hopper")):
        widths = {"head_dim": width, "value_head_dim": width}
        call = problem(**LARGE | widths | {"blocks": blocks} | facts)
        assert choose_backward(call, AUTO)[0] == expected


@pytest.mark.parametrize("width", [64, 128, 256])
def test_long_score_mods_have_steps_of_64_keys(width):
    widths = {"head_dim": width, "value_head_dim": width}
    for cost, keys in ((6.0, 64 if width == 256 else 128), (13.0, 64)):
        call = problem(**widths, has_score_mod=True, score_cost=cost)
        tile = hopper.table_tile(call)
        assert tile.block_n == keys
        assert tiles.shared_memory(call, tile) <= call.device.shared_memory
        assert choose_forward(call, AUTO) == ("hopper", "")


@pytest.mark.parametrize(
    ("facts", "stays"),
    [
        ({}, True),
        ({"has_score_mod": True, "score_cost": 3.0}, True),
        ({"has_score_mod": True, "score_cost": 14.0}, False),
        ({"has_score_mod": True, "reads_by_position": True}, False),
    ],
)
def test_queries_leave_their_registers_to_a_score_mod_that_needs_them(facts, stays):
    for width, expected in ((128, stays), (64, True)):
        blocks = MaskBlocks(128, 128, True)
        call = problem(head_dim=width, value_head_dim=width, blocks=blocks, **facts)
        constants = hopper.constants(call, AUTO, hopper.table_tile(call))
        assert constants.Q_IN_REGISTERS == expected


@pytest.mark.parametrize(
    ("keeps_own", "queries", "has_mask", "expected"),
    [(True, 1024, True, False), (False, 1024, True, True), (True, 2048, True, True),
     (False, 1024, False, False)],
)  # fmt: skip
def test_tiles_without_keys_are_expected_unless_queries_see_their_own(
    keeps_own, queries, has_mask, expected
):
    blocks = MaskBlocks(128, 128, True) if has_mask else None
    call = problem(query_len=queries, blocks=blocks, mask_keeps_own=keeps_own)
    constants = hopper.constants(call, AUTO, hopper.table_tile(call))
    assert constants.STORES_EMPTY_TILES == expected


@pytest.mark.parametrize(
    ("batch", "heads", "length", "width", "expected"),
    [
        (4, 16, 8192, 128, 8),  # not 6, of which the last section would have four
        (2, 16, 8192, 192, 4),
        (1, 8, 32768, 128, 4),  # not one
        (1, 40, 8192, 128, 5),
        (1, 31, 8192, 128, 6),  # no even share is near
        (64, 16, 512, 128, 25),  # short: as in the portable kernel
    ],
)
def test_sections_of_masked_calls_are_even(batch, heads, length, width, expected):
    call = problem(
        head_dim=width, value_head_dim=width, batch=batch, query_heads=heads, kv_heads=heads,
        query_len=length, key_len=length, blocks=MaskBlocks(128, 128, True),
    )  # fmt: skip
    constants = hopper.constants(call, AUTO, hopper.table_tile(call))
    assert constants.HEADS_PER_SECTION == expected


def test_no_fact_of_a_problem_is_new_to_the_hopper_kernels():
    """A fact that their templates do not know must be among their obstacles, and then here."""
    known = {
        "device", "dtype", "batch", "query_heads", "kv_heads", "query_len", "key_len", "head_dim",
        "value_head_dim", "scale", "kv_batch_shared", "blocks", "has_score_mod", "mask_reads",
        "reads_per_element", "has_mask_mod", "captured_reads", "returns_max", "large_output",
        "is_query_multiple", "is_key_multiple", "has_score_grad", "key_len_varies",
        "bulk_obstacle", "is_deterministic", "dropout_p", "mask_uses_batch", "mask_uses_head",
        "mask_band", "reads_by_position", "score_cost", "mask_cost", "grad_cost", "has_key_slope",
        "asked_cost", "asked_grad_cost", "has_key_bend", "grad_reads_score", "grad_has_functions",
        "dropout_groups", "reads_score",
        "mask_reads_per_element", "mask_pair_bytes", "mask_rows", "is_tf32", "pair_bytes",
        "has_distances", "mask_reads_by_position", "key_bytes", "mask_key_bytes",
        "mask_uses_query", "mask_keeps_own", "score_uses_keys", "reads_captured",
        "mask_is_scattered", "captured_follow_score",
        # The kernels read and add whatever is captured.
        "row_bytes", "head_row_bytes", "copied_bytes", "own_entries", "queries_meet",
        "longest_row",  # rows are counted in the costs, which pass mods with long ones over
        "takes_products", "large_scores", "is_lse_wide",
        "cache",  # such calls have an operator of their own, without gradients
        "value_is_key",
        "tangents",  # likewise: flexhop_attention_derivative
    }  # fmt: skip
    fields = {field.name for field in dataclasses.fields(Problem)} - {"mods", "grad"}
    assert fields | {*ModFacts._fields, *GradFacts._fields} == known


@pytest.mark.parametrize(("scale", "follows"), [(0.1, True), (1e-7, False), (-0.1, False)])
def test_lines_are_followed_where_the_scale_divides_their_slopes(scale, follows):
    call = problem(90, 128, has_score_mod=True, has_key_slope=True, scale=scale)
    constants = hopper.constants(call, AUTO, hopper.table_tile(call))
    assert (constants.HAS_SLOPE, constants.SCALE_SCORES) == (follows, not follows)
