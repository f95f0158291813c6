"""Block masks by intervals are those of looking at every score, bit by bit."""

import os
import random
import secrets

import pytest
import torch
from torch.nn.functional import pad

from flexhop import create_block_mask, masks
from flexhop.analysis import Forms, evaluate, trace
from flexhop.analysis.interval import Interval
from flexhop.block_mask import coverage as intervals
from flexhop.block_mask.creation import checked
from flexhop.block_mask.scores import Grid, coverage_by_chunks
from tests.mask_programs import Program

CPU = torch.device("cpu")
PROGRAMS = int(os.environ.get("FLEXHOP_MASK_PROGRAMS", "150"))
FEW = {"cpu": 4, "other": 4}


def outcome(find):
    try:
        return find()
    except (RuntimeError, IndexError) as error:
        return type(error)


def assert_equal(mask, grid):
    keep = checked(mask)
    expected = outcome(lambda: coverage_by_chunks(keep, grid))
    found = outcome(lambda: intervals.coverage(mask, keep, grid))
    if isinstance(expected, type):
        return  # the mask itself fails for some score, which need not be looked at
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.expand_as(b), b)


FOUND = [70268, 1032658161]  # seeds that found something: reads at indices of 16 bits


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_random_programs(monkeypatch):
    """FLEXHOP_MASK_PROGRAMS says how many; seeds are fresh, and named by a failure."""
    first = secrets.randbelow(2**30)
    for seed in (*FOUND, *range(first, first + PROGRAMS)):
        rng = random.Random(seed)
        lengths = rng.choice([(200, 200), (257, 130), (64, 300), (384, 384)])
        block = rng.choice([(16, 16), (32, 64), (128, 128), (48, 20)])
        monkeypatch.setattr(intervals, "FEW", rng.choice([FEW, {"other": 1 << 14}]))
        monkeypatch.setattr(intervals, "COARSE", rng.choice([2, 4]))
        mask = Program(seed, max(lengths), rng.choice([4, 8, 14, 25]), rows=seed not in FOUND)
        size = rng.choice([1, 2])
        try:
            assert_equal(mask, Grid(size, size, *lengths, block, CPU))
        except Exception as error:
            raise AssertionError(f"seed {seed}: lengths {lengths}, block {block}") from error


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_nodes_of_random_programs():
    """Every node of a program lies between the ends that its intervals have, box by box."""
    first, length, side = secrets.randbelow(2**30), 48, 16
    for seed in range(first, first + PROGRAMS // 3):
        mod = trace(Program(seed, length, 14, rows=True), CPU)
        numbers = all_numbers(mod, length)
        if numbers is None:
            continue
        count = torch.arange(0, length, side)
        b, h = torch.arange(2)[:, None, None, None], torch.arange(2)[:, None, None]
        inputs = {
            name: Interval(low, high, torch.int32, False, (0, last), frozenset(name), True, True)
            for name, low, high, last in (
                ("b", b, b, 1),
                ("h", h, h, 1),
                ("q", count[:, None], count[:, None] + side - 1, length - 1),
                ("k", count, count + side - 1, length - 1),
            )
        }
        found = evaluate(mod, inputs, intervals.Tables((side, side)))
        for node in mod.operators:
            if isinstance(found[node], Interval) and node in numbers:
                assert_between(seed, node, numbers[node], found[node], side)


def all_numbers(mod, length):
    """Every node at every score, [B, H, Q, K], by the mod's own operators."""
    import torch.fx

    names = list(mod.inputs)
    results = [n for n in mod.operators if n.meta["val"].dim() == 0]

    def run(*indices):
        known = dict(zip(mod.inputs.values(), indices, strict=True)) | dict(mod.captures)
        for node in mod.operators:
            args = torch.fx.map_arg(node.args, known.__getitem__)
            kwargs = torch.fx.map_arg(node.kwargs, known.__getitem__)
            known[node] = node.target(*args, **kwargs)
        return tuple(known[node] for node in results)

    for number in (3, 2, 1, 0):
        run = torch.vmap(run, in_dims=tuple(0 if n == number else None for n in range(4)))
    sizes = {"b": 2, "h": 2, "q": length, "k": length}
    from flexhop.compat.mods.indexing import IndexMode

    try:
        with IndexMode(), torch.no_grad():
            found = run(*(torch.arange(sizes[name], dtype=torch.int32) for name in names))
    except (RuntimeError, IndexError):
        return None
    return dict(zip(results, found, strict=True))


def assert_between(seed, node, numbers, interval, side):
    boxes = numbers.unflatten(3, (-1, side)).unflatten(2, (-1, side)).movedim(3, 4)
    low, high = (torch.as_tensor(end)[..., None, None] for end in (interval.low, interval.high))
    nan = torch.as_tensor(interval.nan)[..., None, None]
    is_nan = boxes != boxes
    between = (boxes >= low) & (boxes <= high)
    assert bool(torch.where(is_nan, nan, between).all()), (seed, node, interval)
    if interval.tight:
        kept = torch.where(is_nan, torch.full_like(boxes, 0), boxes)
        assert bool(((kept == low).flatten(4).any(4) & (kept == high).flatten(4).any(4)).all())
    if boxes.dtype == torch.bool:
        some, miss = (torch.as_tensor(flag) for flag in (interval.some, interval.miss))
        assert bool((boxes.flatten(4).any(4) | ~some).all()), (seed, node)
        assert bool(((~boxes).flatten(4).any(4) | ~miss).all()), (seed, node)


IDS = torch.sort(torch.randint(0, 9, (300,), generator=torch.Generator().manual_seed(0))).values
FLAGS = torch.arange(300) % 97 == 5
ROWS = torch.randn(17, 17, generator=torch.Generator().manual_seed(5))
NAMED = {
    "causal": masks.causal,
    "window": masks.sliding_window(40),
    "document": masks.packed_causal(IDS),
    "global": lambda b, h, q, k: (q - k).abs().le(20) | FLAGS[q] | FLAGS[k],
    "dilated": lambda b, h, q, k: (q >= k) & ((q - k) % 4 == 0),
    "natten": masks.natten_2d(17, 17, 5, 5),
    "by head": lambda b, h, q, k: (q - k).abs() <= 7 * h,
    "by batch": lambda b, h, q, k: IDS[q] + b == IDS[k],
    "nothing": lambda b, h, q, k: q < 0 * k,
    "float": lambda b, h, q, k: (q - k) * 0.01 < (h + 1).float().sqrt() * 0.7,
    "function of a float": lambda b, h, q, k: torch.sin(q * 0.1) > torch.cos(k * 0.1),
    "mutates": lambda b, h, q, k: (q - k).add_(3) > 5,
    "padded": lambda b, h, q, k: (
        pad(ROWS[q // 17][None, None], (2, 1), mode="circular")[0, 0, k % 20] > 0
    ),
    "short table": lambda b, h, q, k: IDS[:200][q.clamp(max=199)] == IDS[:200][k % 200],
}


@pytest.mark.parametrize("mask", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("lengths", [(289, 289), (100, 257)])
def test_named_masks(mask, lengths, monkeypatch):
    for few in (FEW, {"other": 1 << 14}):
        monkeypatch.setattr(intervals, "FEW", few)
        for block in ((16, 16), (48, 100)):
            assert_equal(mask, Grid(2, 3, *lengths, block, CPU))


def test_heads_that_a_mask_ignores_cost_nothing(monkeypatch):
    found = intervals.coverage(NAMED["dilated"], NAMED["dilated"], Grid(4, 8, 64, 64, (8, 8), CPU))
    assert found[0].shape == (1, 1, 8, 8)
    mask = create_block_mask(NAMED["by head"], 2, 3, 64, 64, "cpu", 16)
    assert mask.kv_indices.shape == (2, 3, 4, 4) and mask.kv_indices.stride() == (0, 16, 4, 1)


@pytest.mark.parametrize("name", ["causal", "window", "document", "by head", "nothing"])
def test_no_score_is_looked_at(name, monkeypatch):
    def refuse(*_):
        raise AssertionError("a score was looked at")

    monkeypatch.setattr(intervals._Search, "_scores", refuse)
    monkeypatch.setattr(intervals, "coverage_by_chunks", refuse)
    mask = masks.document(IDS) if name == "document" else NAMED[name]
    create_block_mask(mask, 1, 3, 300, 300, "cpu", 32)


def test_a_read_out_of_range_is_an_error():
    short = IDS[:100]
    with pytest.raises(IndexError, match="out of"):
        create_block_mask(lambda b, h, q, k: short[q] == short[k], 1, 1, 200, 200, "cpu", 32)


def test_nothing_of_fake_tensors_is_looked_at():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        mask = create_block_mask(NAMED["dilated"], 1, 1, 256, 256, "cpu", 64)
    assert mask.kv_indices.shape == (1, 1, 4, 4)


def test_ranges_know_no_tables():
    mod = trace(NAMED["document"], CPU)
    forms = Forms(mod, {"b": 1, "h": 1, "q": 300, "k": 300})
    assert forms.depends_on(mod.result) == {"q", "k"}
