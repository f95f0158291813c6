"""Reads of computed rows: the element is computed from the elements that it needs."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flexhop.compat.compilation import copy_of
from flexhop.ops.graphs import subgraphs
from flexhop.ops.graphs.picks import pick_first
from flexhop.ops.graphs.subgraphs import trace_score

SIZES = (3, 4, 5)
PLACES = list(itertools.product([0, 2], [0, 1, 2], [0, 2], [0, 1]))


def plain_graph(mod, captures, monkeypatch):
    """The graph of a mod, as it was traced."""
    with monkeypatch.context() as patch:
        patch.setattr(subgraphs, "pick_first", lambda graph: None)
        query = torch.randn(1, 3, 4, 8, dtype=torch.float64)
        return trace_score(mod, query, captures)


def assert_picks_alike(mod, captures, monkeypatch):
    """The rewritten graph computes the same numbers; returns it."""
    plain = plain_graph(mod, captures, monkeypatch)
    picked = copy_of(plain)
    pick_first(picked)
    for place in PLACES:
        inputs = [torch.tensor(0.3, dtype=torch.float64)]
        inputs += [torch.tensor(index, dtype=torch.int32) for index in place]
        torch.testing.assert_close(
            picked(*inputs, *captures), plain(*inputs, *captures), rtol=1e-10, atol=1e-10
        )
    return picked


def largest(graph):
    """The largest computed tensor of those that depend on a score."""
    nodes = graph.graph.find_nodes(op="placeholder")[:5]
    moved = subgraphs.dependents(nodes)
    return max(node.meta["val"].numel() for node in moved if node.op == "call_function")


def spellings():
    """(W @ x + b)[h] in many ways: of W [3, 4], b [3] and a row x [4]."""
    yield "matrix times vector", lambda w, b, x, h: (w @ x + b)[h]
    yield "mv", lambda w, b, x, h: torch.mv(w, x)[h] + b[h]
    yield "addmv", lambda w, b, x, h: torch.addmv(b, w, x, beta=2, alpha=3)[h]
    yield "vector times matrix", lambda w, b, x, h: (x @ w.T + b)[h]
    yield "linear", lambda w, b, x, h: F.linear(x, w, b)[h]
    yield "linear of a batch", lambda w, b, x, h: F.linear(x[None], w, b)[0, h]
    yield "addmm", lambda w, b, x, h: torch.addmm(b, x[None], w.T, alpha=0.5)[0][h]
    yield "mm", lambda w, b, x, h: (torch.mm(w, x[:, None]) + b[:, None])[h, 0]
    yield "bmm", lambda w, b, x, h: torch.bmm(w[None], x[None, :, None])[0, h, 0] + b[h]
    yield (
        "baddbmm",
        lambda w, b, x, h: torch.baddbmm(b[:, None], w[None], x[None, :, None])[0, h, 0],
    )
    yield "einsum", lambda w, b, x, h: (torch.einsum("hi,i->h", w, x) + b)[h]
    yield "product and sum", lambda w, b, x, h: ((w * x).sum(-1) + b)[h]
    yield "sum that keeps", lambda w, b, x, h: ((w * x).sum(1, keepdim=True) + b[:, None])[h, 0]
    yield "mean", lambda w, b, x, h: (w * x).mean(-1)[h]
    yield "largest", lambda w, b, x, h: (w * x).amax(-1)[h] - (w * x).amin(1)[h - 3]
    yield "product", lambda w, b, x, h: (w * x).prod(-1)[h]
    yield "norm", lambda w, b, x, h: torch.linalg.vector_norm(w * x, dim=-1)[h]
    yield "variance", lambda w, b, x, h: (w * x).var(-1)[h] + (w * x).logsumexp(1)[h]
    yield "where", lambda w, b, x, h: torch.where(b > 0, w @ x, b - (w @ x))[h]
    yield "choice of rows", lambda w, b, x, h: torch.where(x[0] > 0, w @ x, (w + 1) @ x)[h]
    yield "function", lambda w, b, x, h: torch.tanh(F.gelu((w @ x).abs() ** 1.5) + b)[h]
    yield "stack", lambda w, b, x, h: torch.stack([w @ x, b, (w * x)[:, 1]])[0][h]
    yield "cat", lambda w, b, x, h: torch.cat([b, w @ x])[4] + torch.cat([w, w * x], 1)[h, 5]
    yield "softmax", lambda w, b, x, h: ((w * x).softmax(-1) @ x)[h]
    yield "sums so far", lambda w, b, x, h: (w * x).cumsum(1)[h, 2] + (w * x).log_softmax(1)[h, 1]
    yield "views", lambda w, b, x, h: (
        (w * x).reshape(3, 2, 2).permute(2, 0, 1).transpose(0, 1)[h].sum()
        + (w * x).T.unsqueeze(1).expand(4, 2, 3)[1, 0][h] + (w * x)[:, None].squeeze(1)[h, 3]
    )  # fmt: skip
    yield "counted from the end", lambda w, b, x, h: (w @ x + b)[-1] + (w @ x)[h - 3]
    yield "two steps", lambda w, b, x, h: ((w * x)[h] * w[h])[2] + (w.T * b)[h, h]
    yield "places", lambda w, b, x, h: (w * x)[torch.stack([h, h * 0])][1, 2]


SPELLINGS = dict(spellings())


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_a_row(name, monkeypatch):
    torch.manual_seed(1)
    w, b, x = (torch.randn(s, dtype=torch.float64) for s in ((3, 4), (3,), (4,)))

    def mod(score, batch, h, q_idx, kv_idx, w, b, x):
        row = x * score + (q_idx - kv_idx) * 0.5
        return score + SPELLINGS[name](w, b, row, h)

    picked = assert_picks_alike(mod, (w, b, x), monkeypatch)
    assert largest(picked) <= 8, f"{name}: {picked.code}"


def test_work_on_captures_alone_stays_in_front_of_the_kernel(monkeypatch):
    table = torch.randn(3, 4, dtype=torch.float64)

    def mod(score, b, h, q_idx, kv_idx, table):
        return score + table.exp().cumsum(0)[h, q_idx] + table.softmax(-1)[h][kv_idx]

    picked = assert_picks_alike(mod, (table,), monkeypatch)
    assert (
        len(picked.graph.find_nodes(op="call_function", target=torch.ops.aten.cumsum.default)) == 1
    )
    assert picked.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor)


def test_a_network_is_computed_for_one_head(monkeypatch):
    """FIRE: one row of the last layer's weights, 32 numbers, not those of all heads."""
    network = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 3)).double()
    names, weights = zip(*network.named_parameters(), strict=True)

    def mod(score, b, h, q_idx, kv_idx, *weights):
        given = dict(zip(names, weights, strict=True))
        x = ((q_idx - kv_idx).abs() / (q_idx + 1.0)).double()
        return score + torch.func.functional_call(network, given, (x[None],))[h]

    picked = assert_picks_alike(mod, tuple(w.detach() for w in weights), monkeypatch)
    assert largest(picked) == 32


