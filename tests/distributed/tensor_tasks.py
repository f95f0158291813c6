"""What the ranks of a fleet run with DTensors: heads and batches divided, the sequence whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

import flexhop
import flexhop.distributed as sharded
from flexhop import masks
from tests.distributed.meshes import make_mesh
from tests.distributed.problems import DEVICE
from tests.distributed.tasks import AUX, assert_equal

LENGTH, HEADS, KV_HEADS, WIDTH = 130, 8, 4, 8
PLACEMENTS = {
    "heads": [Replicate(), Shard(1)],
    "batch and heads": [Shard(0), Shard(1)],
    "batch": [Shard(0), Replicate()],
    "heads twice": [Shard(1), Shard(1)],
    "replicated": [Replicate(), Replicate()],
}


def _whole(kv_heads: int) -> tuple[list[Tensor], Any, Tensor]:
    """query, key, value, slopes, sinks; a mask that differs by batch and head; a gradient."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)

    operands = [normal(2, n, LENGTH, WIDTH) for n in (HEADS, kv_heads, kv_heads)]
    windows = torch.arange(1, 2 * HEADS + 1, device=DEVICE).view(2, HEADS) * 9

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return masks.causal(b, h, q, k) & (q - k < windows[b, h])

    mask = flexhop.create_block_mask(
        mask_mod, 2, HEADS, LENGTH, LENGTH, device=DEVICE, BLOCK_SIZE=16
    )
    return [*operands, normal(2, HEADS), normal(HEADS)], mask, normal(2, HEADS, LENGTH, WIDTH)


def _attend(
    query: Any, key: Any, value: Any, slopes: Any, sinks: Any, mask: Any, dropout_p: float = 0
) -> Any:
    seed = torch.tensor([8, 15], device=DEVICE) if dropout_p else None

    def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s - slopes[b, h].exp() * (q - k)

    out, aux = flexhop.flex_attention(
        query, key, value, alibi, mask, enable_gqa=True, return_aux=AUX, sinks=sinks,
        dropout_p=dropout_p, dropout_seed=seed,
    )  # fmt: skip
    # A compiled graph of DTensors wants a gradient for every result that could have one.
    return out, aux.lse.detach(), aux.max_scores


def _reference(
    leaves: list[Tensor], mask: Any, grad: Tensor, dropout_p: float = 0
) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in leaves]
    results = _attend(*leaves, mask, dropout_p)
    return [*(t.detach() for t in results), *torch.autograd.grad(results[0], leaves, grad)]


def full(tensor: Any) -> Tensor:
    """All of a tensor, or of the one that ranks have parts of."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def check_placements(
    name: str, *, backend: str | None = None, kv_heads: int = KV_HEADS, captures: str = "plain",
    dropout_p: float = 0,
) -> None:  # fmt: skip
    """DTensor operands, eager or compiled, captured tensors plain or DTensors."""
    mesh = make_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "tp"))
    placements = PLACEMENTS[name]
    of_keys = [p if kv_heads > 1 or p != Shard(1) else Replicate() for p in placements]
    leaves, mask, grad = _whole(kv_heads)
    exact = _reference(leaves, mask, grad, dropout_p)
    parts: list[Any] = [
        distribute_tensor(t, mesh, p).requires_grad_()
        for t, p in zip(leaves[:3], (placements, of_keys, of_keys), strict=True)
    ]
    tail: list[Any] = [t.clone().requires_grad_() for t in leaves[3:]]
    if captures == "dtensor":
        tail = [distribute_tensor(t, mesh, [Replicate()] * 2).requires_grad_() for t in leaves[3:]]
    call = _attend if backend is None else torch.compile(_attend, fullgraph=True, backend=backend)
    results = call(*parts, *tail, mask, dropout_p)
    assert tuple(results[0].placements) == tuple(placements)
    whole_grad = distribute_tensor(grad, mesh, placements)
    grads = torch.autograd.grad(results[0], [*parts, *tail], whole_grad)
    assert_equal([full(t) for t in (*results, *grads)], exact)


def check_captured_dtensors() -> None:
    """A mod that reads a DTensor, eager."""
    check_placements("batch and heads", captures="dtensor")


def check_shared_keys() -> None:
    """One key head for all ranks."""
    check_placements("batch and heads", kv_heads=1)


def check_dropout() -> None:
    """The mask of one process."""
    check_placements("batch and heads", dropout_p=0.3)


def check_compiled() -> None:
    """One graph, no gather."""
    check_placements("batch and heads", backend="aot_eager")


def check_local_map() -> None:
    """The recipe of the documentation: mods and mask shifted by hand."""
    mesh = make_mesh(DEVICE.type, (4,), mesh_dim_names=("tp",))
    leaves, mask, grad = _whole(KV_HEADS)
    exact = _reference([*leaves[:4], torch.full_like(leaves[4], -torch.inf)], mask, grad)
    slopes = leaves[3].clone().requires_grad_()
    captured = sharded.sum_gradient(slopes, mesh.get_group().group_name)

    def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s - captured[b, h].exp() * (q - k)

    def local(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = query.size(1)
        first = mesh.get_local_rank() * heads
        return flexhop.flex_attention(
            query, key, value, sharded.shift_score_mod(alibi, head=first),
            sharded.local_block_mask(mask, batches=(0, 2), heads=(first, heads)), enable_gqa=True,
        )  # fmt: skip

    by_head = [Shard(1)]
    parts = [distribute_tensor(t, mesh, by_head).requires_grad_() for t in leaves[:3]]
    out = local_map(local, out_placements=by_head, device_mesh=mesh)(*parts)
    grads = torch.autograd.grad(out, [*parts, slopes], distribute_tensor(grad, mesh, by_head))
    assert_equal([full(t) for t in (out, *grads)], [exact[0], *exact[3:7]])


def refusal(query: list[Any], key: list[Any]) -> str:
    """What is said of these placements, which is not what a hang says."""
    mesh = make_mesh(DEVICE.type, (2, 2))
    q = distribute_tensor(torch.randn(2, 6, 16, 8), mesh, query)
    k = distribute_tensor(torch.randn(2, 3, 16, 8), mesh, key)
    try:
        flexhop.flex_attention(q, k, k, enable_gqa=True)
    except flexhop.errors.PlacementError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def refuse_partial() -> str:
    """A query that is a sum of the ranks' tensors."""
    mesh = make_mesh(DEVICE.type, (4,))
    query = DTensor.from_local(torch.randn(1, 4, 16, 8), mesh, [Partial()])
    try:
        flexhop.flex_attention(query, query, query)
    except flexhop.errors.PlacementError as error:
        return str(error)
    raise AssertionError("nothing was refused")
