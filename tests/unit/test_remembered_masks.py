"""Lists that are made from what is known of an equal mask are those of a mask seen first."""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexhop import and_masks, create_block_mask, masks, or_masks
from flexhop.block_mask import coverage, remembered
from flexhop.block_mask.creation import _lists, _remembered_lists
from flexhop.block_mask.scores import Grid

CPU = torch.device("cpu")
SIDES = (True, True)


@pytest.fixture(autouse=True)
def nothing_known():
    remembered.forget()
    yield
    remembered.forget()


class Count(TorchDispatchMode):
    """Counts operators that would launch kernels: not views, not allocations."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returns = [r.alias_info for r in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returns)
        if not is_view and "empty" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def documents(length, generator, most=9):
    ids = torch.randint(0, most, (length,), generator=generator).sort().values
    return ids.to(torch.int32)


def make_masks(length, generator):
    """Masks whose captured tensors are new in every call."""
    ids, unsorted = documents(length, generator), torch.randint(0, 5, (length,))
    flags = torch.rand(length, generator=generator) > 0.98
    windows = torch.randint(1, 90, (3,), generator=generator)
    real = torch.rand(2, length, generator=generator) > 0.3
    places = torch.arange(length) % 37
    table = torch.rand(length, length, generator=generator) > 0.5
    slopes = torch.rand(3, generator=generator)
    causal = masks.causal
    return {
        "causal": causal,
        "window": masks.sliding_window(40),
        "dilated": lambda b, h, q, k: (q >= k) & ((q - k) % 4 == 0),
        "neighbourhood": masks.natten_2d(17, 17, 5, 5),
        "window by head": lambda b, h, q, k: (q - k).abs() <= windows[h],
        "padding": lambda b, h, q, k: real[b, k] & (q >= k),
        "lengths": masks.padding(real.sum(1)),
        "documents": masks.document(ids),
        "packed": masks.packed_causal(ids),
        "unsorted": and_masks(masks.document(unsorted), masks.sliding_window(64)),
        "as transformers packs": lambda b, h, q, k: (ids[q] == ids[k]) & (places[k] <= places[q]),
        "flags": lambda b, h, q, k: (q - k).abs().le(20) | flags[q] | flags[k],
        "prefix": or_masks(causal, lambda b, h, q, k: k < windows[b]),
        "two positions": lambda b, h, q, k: table[q, k],
        "floats": lambda b, h, q, k: (q - k) * slopes[h] < torch.sin(k * 0.1) + 9,
    }


NAMES = list(make_masks(289, torch.Generator().manual_seed(0)))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", NAMES)
def test_equal_lists(name):
    generator = torch.Generator().manual_seed(1)
    for block, sides in (
        ((16, 16), SIDES),
        ((48, 20), (False, True)),
        ((128, 128), (True, False)),
    ):
        grid = Grid(2, 3, 289, 289, block, CPU)
        for _ in range(3):
            mask = make_masks(289, generator)[name]
            found = _remembered_lists(mask, grid, sides)
            expected = _lists(mask, grid, sides, in_graph=False)
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a.expand_as(b), b) and not a._is_view() and a.is_contiguous()


def known_programs():
    return [known.program for known in remembered._known.values()]


FEW_OPERATORS = {"documents": 48, "packed": 60, "window by head": 45, "lengths": 35}


@pytest.mark.parametrize("name", ["causal", "window", "dilated", "neighbourhood", *FEW_OPERATORS])
def test_few_operators(name):
    generator = torch.Generator().manual_seed(1)

    def create():
        with Count() as count:
            create_block_mask(make_masks(1024, generator)[name], 2, 3, 1024, 1024, "cpu")
        return count.names

    with Count() as inputs:
        make_masks(1024, generator)
    first, again = create(), create()
    assert len(again) - len(inputs.names) <= FEW_OPERATORS.get(name, 1)
    assert len(again) < len(first)


MOST_AT_FIRST = {"causal": 36, "window": 72, "lengths": 40, "documents": 70, "packed": 95}


@pytest.mark.parametrize("name", MOST_AT_FIRST)
def test_first_calls_take_few_operators(name):
    mask = make_masks(1024, torch.Generator().manual_seed(1))[name]
    with Count() as count:
        create_block_mask(mask, 2, 3, 1024, 1024, "cpu")
    assert len(count.names) <= MOST_AT_FIRST[name]


def test_masks_that_read_no_tensor_are_not_noted(monkeypatch):
    def by_constant(b, h, q, k):
        return q - k < torch.tensor(40)

    def with_branch(b, h, q, k):
        return q >= k if torch.tensor(True) else q < k

    noted = []
    recorder = remembered.Recorder
    monkeypatch.setattr(remembered, "Recorder", lambda held: noted.append(held) or recorder(held))
    for mask, notes in ((masks.causal, 0), (with_branch, 0), (by_constant, 1)):
        noted.clear()
        lists = [visible(mask)[0] for _ in range(4)]
        assert len(noted) == notes
        assert all(torch.equal(lists[0], found) for found in lists)


FACTOR = 3


def read_global(b, h, q, k):
    return q - k < 8 * FACTOR


class Window:
    reach = 16

    def __init__(self, table):
        self.table = table

    def near(self, distance):
        return distance.abs() < self.reach

    def __call__(self, b, h, q, k):
        return self.near(q - k) | self.table[k]


def by_default(b, h, q, k, window=20):
    return q - k < window


def visible(mask, **sizes):
    sizes = {"Q_LEN": 200, "KV_LEN": 200, "BLOCK_SIZE": 16} | sizes
    made = create_block_mask(mask, None, None, device="cpu", **sizes)
    return made.to_dense(), made.visited_area()


def test_changes_are_noticed(monkeypatch):
    table = torch.zeros(200, dtype=torch.bool)
    seen = {}

    def check(name, mask, **sizes):
        found, area = visible(mask, **sizes)
        remembered.forget()
        assert torch.equal(found, visible(mask, **sizes)[0]), name
        seen[name] = area

    def both(name, before, change, after=None):
        visible(before)
        change()
        check(name, before if after is None else after)

    both("global", read_global, lambda: monkeypatch.setitem(globals(), "FACTOR", 9))
    window = Window(table)
    both("class attribute", window, lambda: monkeypatch.setattr(Window, "reach", 60))
    both("attribute", window, lambda: setattr(window, "reach", 100))
    both("contents", window, lambda: table.data.fill_(True))
    both("method", window.__call__, lambda: table.zero_())
    both("default", by_default, lambda: monkeypatch.setattr(by_default, "__defaults__", (90,)))
    state = {"window": 10}
    both("dict", lambda b, h, q, k: q - k < state["window"], lambda: state.update(window=99))
    signs = [functools.partial(by_sign, zero) for zero in (0.0, -0.0)]
    both("signed zero", signs[0], lambda: None, signs[1])
    both("length", masks.causal, lambda: None)
    check("longer", masks.causal, Q_LEN=333)
    assert seen["global"] > 200 * 100 and seen["contents"] == 200 * 200


def by_sign(zero, b, h, q, k):
    return torch.copysign(torch.ones(()), torch.tensor(zero)) * q >= k


def test_lists_belong_to_the_caller():
    for mask in (masks.causal, masks.document(documents(256, None))):
        for _ in range(3):
            made = create_block_mask(mask, 1, 1, 256, 256, "cpu", 16)
            assert made.num_partial_blocks() > 0
            for tensor in made._tensors():
                tensor.fill_(0)


def test_functions_that_do_more_are_called_each_time():
    calls = []
    state = torch.nn.Linear(1, 1)

    def counting(b, h, q, k):
        calls.append(len(calls))
        return q >= k

    def module(b, h, q, k):
        return q >= k if state.training else q <= k

    for mask in (counting, module):
        for _ in range(2):
            create_block_mask(mask, 1, 1, 64, 64, "cpu", 16)
    assert len(calls) > 1
    assert not any(known_programs())
    state.eval()
    mask = create_block_mask(module, 1, 1, 64, 64, "cpu", 16)
    assert int(mask.kv_num_blocks[0, 0, 0] + mask.full_kv_num_blocks[0, 0, 0]) == 4


def test_modes():
    """What is found under inference mode serves outside of it; fake tensors are never kept."""
    from torch._subclasses import FakeTensorMode

    mask = masks.packed_causal(documents(256, None))
    with torch.inference_mode():
        first = create_block_mask(mask, 1, 1, 256, 256, "cpu", 16)
    second = create_block_mask(mask, 1, 1, 256, 256, "cpu", 16)
    assert first.same_structure(second) and not second.kv_indices.is_inference()
    assert len(known_programs()) == 1 and all(known_programs())
    with FakeTensorMode():
        create_block_mask(masks.causal, 1, 1, 256, 256, "cpu", 16)
    assert len(known_programs()) == 1


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(remembered, "MOST", 3)
    for window in range(6):
        visible(masks.sliding_window(window + 1))
    assert len(remembered._known) == 3
    monkeypatch.setattr(remembered, "LARGEST", 100)
    visible(masks.sliding_window(50))
    assert known_programs()[-1] is None
    monkeypatch.setattr(remembered, "TOGETHER", 5000)
    visible(masks.sliding_window(51))
    assert sum(known.size for known in remembered._known.values()) <= 5000


def test_unknown_blocks_are_settled_again(monkeypatch):
    """Blocks that are unknown in one call need not be so in another."""
    grid = Grid(1, 1, 289, 289, (16, 16), CPU)
    seen = []
    settled = coverage.settled
    monkeypatch.setattr(
        "flexhop.block_mask.creation.settled", lambda *args: seen.append(1) or settled(*args)
    )
    generator = torch.Generator().manual_seed(0)
    even, mixed = torch.zeros(289).int(), torch.randint(0, 900, (289,), generator=generator)
    for table in (even, mixed.int(), even, mixed.int()):
        found = _remembered_lists(lambda b, h, q, k, t=table: t[q] - t[k] == 7, grid, SIDES)
        mask = functools.partial(by_difference, table)
        expected = _lists(mask, grid, SIDES, in_graph=False)
        assert all(map(torch.equal, found, expected))
    assert 0 < len(seen) < 4


def by_difference(table, b, h, q, k):
    return table[q] - table[k] == 7
