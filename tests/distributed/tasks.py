"""What the ranks of a fleet run. Every rank computes the whole as well, and compares its part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flexhop
import flexhop.distributed as sharded
from flexhop.distributed import exchange
from tests.distributed.meshes import mesh_of
from tests.distributed.problems import HEADS, Sizes, Whole, find, make_whole

EXACT = 1e-12  # of norms, in fp64: sums of a few hundred terms in another order
AUX = flexhop.AuxRequest(lse=True, max_scores=True)


def attend(whole: Whole, operands: Any, captures: Any, **more: Any) -> tuple[Tensor, ...]:
    """out, lse, max_scores."""
    out, aux = flexhop.flex_attention(
        *operands,
        whole.score_mod(captures),
        whole.block_mask,
        enable_gqa=True,
        return_aux=AUX,
        **more,
    )
    return out, aux.lse, aux.max_scores


def differentiate(
    results: tuple[Tensor, ...], leaves: list[Tensor], grads: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Gradients of a loss that weighs out and lse; rows that see nothing have none of lse."""
    out, lse, _ = results
    weights = torch.where(lse.detach() == -torch.inf, 0.0, grads[1])
    return list(torch.autograd.grad((out, lse), leaves, (grads[0], weights.to(lse.dtype))))


def reference(whole: Whole, **more: Any) -> list[Tensor]:
    """Results and gradients of one process."""
    leaves = [t.clone().requires_grad_() for t in (*whole.operands, *whole.captures)]
    results = attend(whole, leaves[:3], leaves[3:], **more)
    return [*(t.detach() for t in results), *differentiate(results, leaves, whole.grads)]


def on_mesh(whole: Whole, context: Any, **more: Any) -> list[Tensor]:
    """The same of the mesh, put together."""
    with context as rank:
        parts = [rank.shard(t, dim=2).requires_grad_() for t in whole.operands]
        captures = [t.clone().requires_grad_() for t in whole.captures]
        results = attend(whole, parts, captures, **more)
        grads = differentiate(results, [*parts, *captures], rank.shard(*whole.grads, dim=2))
        found = [*(t.detach() for t in results), *grads[:3]]
        return [*(rank.unshard(t, dim=2) for t in found), *grads[3:]]


def assert_equal(found: list[Tensor], exact: list[Tensor], bound: float = EXACT) -> None:
    """Compare by norms, and -inf by place."""
    for number, (a, b) in enumerate(zip(found, exact, strict=True)):
        assert a.shape == b.shape, (number, a.shape, b.shape)
        hidden = b == -torch.inf
        assert torch.equal(a == -torch.inf, hidden), f"-inf in tensor {number}"
        a, b = (t.double().masked_fill(hidden, 0) for t in (a, b))
        error = float((a - b).norm() / b.norm().clamp(min=1e-30)) if b.any() else float(a.norm())
        assert error <= bound, f"tensor {number}: {error:.1e}"


def check_methods(name: str | int, choices: list[dict[str, Any]], sizes: Sizes) -> None:
    """One problem with several plans against one process."""
    whole = make_whole(find(name), sizes)
    exact = reference(whole)
    for choice in choices:
        plan = sharded.make_plan(
            whole.block_mask, dist.get_world_size(), length=sizes.length, **choice
        )
        try:
            assert_equal(on_mesh(whole, sharded.context_parallel(plan, mesh_of())), exact)
        except Exception as error:
            raise AssertionError(f"{name}, {choice}") from error


def check_two_dimensions(name: str) -> None:
    """Sequence by two, heads by two."""
    whole = make_whole(find(name), Sizes())
    plan = sharded.make_plan(whole.block_mask, 4, length=203, heads=2, layout="greedy")
    context = sharded.context_parallel(plan, mesh_of(2, 2))
    assert_equal(on_mesh(whole, context), reference(whole))


def count_bytes(name: str, method: str) -> tuple[int, int]:
    """Bytes that this rank received forward, and those that the plan foretold."""
    whole = make_whole(find(name), Sizes(length=256))
    shape = sharded.AttentionShape(HEADS, 2, 8, 6, batch=2, itemsize=8)
    plan = sharded.make_plan(
        whole.block_mask, dist.get_world_size(), length=256, method=method, layout="contiguous",
        shape=shape,
    )  # fmt: skip
    with sharded.context_parallel(plan, mesh_of()) as context, torch.no_grad():
        parts = [context.shard(t, dim=2) for t in whole.operands]
        exchange.RECEIVED.clear()
        attend(whole, parts, whole.captures)
    units = next(iter(plan.masks.values())).cost.received[dist.get_rank()]
    return sum(exchange.RECEIVED.values()), units * plan.unit * shape.key_bytes
