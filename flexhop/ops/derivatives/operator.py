"""The operator `flexhop_attention_derivative` and its dispatch rules; see program.py.

It is closed under differentiation: a derivative of a derivative is the same operator with one more
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.mods.own_backward import refuse_own_backward
from flexhop.compat.operators import hop, transforms
from flexhop.compat.operators.autograd import cast, restore, save
from flexhop.errors import MaskCaptureGradError, UnsupportedFeatureError
from flexhop.ops.args import (
    AttentionArgs,
    BackwardArgs,
    DerivativeArgs,
    index_examples,
    learned_captures,
    operands_of,
    score_dtype,
    score_examples,
)
from flexhop.ops.derivatives.program import KEY, OUT, QUERY, VALUE, Step, read_step
from flexhop.ops.derivatives.reference import as_derivative, derive, result_like, signature_of
from flexhop.ops.folding import fold_derivative
from flexhop.ops.graphs.subgraphs import joint_of, needs_grad
from flexhop.ops.layout import empty_ordered, ordered
from flexhop.ops.replicated import sum_over_all
from flexhop.ops.uncompiled.option import OPTION, run_alone

attention_derivative = hop.Operator(
    "flexhop_attention_derivative", DerivativeArgs, ("score_mod", "mask_mod"),
    optional="dropout_seed",
)  # fmt: skip


def _like(args: DerivativeArgs, name: str) -> Tensor | None:
    """The operand whose dimension order a result has; None for a contiguous one."""
    return {QUERY: args.query, OUT: args.query, KEY: args.key, VALUE: args.value}.get(name)


@hop.register_dense(attention_derivative)
def _dense(*operands: Any) -> tuple[Tensor, ...]:
    args = DerivativeArgs(*operands)
    if OPTION in args.options:
        return tuple(run_alone(attention_derivative, args))
    likes = (_like(args, name) for name in signature_of(args).outputs)
    return tuple(
        result.contiguous() if like is None else ordered(result, like)
        for result, like in zip(derive(args), likes, strict=True)
    )


@hop.register_fake(attention_derivative)
def _fake(*operands: Any) -> tuple[Tensor, ...]:
    args = DerivativeArgs(*operands)
    return tuple(_fake_result(args, name) for name in signature_of(args).outputs)


def _fake_result(args: DerivativeArgs, name: str) -> Tensor:
    shape, dtype = result_like(args, name)
    like = _like(args, name)
    if like is None:
        return torch.empty(shape, dtype=dtype, device=args.query.device)
    return empty_ordered(shape, like)


def _examples(*operands: Any) -> tuple[list[Any], list[Any]]:
    """Example inputs of score_mod and of mask_mod."""
    args = DerivativeArgs(*operands)
    device, dtype = args.query.device, score_dtype(args.query)
    return (
        [*score_examples(device, dtype), *args.score_captures],
        [*index_examples(device), *args.mask_captures],
    )


hop.register_proxy(attention_derivative, ("flexhop_score", "flexhop_mask"), _examples, IndexMode)
hop.register_functionalize(attention_derivative, lambda *_: None)  # the forward call was checked
hop.register_checkpoint(attention_derivative)


def _cast(dtype: torch.dtype, operands: tuple[Any, ...]) -> DerivativeArgs:
    """Apply autocast as for attention: cast values that are like query, key, value or out."""
    args = DerivativeArgs(*operands)
    query, key, value = (cast(t, dtype) for t in args[:3])
    names = signature_of(args).inputs[3 + len(args.score_captures) :]
    directions = tuple(
        cast(t, dtype) if name in (QUERY, KEY, VALUE, OUT) else t
        for t, name in zip(args.directions, names, strict=True)
    )
    return args._replace(query=query, key=key, value=value, directions=directions)


hop.register_autocast(attention_derivative, _cast)


def _inputs(args: DerivativeArgs) -> tuple[Any, ...]:
    """The inputs of the program's function."""
    return (*args[:3], *args.score_captures, *args.directions)


