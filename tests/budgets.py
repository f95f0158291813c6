"""How results are judged: against fp64, in units of the error that plain PyTorch makes.

Three runs of one computation: *gold* (the specification on fp64 copies of query, key and value),
the *reference* (`dense_attention` in the dtype under test) and the result under test.
docs/numerics.md says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flexhop.compat.mods.indexing import IndexMode

INF = float("inf")


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bounds in units of the reference's error E; floors in units of the gold's magnitude.

    mean: E(test) <= mean * E(reference). rms: the same for root mean squares, used for captured
    tensors. row: largest error of a row against the reference's in this row and on average.
    floor: relative error that is always granted, because a reference can be exact by luck.
    absolute: granted where gold is 0 by cancellation. eps: the rounding of the result itself,
    granted to single elements. truncates: whether the reference's products drop the bits of
    their operands that TF32 does not have, as tensor cores do.
    """

    mean: float
    row: float
    floor: float
    eps: float
    rms: float = 1.35
    absolute: float = 1e-6
    truncates: bool = False


BUDGETS = {
    torch.bfloat16: Budget(1.1, 4.0, 1e-4, torch.finfo(torch.bfloat16).eps),
    torch.float16: Budget(1.1, 4.0, 1e-4, torch.finfo(torch.float16).eps),
    torch.float32: Budget(2.0, 32.0, 1e-6, 4 * torch.finfo(torch.float32).eps),
    torch.float64: Budget(2.0, 32.0, 1e-14, 8 * torch.finfo(torch.float64).eps),
}
TF32 = dataclasses.replace(BUDGETS[torch.float32], eps=2.0**-10, truncates=True)


def assert_within_budget(
    actual: Tensor,
    gold: Tensor,
    reference: Tensor,
    *others: Tensor,
    name: str = "result",
    budget: Budget | None = None,
    captured: bool = False,
    unseen: Tensor | None = None,
) -> None:
    """Judge one tensor.

    Args:
        actual: under test.
        gold: fp64, from the specification.
        reference: the same computation in plain PyTorch, in actual's dtype.
        others: the same with other roundings, of which the larger error counts.
        name: of the tensor, for the message.
        budget: by default that of actual's dtype.
        captured: a gradient of a captured tensor, judged by its root mean square error.
        unseen: which rows must be exactly 0: queries that see nothing, keys that nobody sees.

    Raises:
        AssertionError: a bound is exceeded; a -inf or a NaN is elsewhere than in gold.
    """
    budget = budget or BUDGETS[actual.dtype]
    assert actual.shape == gold.shape == reference.shape, (
        f"{name}: shape {list(actual.shape)}, expected {list(gold.shape)}"
    )
    actual, gold, *references = (
        t.detach().cpu().double() for t in (actual, gold, reference, *others)
    )
    _assert_same_special(actual, gold, name)
    assert_unseen(actual, unseen, name)
    finite = gold.isfinite()
    error = _error(actual, gold, finite)
    allowed = [_error(values, gold, finite & values.isfinite()) for values in references]
    size = torch.where(finite, gold, 0.0).abs()
    power = 2 if captured else 1
    factor = budget.rms if captured else budget.mean
    measured, unit = _mean(error, power), max(_mean(found, power) for found in allowed)
    bound = factor * unit + max(budget.absolute, budget.floor * _mean(size, power))
    assert measured <= bound, (
        f"{name}: error {measured:.3e} exceeds {bound:.3e}; plain PyTorch's is {unit:.3e}"
    )
    if not captured:
        _assert_rows(error, allowed, size, budget, name)


def assert_unseen(actual: Tensor, unseen: Tensor | None, name: str) -> None:
    """Rows that see nothing, if any are named, must be exactly 0."""
    if unseen is not None:
        wrong = (unseen.to(actual.device) & (actual != 0).any(-1)).nonzero()
        assert not len(wrong), f"{name}: row {wrong[0].tolist()} must be exactly 0"


def _error(values: Tensor, gold: Tensor, finite: Tensor) -> Tensor:
    return torch.where(finite, values - gold, 0.0).abs()


def _mean(values: Tensor, power: int) -> float:
    return float(values.pow(power).mean().pow(1 / power)) if values.numel() else 0.0


def _assert_same_special(actual: Tensor, gold: Tensor, name: str) -> None:
    for kind, found, expected in (
        ("NaN", actual.isnan(), gold.isnan()),
        ("-inf", actual == -INF, gold == -INF),
        ("inf", actual == INF, gold == INF),
    ):
        wrong = (found != expected).nonzero()
        assert not len(wrong), (
            f"{name}: {kind} in {int(found.sum())} places, expected in {int(expected.sum())}; "
            f"first difference at {wrong[0].tolist()}"
        )


