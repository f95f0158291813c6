"""Block masks in graphs are those of eager calls, bit by bit."""

import functools
import os
import random
import secrets

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import flexhop
from flexhop import BlockMask, create_block_mask
from flexhop.block_mask import graphed
from flexhop.block_mask.creation import _lists, checked
from flexhop.block_mask.fields import TENSOR_FIELDS
from flexhop.block_mask.graphed import Mask
from flexhop.block_mask.listing import listed
from flexhop.block_mask.scores import Grid, coverage_by_chunks
from flexhop.errors import VmapError
from tests.mask_programs import Program
from tests.unit.test_mask_coverage import NAMED, PROGRAMS, outcome

CPU = torch.device("cpu")
GRAPHS = int(os.environ.get("FLEXHOP_MASK_GRAPHS", str(PROGRAMS)))
SIDES = [(True, True), (True, False), (False, True)]


def assert_same(found: BlockMask, expected: BlockMask) -> None:
    for name in TENSOR_FIELDS:
        a, b = getattr(found, name), getattr(expected, name)
        assert (a is None and b is None) or torch.equal(a, b), name


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_random_programs():
    """FLEXHOP_MASK_GRAPHS says how many; seeds are fresh, and named by a failure."""
    first = secrets.randbelow(2**30)
    for seed in range(first, first + GRAPHS):
        rng = random.Random(seed)
        lengths = rng.choice([(200, 200), (257, 130), (64, 300), (384, 384)])
        block = rng.choice([(16, 16), (32, 64), (128, 128), (48, 20)])
        mask = Program(seed, max(lengths), rng.choice([4, 8, 14, 25]))
        size, sides = rng.choice([1, 2]), rng.choice(SIDES)
        grid = Grid(size, size, *lengths, block, CPU)
        covered = outcome(lambda m=mask, g=grid: coverage_by_chunks(checked(m), g))
        if isinstance(covered, type):
            continue  # the mask itself fails for some score
        expected = listed(covered, grid, sides, in_graph=False)
        found = _lists(Mask(mask, ()), grid, sides, in_graph=True)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b), f"seed {seed}: lengths {lengths}, block {block}"


@pytest.mark.parametrize(
    "name", ["causal", "document", "by head", "dilated", "padded", "short table"]
)
def test_compiled(name):
    """Through Dynamo and AOTAutograd."""
    create = functools.partial(
        create_block_mask, NAMED[name], 2, 3, 289, 300, "cpu", BLOCK_SIZE=(16, 32)
    )
    torch._dynamo.reset()
    assert_same(torch.compile(create, fullgraph=True, backend="aot_eager")(), create())


MAPPED = {
    "nothing": lambda ids, n: lambda b, h, q, k: q >= k,
    "a number": lambda ids, n: lambda b, h, q, k: (q >= k) & (k < n),
    "a table": lambda ids, n: lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k),
    "both": lambda ids, n: lambda b, h, q, k: (ids[q] == ids[k]) & (k < n + b),
}
SAMPLES = (
    torch.arange(160).repeat(3, 1) // torch.tensor([[7], [50], [90]]),
    torch.tensor([9, 80, 160]),
)


def lists_of_sample(kind, batch, *sample):
    mask = create_block_mask(MAPPED[kind](*sample), batch, 1, 160, 160, "cpu", BLOCK_SIZE=16)
    return tuple(getattr(mask, name) for name in TENSOR_FIELDS if getattr(mask, name) is not None)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", MAPPED)
def test_compiled_under_vmap(kind, batch):
    """Each sample of torch.vmap has its own mask."""
    torch._dynamo.reset()
    create = functools.partial(lists_of_sample, kind, batch)
    compiled = torch.compile(torch.vmap(create), fullgraph=True, backend="aot_eager")
    found = compiled(*SAMPLES)
    for i, sample in enumerate(zip(*SAMPLES, strict=True)):
        for a, b in zip(found, create(*sample), strict=True):
            assert torch.equal(a[i], b)


def test_eager_masks_of_a_mapped_tensor_are_refused():
    lists = torch.vmap(functools.partial(lists_of_sample, "nothing", 1))(*SAMPLES)
    assert all(len(each) == 3 for each in lists)
    with pytest.raises(VmapError, match="captures in an eager create_block_mask; fold it into"):
        torch.vmap(functools.partial(lists_of_sample, "a number", 1))(*SAMPLES)


def no_scores(*_):
    raise AssertionError("a score was looked at")


@pytest.mark.parametrize("name", ["causal", "window", "by head", "nothing"])
def test_stretches_look_at_no_score(name, monkeypatch):
    for function in ("compiled_coverage", "unknown_blocks"):
        monkeypatch.setattr(graphed, function, no_scores)
    largest = elements_of(NAMED[name], 4096)
    assert largest <= 64 * 4096  # vectors of positions, and grids of blocks; not 4096 ** 2


@pytest.mark.parametrize("name", ["by head", "dilated"])
def test_symbolic_lengths(name, monkeypatch):
    """One graph for all lengths; its lists have room for one block more."""
    torch._dynamo.reset()
    monkeypatch.setattr(graphed, "compiled_coverage", no_scores)
    create = torch.compile(create_block_mask, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ((300, 300), (257, 130), (129, 640), (512, 512)):
        arguments = (NAMED[name], 1, 3, *lengths, "cpu", 64)
        found, expected = create(*arguments), create_block_mask(*arguments)
        assert found.kv_indices.shape[-1] == expected.kv_indices.shape[-1] + 1
        for blocks in ("kv", "full_kv", "q", "full_q"):
            counts, indices = (f"{blocks}_num_blocks", f"{blocks}_indices")
            count = getattr(expected, counts)
            rest = getattr(found, counts)[..., count.shape[-1] :]
            assert torch.equal(getattr(found, counts)[..., : count.shape[-1]], count)
            assert not rest.any()
            rows = (listed_of(getattr(m, indices), count) for m in (found, expected))
            assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))


def listed_of(indices, count):
    """The listed blocks of every row that `count` has."""
    rows = indices[..., : count.shape[-1], :].flatten(0, -2)
    return [row[:n] for row, n in zip(rows, count.flatten().tolist(), strict=True)]


def test_lists_of_a_compiled_function_have_the_rows_that_exist():
    """They have room for one more, which users must not see."""
    create = torch.compile(create_block_mask, backend="aot_eager", dynamic=True, fullgraph=True)
    found, expected = (
        f(flexhop.masks.causal, None, None, 300, 300, "cpu") for f in (create, create_block_mask)
    )
    assert found.to_dense().shape == (1, 1, 3, 3)
    assert found.same_structure(expected)
    for key in (-1, 2, slice(1, None), slice(1, 3), slice(None)):
        part = found[:, :, key]
        assert part.seq_lengths == expected[:, :, key].seq_lengths
        assert part.same_structure(expected[:, :, key])
    with pytest.raises(IndexError):
        found[:, :, 3]


def elements_of(mask, length: int) -> int:
    """The most elements that a tensor has in the graph of a mask in blocks of 64."""
    sizes: list[int] = []

    def look(graph, inputs):
        found = [node.meta.get("val") for node in graph.graph.nodes]
        sizes.extend(value.numel() for value in found if isinstance(value, torch.Tensor))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    create = functools.partial(create_block_mask, mask, 1, 3, length, length, "cpu", 64)
    torch.compile(create, fullgraph=True, backend=aot_autograd(fw_compiler=look))()
    return max(sizes)
