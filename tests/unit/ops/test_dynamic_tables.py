"""Parts of mods as tables if lengths are dynamic: one graph for all lengths reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

import flexhop
from flexhop.analysis import name_of
from tests.unit.ops.support import quiet
from tests.unit.ops.test_tables import HEADS, SIDE, SQUARE, T5, swin, t5

pytestmark = quiet
READS = {"index", "add", "sub", "mul", "floor_divide", "div", "remainder"}


class Recorded:
    """A function compiled for dynamic shapes, and the graphs that reached the backend."""

    def __init__(self, function: Any) -> None:
        self.graphs: list[fx.GraphModule] = []
        backend = aot_autograd(fw_compiler=self._keep)
        self.run = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)

    def _keep(self, graph: fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(graph)
        return make_boxed_func(graph.forward)

    @property
    def operator(self) -> fx.Node:
        """The forward operator of the only forward graph."""
        (node,) = [
            n for graph in self.graphs for n in graph.graph.nodes
            if str(n.target) == "flexhop_attention"
        ]  # fmt: skip
        return node

    def functions(self, operand: int) -> set[str]:
        """The operators of a mod."""
        mod = getattr(self.operator.graph.owning_module, str(self.operator.args[operand].target))
        return {name_of(node) for node in mod.graph.nodes if node.op == "call_function"}

    def shapes(self) -> list[Any]:
        """Shapes of what the score_mod reads."""
        captures: Any = self.operator.args[8]
        values = [node.meta["val"] for node in captures]
        return [value.shape for value in values if isinstance(value, torch.Tensor)]


def check(function: Any, compiled: Recorded, inputs: list[Any]) -> None:
    """Results and gradients are those of the eager call."""
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    results = []
    for run in (function, compiled.run):
        out = run(*inputs)
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        results.append((out, *torch.autograd.grad(out, leaves, weights)))
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)


def dense(length: int, keys: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    sizes = (length, keys, keys)
    return [torch.randn(5, HEADS, n, 8, generator=generator).requires_grad_() for n in sizes]


def window(s, b, h, q, k, table, side):
    row, column = q // SIDE - k // SIDE + side - 1, q % SIDE - k % SIDE + side - 1
    return s + torch.sigmoid(table[row * (2 * side - 1) + column, h])


def two_distances(s, b, h, q, k, table):
    """Their product grows as the scores do, so each is a table."""
    rows, columns = torch.cos(0.3 * (q // 4 - k // 4)), torch.sin(0.1 * (q - k) ** 2)
    return s + table[0, h] * torch.tanh(rows * columns)


@pytest.mark.parametrize(
    ("mod", "capture", "numbers", "others"),
    [(t5, T5, (), set()), (swin, SQUARE, (), set()), (window, SQUARE, (SIDE,), set()),
     (two_distances, T5, (), {"tanh", "full"})],
    ids=["t5", "swin", "captured size", "two distances"],
)  # fmt: skip
def test_one_graph_reads_tables(mod, capture, numbers, others):
    capture = capture.detach().float().requires_grad_()

    def attend(query, key, value, capture, *numbers):
        score_mod = lambda s, b, h, q, k: mod(s, b, h, q, k, capture, *numbers)  # noqa: E731
        return flexhop.flex_attention(query, key, value, score_mod)

    compiled = Recorded(attend)
    for length, keys in ((48, 64), (33, 57), (64, 40)):
        check(attend, compiled, [*dense(length, keys), capture, *numbers])
    assert compiled.functions(3) <= READS | others
    for shape in compiled.shapes():
        assert sum(isinstance(size, torch.SymInt) for size in shape) < 2


def test_packed_sequences_read_tables_of_tokens():
    def attend(query, key, value, offsets, bias, kinds):
        return flexhop.varlen_attention(
            query, key, value, offsets,
            score_mod=lambda s, b, h, q, k: s + torch.sigmoid(bias[b, h, k]),
            mask_mod=lambda b, h, q, k: (kinds[b, k] > 0) | (q == k),
        )  # fmt: skip

    compiled = Recorded(attend)
    for lengths in ((20, 41, 3, 5), (60, 7, 1, 30, 2), (9, 70)):
        total, count = sum(lengths), len(lengths)
        operands = [torch.randn(total, HEADS, 8, requires_grad=True) for _ in range(3)]
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        bias = torch.randn(count, HEADS, max(lengths), requires_grad=True)
        kinds = torch.arange(count * max(lengths)).view(count, -1) % 3
        check(attend, compiled, [*operands, offsets, bias, kinds])
    assert compiled.functions(3) <= READS
    # One table of keys, and of queries the ends of their ranges and their positions.
    mask: Any = compiled.operator.args[9]
    assert all(node.meta["val"].dim() == 1 for node in mask)


def t5_buckets(far, narrow):
    steps = (torch.log1p(far.float()) * 3).to(torch.int32)
    return torch.where(far < 4, far, 4 + steps)


def looked_up(far, narrow):
    return narrow[narrow[far].int()].int()


@pytest.mark.parametrize("bucket", [t5_buckets, looked_up])
def test_packed_sequences_read_tables_of_distances(bucket):
    """Sequences are shorter than the packed tensor, and so are the tables that mods read."""

    def attend(query, key, value, offsets, weights, narrow):
        def bias(s, b, h, q, k):
            return s + torch.sigmoid(weights[bucket((q - k).abs(), narrow), h])

        return flexhop.varlen_attention(query, key, value, offsets, score_mod=bias)

    compiled = Recorded(attend)
    narrow = torch.arange(70).flip(0).to(torch.int8)
    for lengths in ((20, 41, 3, 5), (60, 7, 1, 30, 2), (9, 70)):
        total = sum(lengths)
        operands = [torch.randn(total, HEADS, 8, requires_grad=True) for _ in range(3)]
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        weights = torch.randn(200, HEADS, requires_grad=True)
        check(attend, compiled, [*operands, offsets, weights, narrow])
    assert any(len(shape) == 2 and shape[0] == HEADS for shape in compiled.shapes())