def test_numbers_keep_the_dtype_of_their_row(monkeypatch):
    """A row of float16 decides over a number of float32, but not one number over another."""
    row = torch.randn(3, dtype=torch.float16)

    def mod(score, b, h, q_idx, kv_idx, row):
        number = score.float() * 0.1
        return (
            score
            + (row * number)[h]
            + (row > number)[h]
            + (row.to(torch.bfloat16) @ row.to(torch.bfloat16)[:, None] * number)[0]
        )

    assert_picks_alike(mod, (row,), monkeypatch)


def _of_others(draw, pool, x):
    y = draw.choice([y for y in pool if _broadcasts(x, y)])
    target = draw.choice([torch.add, torch.mul, torch.maximum])
    return target(x, y) if draw.random() < 0.7 else torch.where(x > 0, x, y)


def _reduced(draw, pool, x):
    target, dim = draw.choice([torch.sum, torch.mean, torch.amax]), draw.randrange(x.dim())
    return target(x, dim, keepdim=draw.random() < 0.5)


def _viewed(draw, pool, x):
    dim = draw.randrange(x.dim())
    views = [
        lambda: x.permute(draw.sample(range(x.dim()), x.dim())),
        lambda: x.reshape(-1),
        lambda: x.unsqueeze(dim).squeeze(dim),
        lambda: x.unsqueeze(dim) if x.dim() < 4 else x.sum(dim),
        lambda: x.select(dim, draw.randrange(-x.size(dim), x.size(dim))),
        lambda: x.expand(2, *x.shape).sum(0),
    ]
    return draw.choice(views)()


def _along(draw, pool, x):
    dim = draw.randrange(x.dim())
    return x.softmax(dim) if draw.random() < 0.5 else x.cumsum(dim)


def _joined(draw, pool, x):
    dim = draw.randrange(x.dim())
    if x.numel() > 60 or x.dim() > 3:
        return x.sum(dim)
    if draw.random() < 0.5:
        return torch.cat([x, torch.cos(x)], dim)
    return torch.stack([x, x * 0.5], dim)


def _product(draw, pool, x):
    others = [z for z in pool if z.dim() in (1, 2) and z.size(0) == x.size(-1)]
    return x @ draw.choice(others) if others and x.dim() <= 2 else torch.tanh(x)


STEPS = [_of_others, _of_others, _reduced, _viewed, _viewed, _along, _joined, _product, _product]


def _step(draw, pool):
    """One more tensor, of those in the pool."""
    x = draw.choice(pool)
    if not x.dim():
        return torch.stack([x, torch.sin(x), draw.choice(pool).sum()])
    return draw.choice(STEPS)(draw, pool, x)


def _broadcasts(x, y):
    sizes = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return all(a == b or 1 in (a, b) for a, b in sizes) and max(x.dim(), y.dim()) < 5


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed, monkeypatch):
    """The order of random choices is the same in each trace."""
    torch.manual_seed(seed)
    captures = tuple(torch.randn(s, dtype=torch.float64) for s in ((3, 4), (4, 5), (4,), (5, 3)))

    def mod(score, b, h, q_idx, kv_idx, *captures):
        draw = random.Random(seed)
        pool = [score, (q_idx - kv_idx) * 0.25 + score, *captures]
        for _ in range(12):
            pool.append(_step(draw, pool))
        total = score
        for x in pool[-4:]:
            indices = [q_idx * 0, h * 0 + q_idx * 0 - 1, h * 0]
            total = total + x[tuple(draw.choice([0, -1, *indices]) for _ in x.shape)]
        return total

    assert_picks_alike(mod, captures, monkeypatch)
