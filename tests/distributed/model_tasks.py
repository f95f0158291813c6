"""A model over data and tensor parallel ranks, and attention on a mesh in a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import flexhop
import flexhop.distributed as sharded
from flexhop import masks
from tests.distributed.meshes import make_mesh, mesh_of
from tests.distributed.problems import DEVICE, Sizes, find, make_whole
from tests.distributed.tasks import assert_equal, attend
from tests.distributed.tensor_tasks import full

LENGTH, HEADS, KV_HEADS, WIDTH, BATCH = 70, 4, 2, 8, 4


class _Attention(nn.Module):
    """Grouped heads, a learned slope for each, and a window for each."""

    def __init__(self) -> None:
        super().__init__()
        size = HEADS * WIDTH
        self.query = nn.Linear(size, size, bias=False)
        self.key, self.value = (nn.Linear(size, KV_HEADS * WIDTH, bias=False) for _ in range(2))
        self.out = nn.Linear(size, size, bias=False)
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.7, HEADS))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )

        def alibi(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s - self.slopes[h] * (i - j)

        heads = flexhop.flex_attention(q, k, v, alibi, mask, enable_gqa=True)
        return self.out(heads.transpose(1, 2).flatten(2))


def _make_layers() -> tuple[nn.ModuleList, Any, Tensor]:
    """Two layers, a mask that differs by head, a batch."""
    torch.manual_seed(11)
    layers = nn.ModuleList(_Attention() for _ in range(2)).to(DEVICE, torch.float64)
    windows = torch.tensor([5, 12, 40, LENGTH], device=DEVICE)
    mask = flexhop.create_block_mask(
        lambda b, h, q, k: masks.causal(b, h, q, k) & (q - k < windows[h]),
        None, HEADS, LENGTH, LENGTH, device=DEVICE, BLOCK_SIZE=16,
    )  # fmt: skip
    return layers, mask, torch.randn(BATCH, LENGTH, HEADS * WIDTH, dtype=torch.float64).to(DEVICE)


def _loss(layers: nn.ModuleList, x: Tensor, mask: Any) -> Tensor:
    for layer in layers:
        x = x + layer(x, mask)
    return x.square().mean()


def check_data_and_heads() -> None:
    """FSDP2 over pairs of ranks that divide the batch, heads divided within a pair."""
    layers, mask, x = _make_layers()
    loss = _loss(layers, x, mask)
    loss.backward()
    exact = [loss.detach(), *(p.grad for p in layers.parameters())]
    layers, mask, x = _make_layers()
    mesh = make_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "tp"))
    columns = ColwiseParallel(use_local_output=False)
    plan = dict.fromkeys(("query", "key", "value"), columns) | {"out": RowwiseParallel()}
    for layer in layers:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    own = x.chunk(2)[mesh.get_local_rank("dp")]
    loss = _loss(layers, own, mask)
    loss.backward()
    dist.all_reduce(loss, group=mesh.get_group("dp"))
    found = [loss.detach() / 2, *(full(p.grad) for p in layers.parameters())]
    assert_equal(found, exact)


def check_graph(method: str) -> None:
    """Forward and backward pass in a CUDA graph, with keys that travel, for new numbers."""
    whole = make_whole(find("window, learned ALiBi"), Sizes())
    plan = sharded.make_plan(
        whole.block_mask, dist.get_world_size(), layout="contiguous", method=method
    )
    with sharded.context_parallel(plan, mesh_of()) as context:
        leaves = [context.shard(t, dim=2).requires_grad_() for t in whole.operands]
        leaves += [t.clone().requires_grad_() for t in whole.captures]
        grad = context.shard(whole.grads[0], dim=2)

        def step() -> list[Tensor]:
            out, *_ = attend(whole, leaves[:3], leaves[3:])
            return [out, *torch.autograd.grad(out, leaves, grad)]

        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        with torch.no_grad():
            for leaf in leaves:
                leaf.mul_(0.7).add_(0.1)
        graph.replay()
        found = [t.clone() for t in results]
        assert_equal(found, [t.detach() for t in step()])
