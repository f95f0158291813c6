"""What a random call stands in: autocast, activation checkpointing, torch.vmap.

None of it changes what the results must be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flexhop

if TYPE_CHECKING:
    from tests.fuzz.problem import Problem

Call = Callable[[Tensor, Tensor, Tensor], Any]


def surrounded(problem: Problem, call: Call) -> Call:
    """The call as the plan says."""
    plan = problem.plan
    if plan.around == "autocast":
        return _under_autocast(call, problem.device.type, plan.dtype)
    if plan.around == "checkpoint":
        return lambda q, k, v: checkpoint(call, q, k, v, use_reentrant=False)
    if plan.around == "vmap":
        return _mapped(call, is_key_shared=len(plan.masks) % 2 == 0)
    return call


def _under_autocast(call: Call, device: str, dtype: torch.dtype) -> Call:
    def cast(query: Tensor, key: Tensor, value: Tensor) -> Any:
        with torch.autocast(device, dtype):
            return call(query, key, value)

    return cast


def _mapped(call: Call, *, is_key_shared: bool) -> Call:
    """The second of two calls at once; nobody reads the results of the first."""

    def tensors(query: Tensor, key: Tensor, value: Tensor) -> Any:
        """PyTorch's vmap takes no None."""
        out, aux = _pair(call(query, key, value))
        return {"out": out} | {n: t for n, t in aux.items() if t is not None}

    def mapped(query: Tensor, key: Tensor, value: Tensor) -> Any:
        queries, values = (torch.stack([t.detach() * 0.5, t]) for t in (query, value))
        keys = key if is_key_shared else torch.stack([key.detach() * 0.5, key])
        both = torch.vmap(tensors, in_dims=(0, None if is_key_shared else 0, 0))
        found = {name: t[1] for name, t in both(queries, keys, values).items()}
        out = found.pop("out")
        return (out, flexhop.AuxOutput(**found)) if found else out

    return mapped


def _pair(result: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    if isinstance(result, Tensor):
        return result, {}
    out, aux = result
    return out, {"lse": aux.lse, "max_scores": aux.max_scores}