def _assert_rows(
    error: Tensor, allowed: Sequence[Tensor], size: Tensor, budget: Budget, name: str
) -> None:
    """A wrong tail tile or row drowns in a mean; each row is compared with its like."""
    if error.dim() < 2 or not error.numel():
        return
    worst, scale, *usual = (t.flatten(0, -2).amax(-1) for t in (error, size, *allowed))
    granted = torch.stack([rows + rows.mean() for rows in usual]).amax(0)
    bound = budget.row * (granted + budget.eps * scale) + 1e-6
    row = int((worst - bound).argmax())
    assert worst[row] <= bound[row], (
        f"{name}: row {row} of {len(worst)} is wrong by {worst[row]:.3e} > {bound[row]:.3e}"
    )


class Truncated(torch.autograd.Function):
    """A product of fp32 matrices whose operands keep the 10 bits of TF32, in all derivatives."""

    @staticmethod
    def forward(left: Tensor, right: Tensor) -> Tensor:
        return truncate(left) @ truncate(right)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        left, right = ctx.saved_tensors
        return Truncated.apply(grad, right.mT), Truncated.apply(left.mT, grad)

    @staticmethod
    def jvp(ctx: Any, left_dot: Tensor | None, right_dot: Tensor | None) -> Tensor:
        left, right = ctx.saved_tensors
        pairs = [(left_dot, right), (left, right_dot)]
        return sum(Truncated.apply(a, b) for a, b in pairs if a is not None and b is not None)


def exact_product(left: Tensor, right: Tensor) -> Tensor:
    """A product of matrices in 16 bits as tensor cores form it: exact terms, summed in fp32."""
    return left.float() @ right.float()


