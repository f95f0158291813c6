"""What goes wrong on a mesh, and what each rank is told."""

from __future__ import annotations

import os
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import flexhop
import flexhop.distributed as sharded
from flexhop import errors, masks
from tests.distributed.meshes import mesh_of
from tests.distributed.problems import DEVICE

LENGTH = 64


def _mask(length: int = LENGTH, window: int | None = None, device: Any = DEVICE) -> Any:
    mod = masks.causal if window is None else masks.sliding_window(window)
    return flexhop.create_block_mask(mod, None, None, length, length, device, BLOCK_SIZE=16)


def _said(error: type[Exception], call: Any) -> str:
    try:
        call()
    except error as found:
        return str(found)
    raise AssertionError(f"no {error.__name__}")


def unequal_batches() -> str:
    """Every rank has another batch, as at the end of a data set."""
    mask, rank = _mask(), dist.get_rank()
    plan = sharded.make_plan(mask, dist.get_world_size())
    with sharded.context_parallel(plan, mesh_of()):
        query = torch.randn(1 + rank, 2, plan.tokens, 8, device=DEVICE)
        return _said(
            errors.RankDisagreementError,
            lambda: flexhop.flex_attention(query, query, query, None, mask),
        )


def unequal_batches_compiled() -> str:
    """The same while compiling, before anything runs."""
    mask, rank = _mask(), dist.get_rank()
    plan = sharded.make_plan(mask, dist.get_world_size())
    attend = torch.compile(
        lambda q: flexhop.flex_attention(q, q, q, None, mask), backend="eager", fullgraph=True
    )
    with sharded.context_parallel(plan, mesh_of()):
        query = torch.randn(1 + rank, 2, plan.tokens, 8, dtype=torch.float64, device=DEVICE)
        return _said(errors.RankDisagreementError, lambda: attend(query))


def unequal_plans() -> str:
    """A mask that depends on the rank."""
    plan = sharded.make_plan(_mask(window=20 + 30 * dist.get_rank()), dist.get_world_size())
    return _said(errors.RankDisagreementError, lambda: sharded.context_parallel(plan, mesh_of()))


def wrong_meshes() -> list[str]:
    """Meshes that do not fit a plan."""
    world = dist.get_world_size()
    plans = [
        sharded.make_plan(_mask(), world * 2), sharded.make_plan(_mask(), world, heads=world),
        sharded.make_plan(_mask(), world),
    ]  # fmt: skip
    shapes: list[tuple[int, ...]] = [(world,), (world, 1), (1, world)]
    return [
        _said(errors.PlanError, lambda p=plan, s=shape: sharded.context_parallel(p, mesh_of(*s)))
        for plan, shape in zip(plans, shapes, strict=True)
    ]


def calls_outside_of_the_plan() -> dict[str, str]:
    """What the plan does not cover, each refused before anything travels."""
    mask = _mask()
    plan = sharded.make_plan(mask, dist.get_world_size())
    offsets = torch.tensor([0, LENGTH], device=DEVICE)
    with sharded.context_parallel(plan, mesh_of()) as context:
        query = torch.randn(1, 2, plan.tokens, 8, device=DEVICE)
        whole = torch.randn(1, 2, LENGTH, 8, device=DEVICE)
        elsewhere = query.to("meta")
        packed = query[0].transpose(0, 1)
        pages = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
        used = torch.tensor([5], dtype=torch.int32, device=DEVICE)
        table = flexhop.PageTable(pages, 16, used)
        refused = {
            "mask": lambda: flexhop.flex_attention(query, query, query, None, _mask()),
            "none": lambda: flexhop.flex_attention(query, query, query),
            "device": lambda: flexhop.flex_attention(query, elsewhere, query, None, mask),
            "tokens": lambda: flexhop.flex_attention(whole, whole, whole, None, mask),
            "cache": lambda: flexhop.flex_attention(query, query, query, page_table=table),
            "offsets": lambda: flexhop.varlen_attention(packed, packed, packed, offsets),
        }
        said = {name: _said(errors.ShardedCallError, call) for name, call in refused.items()}
        said["shard"] = _said(errors.PlanError, lambda: context.shard(query, dim=2))
        said["unshard"] = _said(errors.PlanError, lambda: context.unshard(whole, dim=2))
    return said


def die(rank: int, port: int, folder: str) -> None:
    """Rank 1 ends in the middle of its steps; rank 0 notes what it is told, and when.

    Always on gloo: NCCL's watchdog ends the process, and no exception can be caught.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=5))
    mask = _mask(device="cpu")
    plan = sharded.make_plan(mask, 2)
    query = torch.randn(1, 2, plan.tokens, 8)
    with sharded.context_parallel(plan, init_device_mesh("cpu", (2,))):
        flexhop.flex_attention(query, query, query, None, mask)
        if rank == 1:
            os._exit(7)
        began = time.time()
        try:
            flexhop.flex_attention(query, query, query, None, mask)
        except Exception as error:
            with open(f"{folder}/told", "w") as file:
                file.write(f"{time.time() - began:.1f} {type(error).__name__}")
    os._exit(0)