def _with_inputs(args: DerivativeArgs, inputs: Sequence[Any]) -> DerivativeArgs:
    query, key, value, *rest = inputs
    count = len(args.score_captures)
    return args._replace(
        query=query, key=key, value=value, score_captures=tuple(rest[:count]),
        directions=tuple(rest[count:]),
    )  # fmt: skip


def differentiate(
    args: DerivativeArgs,
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
    results: tuple[Tensor, ...] = (),
) -> list[Tensor | None]:
    """Gradients of the inputs that need one, from gradients of the outputs.

    results: out and lse, if they are known.
    """
    given = tuple(i for i, grad in enumerate(grads) if grad is not None)
    wanted = tuple(i for i, need in enumerate(needed) if need)
    if not given or not wanted:
        return [None] * len(needed)
    last = read_step(args.program[-1]) if args.program else Step("vjp", ())
    half = len(grads) // 2
    if last.kind == "jvp" and given[-1] < half:
        # The last tangents have no gradient, as if they had not been computed.
        count = len(args.directions) - len(last.given)
        args = args._replace(program=args.program[:-1], directions=args.directions[:count])
        before = needed[: len(needed) - len(last.given)]
        found = differentiate(args, before, grads[:half], results)
        return [*found, *[None] * len(last.given)]
    found = None if args.program else _differentiate_attention(args, wanted, grads, results)
    if found is None:
        step = Step("vjp", given, wanted)
        found = attention_derivative(
            *hop.unwrap_dead(tuple(_next(args, step, [grads[i] for i in given])))
        )
    by_input = dict(zip(wanted, found, strict=True))
    options: Any = args.options
    if "sum_groups" in options:  # replicated captured tensors; see ops/forward.py
        for i in range(3, 3 + len(args.score_captures)):
            if i in by_input:
                by_input[i] = sum_over_all(by_input[i], options["sum_groups"])
    return [by_input.get(i) for i in range(len(needed))]


def _differentiate_attention(
    args: DerivativeArgs,
    wanted: Sequence[int],
    grads: Sequence[Tensor | None],
    results: tuple[Tensor, ...],
) -> list[Tensor] | None:
    """Gradients of inputs of attention itself, by its backward pass; None if it has none."""
    lacks_lists = bool(args.blocks) and not args.options.get("has_q_blocks")
    if lacks_lists or not results:
        return None
    args, (out, lse), (grad_out, grad_lse) = hop.unwrap_dead((args, results, tuple(grads)))
    captures = args.score_captures
    flags = [3 + i in wanted for i in range(len(captures))]
    try:
        joint, sites = joint_of(args.score_mod, args.query, captures, flags)
    except UnsupportedFeatureError:  # only the definition differentiates such a mod
        return None
    operands = operands_of(
        BackwardArgs, args, out=out, lse=lse, joint=joint, sites=sites, grad_lse=grad_lse,
        grad_out=torch.zeros_like(out) if grad_out is None else grad_out,
    )  # fmt: skip
    backward = hop.OPERATORS["flexhop_attention_backward"]  # its module imports this one
    *dense, captured = backward(*operands)
    found = dict(enumerate(dense)) | {
        3 + i: grad for i, grad in zip(learned_captures(sites), captured, strict=True)
    }
    return [_or_zeros(found.get(i), (*args[:3], *captures)[i]) for i in wanted]


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def _next(args: DerivativeArgs, step: Step, directions: Sequence[Any]) -> DerivativeArgs:
    refuse_own_backward(args.score_mod)
    return args._replace(
        program=(*args.program, step.word()), directions=(*args.directions, *directions)
    )


