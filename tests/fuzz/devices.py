"""A problem's user functions on a GPU that may be absent: what PyTorch does there by other rules.

Only devices and sizes exist, so this finds what fails, not what is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flexhop.compat.offline.fake_gpu import fake_gpu
from flexhop.ops.eager import over_elements
from tests.fuzz.functions import chain_scores, combine_masks
from tests.fuzz.masks import MASKS
from tests.fuzz.plan import Plan
from tests.fuzz.problem import Problem
from tests.fuzz.scores import SCORES


@contextlib.contextmanager
def imagined(*, capability: tuple[int, int] = (9, 0)) -> Iterator[Any]:
    """A function that puts a tensor on such a GPU, without its contents."""
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)

    def put(tensor: Tensor) -> Tensor:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda"
        )

    with fake_gpu(capability), mode, torch.no_grad():
        yield put


def evaluate_mods(problem: Problem) -> None:
    """Both user functions of every element, as eager calls and the judge evaluate them."""
    plan, captures = problem.plan, vars(problem.captures)
    with imagined() as put:
        moved = {n: put(v) if isinstance(v, Tensor) else v for n, v in captures.items()}
        _evaluate(plan, SimpleNamespace(**moved))


def _evaluate(plan: Plan, captures: SimpleNamespace) -> None:
    shape = plan.shape
    size = (shape.batch, shape.heads, shape.q_len, shape.kv_len)
    index = tuple(torch.arange(n, dtype=torch.int32, device="cuda") for n in size)
    scores = torch.empty(size, device="cuda")
    if plan.scores:
        mod = chain_scores([SCORES[name] for name in plan.scores])(captures)
        found = over_elements(mod, 1, (scores,), index, ())
        assert found.shape == size and found.device == scores.device
    if plan.masks:
        mod = combine_masks([MASKS[name] for name in plan.masks], plan.how)(captures)
        found = over_elements(mod, 0, (), index, ())
        assert found.dtype == torch.bool and found.device == scores.device