def truncate(values: Tensor) -> Tensor:
    """fp32 with the bits of TF32."""
    return (values.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


class RoundedGradient(torch.autograd.Function):
    """Scores as they are, and their gradient in 16 bits, as tensor cores multiply it."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return scores.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype).to(grad.dtype), None


# How plain PyTorch rounds in between, see dense_attention.
Formula = Literal["plain", "fused", "online", "again"]


def kernel_formulas(dtype: torch.dtype, *, truncates: bool) -> tuple[Formula, ...]:
    """The formulas that round where a kernel does, if that is elsewhere than in plain PyTorch."""
    if dtype in (torch.bfloat16, torch.float16):
        return ("fused", "online")
    return ("online", "again") if truncates else ()  # TF32: only weights are made in the kernel


_LARGE = 2.0**12  # above, fp32 loses what lse adds to the largest score


class Dense(NamedTuple):
    """Every score of a call at once, and what follows from them.

    key, value: repeated for every batch and query head. scores: modified, -inf where hidden, with
    the graph that leads to query, key and captures. out [B, Hq, M, Dv]; lse, largest [B, Hq, M].
    rest: what rounding took from lse in rows whose scores are large, 0 in others [B, Hq, M].
    product: how matrices are multiplied. factors: of dropout. truncates: see Budget. formula: see
    dense_attention.
    """

    key: Tensor
    value: Tensor
    scores: Tensor
    out: Tensor
    lse: Tensor
    largest: Tensor
    rest: Tensor
    product: Callable[[Tensor, Tensor], Tensor]
    factors: Tensor | None = None
    truncates: bool = False
    formula: Formula = "plain"

    @property
    def seen(self) -> Tensor:
        """Which scores count, [B, Hq, M, N]."""
        return self.scores.detach() != -INF  # a NaN counts


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    visible: Tensor,
    scale: float,
    *,
    truncates: bool = False,
    formula: Formula = "plain",
    factors: Tensor | None = None,
    disturbance: Tensor | float = 0.0,
) -> Dense:
    """Attention as the field writes it: every score at once, in the dtype of query.

    Products by the dtype's matmul, softmax in fp32, weights rounded to the dtype before value.

    Args:
        query: [B, Hq, M, D]; key: [B or 1, Hkv, N, D]; value: [B or 1, Hkv, N, Dv].
        score_mod: as for flex_attention.
        visible: which keys a query sees, bool, broadcasts to [B, Hq, M, N].
        scale: multiplies the products before score_mod.
        truncates: see Budget.
        formula: "fused": products of 16-bit matrices stay in fp32, as in one kernel; only the
            weights, out and the gradients of scores are rounded. "online": the same, with weights
            that are rounded or truncated before they are divided by their sum, which a kernel
            knows last. "again": the same, and backward takes sums that cancel apart, as a kernel
            does. In TF32 it finds weights that are one bit lower: truncated, 0.9995 is left of a
            weight just below 1. For sums over out, see dense_backward.
        factors: of dropout: 0 for weights that are dropped, else 1 / (1 - p); they multiply the
            weights after the sums of rows.
        disturbance: added to the scores before score_mod.
    """
    is_plain = formula == "plain"
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    product = exact_product if is_half and not is_plain else torch.matmul
    product = Truncated.apply if truncates else product
    group = query.size(1) // key.size(1)
    batch = query.size(0)
    key, value = (
        t.expand(batch, -1, -1, -1).repeat_interleave(group, dim=1) for t in (key, value)
    )
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = product(query, key.transpose(-1, -2)).to(wide) * scale + disturbance
    if is_half and not is_plain:
        scores = RoundedGradient.apply(scores, query.dtype)
    if score_mod is not None:
        scores = evaluate_score_mod(score_mod, scores)
    scores = torch.where(visible, scores.to(wide), -INF)
    with torch.no_grad():
        largest = scores.amax(-1)
        seen = largest != -INF  # a NaN counts
        shift = torch.where(seen, largest, 0.0)
        weights = torch.exp(scores - shift[..., None])
        total = weights.sum(-1)
        safe = torch.where(seen, total, 1.0)
        one, safe = torch.ones_like(safe)[..., None], safe[..., None]
        before, after = (one, safe) if formula in ("online", "again") else (safe, one)
        weights = weights if factors is None else weights * factors.to(wide)
        out = (product((weights / before).to(query.dtype), value) / after).to(query.dtype)
        log = torch.log(safe[..., 0])
        lse = torch.where(seen, shift + log, -INF)
        is_large = (lse.abs() > _LARGE) & lse.isfinite()
        rest = torch.where(is_large, (shift - lse) + log, 0.0)
    return Dense(
        key, value, scores, out, lse, largest, rest, product, factors, truncates, formula
    )  # fmt: skip


def dense_backward(
    dense: Dense, grad_out: Tensor, grad_lse: Tensor | None, columns: Tensor | None = None
) -> None:
    """Add the gradients of query, key, value and captures to the leaves.

    From out and lse, as every fused kernel computes them (FlashAttention-2, algorithm 2): weights
    are exp(score - lse), also in rows of which all keys are hidden by a number such as -1e9. The
    gradient of a score is weight * (grad_weight - delta) with
    delta = rowsum(out * grad_out) - grad_lse. Products by the dtype's matmul, the rest in fp32.

    columns: for "again", the order in which rowsum takes the columns of out in rows whose weights
    are all 0 but one, which is 1. There grad_weight and the sum are equal in exact numbers. Plain
    PyTorch may round both alike and find 0 by luck; a kernel forms the sum apart from products.
    """
    wide, dtype = dense.scores.dtype, dense.out.dtype
    exponents = dense.scores.detach() - dense.lse[..., None] - dense.rest[..., None]
    weights = torch.where(dense.seen, torch.exp(exponents), 0.0)
    terms = dense.out.to(wide) * grad_out.to(wide)
    delta = terms.sum(-1, keepdim=True)
    if dense.formula == "again" and columns is not None:
        is_one = weights.amax(-1, keepdim=True) == 1
        delta = torch.where(is_one, terms[..., columns].sum(-1, keepdim=True), delta)
    if dense.formula == "again" and dense.truncates:
        weights = weights * (1 - 2.0**-23)
    if grad_lse is not None:
        delta = delta - grad_lse[..., None]
    grad_weights = dense.product(grad_out, dense.value.detach().transpose(-1, -2)).to(wide)
    used = weights
    if dense.factors is not None:
        grad_weights, used = grad_weights * dense.factors, weights * dense.factors
    grad_scores = weights * (grad_weights - delta)
    grad_value = dense.product(used.to(dtype).transpose(-1, -2), grad_out)
    pairs = [(dense.value, grad_value)] if dense.value.requires_grad else []
    if dense.scores.requires_grad:  # a score_mod may do without its score
        pairs.append((dense.scores, grad_scores))
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))


def evaluate_score_mod(score_mod: Callable[..., Tensor], scores: Tensor) -> Tensor:
    """score_mod of every element of [B, H, M, N]."""
    return _per_element(score_mod, scores, scores)


def evaluate_mask_mod(mask_mod: Callable[..., Any], scores: Tensor) -> Tensor:
    """mask_mod of every element of [B, H, M, N]."""
    return _per_element(mask_mod, scores).expand(scores.shape)


def _per_element(mod: Callable[..., Tensor], like: Tensor, *scores: Tensor) -> Tensor:
    """Call a mod with 0-d tensors, one axis of `like` after the other."""
    for axis in reversed(range(4)):  # the innermost map runs over keys
        axes = [0] * len(scores) + [0 if i == axis else None for i in range(4)]
        mod = torch.vmap(mod, in_dims=tuple(axes))
    index = [torch.arange(n, device=like.device, dtype=torch.int32) for n in like.shape]
    with IndexMode():
        return mod(*scores, *index)