class _Derivative(torch.autograd.Function):
    """A derivative; its own gradient is the operator with one more step.

    Inputs: a function of the operator's operands, the operands without its inputs, and these.
    """

    @staticmethod
    def forward(compute: Any, fixed: DerivativeArgs, *inputs: Any) -> Any:
        return compute(_with_inputs(fixed, inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, fixed, *rest = inputs
        args = _with_inputs(fixed, rest)
        is_tangent = len(args.program) == 1 and read_step(args.program[0]).kind == "jvp"
        save_derivative(ctx, args, output[:2] if is_tangent else ())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        args, results = restore_derivative(ctx)
        return (None, None, *differentiate(args, ctx.needs_input_grad[2:], grads, results))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return push_inputs(restore_derivative(ctx)[0], tangents[2:])[1]


def save_derivative(ctx: Any, args: DerivativeArgs, results: tuple[Tensor, ...] = ()) -> None:
    """Save the operands of a derivative, and perhaps attention's out and lse."""
    save(ctx, (args._replace(score_mod=None, mask_mod=None), results))
    ctx.functions = (args.score_mod, args.mask_mod)


def restore_derivative(ctx: Any) -> tuple[DerivativeArgs, tuple[Tensor, ...]]:
    """Restore what `save_derivative` saved."""
    score_mod, mask_mod = ctx.functions
    args, results = restore(ctx)
    return args._replace(score_mod=score_mod, mask_mod=mask_mod), results


def push_inputs(
    args: DerivativeArgs, tangents: Sequence[Tensor | None]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Results and their tangents, from tangents of the inputs."""
    given = tuple(i for i, tangent in enumerate(tangents) if tangent is not None)
    pushed = _next(args, Step("jvp", given), [tangents[i] for i in given])
    found = attention_derivative(*hop.unwrap_dead(tuple(pushed)))
    count = len(found) // 2
    return found[:count], found[count:]


def _compute(args: DerivativeArgs) -> tuple[Tensor, ...]:
    return attention_derivative(*args)


def without_inputs(args: DerivativeArgs) -> DerivativeArgs:
    """Operands, and their inputs one by one, as autograd needs them."""
    nothing: Any = None
    return args._replace(
        query=nothing, key=nothing, value=nothing,
        score_captures=(None,) * len(args.score_captures),
        directions=(None,) * len(args.directions),
    )  # fmt: skip


def _autograd_inputs(*operands: Any) -> tuple[Any, ...]:
    args = DerivativeArgs(*operands)
    return (_compute, without_inputs(args), *_inputs(args))


def push(operands: tuple[Any, ...], tangents: Sequence[Tensor | None]) -> transforms.Pushed:
    """Forward mode of the operator; see transforms.register_jvp."""
    args = DerivativeArgs(*operands)
    moved: Any = DerivativeArgs(*hop.like_tree(operands, tangents))
    refuse_mask_tangents(moved.mask_captures)
    directions = moved.directions if args.directions else ()
    return transforms.Pushed(*push_inputs(args, (*moved[:3], *moved.score_captures, *directions)))


def refuse_mask_tangents(tangents: Sequence[Any]) -> None:
    """Raise if a mask has a tangent: it has no derivative in any mode."""
    for position, tangent in enumerate(tangents):
        if tangent is not None:
            raise MaskCaptureGradError(index=position)


@hop.register_autograd(attention_derivative)
def _autograd(*operands: Any) -> Any:
    needs = torch.is_grad_enabled() and any(needs_grad(hop.pytree.tree_leaves(operands)))
    if needs:
        return _Derivative.apply(*_autograd_inputs(*operands))
    if transforms.has_tangents(operands):
        return transforms.dual_results(push, operands)
    with hop.below_autograd():
        return attention_derivative(*operands)


transforms.register_grad(attention_derivative, _Derivative, _autograd_inputs)
transforms.register_jvp(attention_derivative, push)
hop.register_vmap(attention_derivative, fold_derivative)


def of_backward(args: BackwardArgs) -> DerivativeArgs:
    """The backward pass as a derivative; there, its out and lse are functions of the inputs."""
    given = (0,) if args.grad_lse is None else (0, 1)
    directions = [args.grad_out] if args.grad_lse is None else [args.grad_out, args.grad_lse]
    wanted = (0, 1, 2, *(3 + i for i in learned_captures(args.sites)))
    base = operands_of(AttentionArgs, args)
    return as_derivative(base, (Step("vjp", given, wanted).word(),), directions)


def push_attention(
    args: AttentionArgs, tangents: Any
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(out, lse) and their tangents, from tangents in the form of `args`."""
    refuse_mask_tangents(tangents.mask_captures)
    return push_inputs(as_derivative(args, (), ()), (*tangents[:3], *tangents.score_captures))
