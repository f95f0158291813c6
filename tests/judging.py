"""Run a case three ways and compare: gold, reference, and what is under test."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import torch
from torch import Tensor

import flexhop
from flexhop.errors import EagerWarning
from tests.budgets import (
    Budget,
    Dense,
    Formula,
    assert_within_budget,
    dense_attention,
    dense_backward,
    evaluate_mask_mod,
    kernel_formulas,
)
from tests.case_inputs import (
    Case,
    Inputs,
    copy_inputs,
    make_block_mask,
    make_call,
    make_loss,
    unpack,
)


@dataclasses.dataclass
class Outcome:
    """Results and gradients of one run, by name."""

    tensors: dict[str, Tensor]
    seen: Tensor | None = None  # which scores count, [B, Hq, M, N]; the reference knows

    @classmethod
    def of(cls, case: Case, result: Any, inputs: Inputs) -> Outcome:
        """Collect results, and the gradients that backward left in the leaves."""
        out, lse, max_scores = unpack(result)
        tensors = {"out": out}
        if case.lse and lse is not None:
            tensors["lse"] = lse
        if case.max_scores and max_scores is not None:
            tensors["max_scores"] = max_scores
        for name, leaf in inputs.leaves(case).items():
            grad = leaf.grad
            if grad is None and case.ignores_score:  # autograd knows that nothing depends on it
                grad = torch.zeros_like(leaf)
            assert grad is not None, f"{name} has no gradient"
            tensors[f"grad_{name}"] = grad
        return cls(tensors)


def run(case: Case, inputs: Inputs, **extra: Any) -> Outcome:
    """Forward and backward with flex_attention as it is called here: the specification."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerWarning)
        result = make_call(case, inputs, **extra)(inputs.query, inputs.key, inputs.value)
    make_loss(case, inputs)(result).backward()
    return Outcome.of(case, result, inputs)


def gold_outcome(case: Case, inputs: Inputs) -> Outcome:
    """The specification on fp64 copies."""
    return run(case, copy_inputs(case, inputs, torch.float64))


def reference_outcome(
    case: Case, inputs: Inputs, *, truncates: bool = False, formula: Formula = "plain"
) -> Outcome:
    """Plain PyTorch in the dtype of the case; the last two as for `dense_attention`."""
    copies = copy_inputs(case, inputs)
    shape = case.shape
    scores = torch.empty(*shape.query[:3], shape.kv_len, device=copies.query.device)
    scale = 1 / math.sqrt(shape.head_dim) if case.scale is None else case.scale
    score_mod = case.score(copies.captures) if case.score is not None else None
    dense = dense_attention(
        copies.query, copies.key, copies.value, score_mod, _visible(case, copies, scores), scale,
        truncates=truncates, formula=formula,
    )  # fmt: skip
    dense_backward(dense, *_loss_gradients(case, copies, dense))
    result = (dense.out, flexhop.AuxOutput(dense.lse, dense.largest))
    return dataclasses.replace(Outcome.of(case, result, copies), seen=dense.seen)


def _loss_gradients(case: Case, inputs: Inputs, dense: Dense) -> tuple[Tensor, Tensor | None]:
    """What make_loss hands back to out and lse."""
    out, lse = (t.detach().requires_grad_() for t in (dense.out, dense.lse))
    make_loss(case, inputs)((out, flexhop.AuxOutput(lse, None))).backward()
    assert out.grad is not None
    return out.grad, lse.grad


def _visible(case: Case, inputs: Inputs, scores: Tensor) -> Tensor:
    """Which keys a query sees, from the definition of the mask and its listed blocks."""
    block_mask = make_block_mask(case, inputs)
    if block_mask is None:
        return torch.ones_like(scores, dtype=torch.bool)
    kept = evaluate_mask_mod(block_mask.mask_mod, scores)
    if case.blocks is None:
        return kept
    partial, full = torch.zeros_like(kept), torch.zeros_like(kept)
    _mark(partial, block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.BLOCK_SIZE)
    if block_mask.full_kv_num_blocks is not None:
        _mark(
            full, block_mask.full_kv_num_blocks, block_mask.full_kv_indices, block_mask.BLOCK_SIZE
        )
    return (partial & kept) | full


def _mark(target: Tensor, counts: Tensor, indices: Tensor, block_size: tuple[int, int]) -> None:
    """Mark the listed blocks of a mask that batches and heads share."""
    rows, columns = block_size
    for row, count in enumerate(counts[0, 0].tolist()):
        for column in indices[0, 0, row, :count].tolist():
            span = slice(column * columns, (column + 1) * columns)
            target[:, :, row * rows : (row + 1) * rows, span] = True


def assert_case(
    case: Case, inputs: Inputs, outcome: Outcome, *, budget: Budget | None = None
) -> tuple[Outcome, Outcome]:
    """Judge every tensor of a run of `case`; returns gold and reference."""
    gold = gold_outcome(case, inputs)
    truncates = budget is not None and budget.truncates
    reference = reference_outcome(case, inputs, truncates=truncates)
    # delta comes from the rounded out: where its terms cancel, plain PyTorch can be exact by luck,
    # and a formula that rounds as kernels do is as far off as the kernel.
    others = [
        reference_outcome(case, inputs, truncates=truncates, formula=formula)
        for formula in kernel_formulas(case.dtype, truncates=truncates)
    ]
    unseen = _unseen(case, reference)
    for name, actual in outcome.tensors.items():
        leaf = name.removeprefix("grad_")
        assert_within_budget(
            actual, gold.tensors[name], reference.tensors[name],
            *(other.tensors[name] for other in others),
            name=f"{case.name}: {name}", budget=budget, captured=leaf in case.learned,
            unseen=unseen.get(name),
        )  # fmt: skip
    return gold, reference


def _unseen(case: Case, reference: Outcome) -> dict[str, Tensor]:
    """The rows of each tensor that must be exactly 0."""
    assert reference.seen is not None
    empty = ~reference.seen.any(-1)
    batch, heads, _, _ = case.shape.key
    by_group = ~reference.seen.any(-2).unflatten(1, (heads, -1))
    lonely = by_group.all(2)
    if batch != lonely.size(0):
        lonely = lonely.all(0, keepdim=True)
    return {"out": empty, "grad_query": empty, "grad_key": lonely, "grad_value": lonely}
