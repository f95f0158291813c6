"""flexhop.verify: check a function's attention calls against the reference, at samples."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from flexhop.ops.args import (
    AttentionArgs,
    BackwardArgs,
    CachedArgs,
    learned_captures,
    operands_of,
)
from flexhop.ops.cached import cached_attention
from flexhop.ops.eager import accumulate_dtype
from flexhop.ops.forward import attention
from flexhop.ops.graphs.subgraphs import trace_joint
from flexhop.ops.verification.checking import (
    CallCheck,
    Verification,
    check_results,
    mod_texts,
    write_call,
)
from flexhop.ops.verification.sampled import key_length, some_places, whole_sample

__all__ = ["verify"]


def verify(
    fn: Callable[..., Any],
    *args: Any,
    rows: int = 16,
    seed: int = 0,
    backend: str = "inductor",
    folder: str | Path | None = None,
    **kwargs: Any,
) -> Verification:
    """Run a function, and check each of its flex_attention calls against the reference.

    Each call is compiled on its own, with the operands that the function passes, and runs forward
    and backward with random gradients. Sampled queries (out, lse, gradient) and sampled keys
    (gradients of key and value) are computed by the reference in fp64, on the same device, and in
    plain PyTorch, whose error is the budget. Only the sampled rows of scores are stored.
    Gradients of captured tensors are checked in calls of up to 2**24 scores. Calls that read a
    cache have no gradient; their results are checked.

    Args:
        fn: a function or module, compiled or not.
        *args: its arguments.
        rows: how many queries and keys of each call to sample.
        seed: seed of the samples and the random gradients.
        backend: backend of torch.compile.
        folder: where to write a wrong call; by default a new temporary folder.
        **kwargs: further arguments of fn.

    Returns:
        A Verification. `.ok` says whether every call is correct; print it for details.
    """
    found: list[CallCheck] = []
    run = getattr(fn, "_orig_mod", None) or inspect.unwrap(fn)

    def interpret(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        check = _Checker(backend, rows, seed, Path(folder) if folder else None, found)
        return _Checking(graph, check).run

    torch.compile(run, backend=interpret)(*args, **kwargs)
    return Verification(tuple(found))


class _Checking(fx.Interpreter):
    """Runs a graph and checks each attention call."""

    def __init__(self, graph: fx.GraphModule, check: _Checker) -> None:
        super().__init__(graph)
        self.check = check

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one node."""
        kinds: dict[Any, type[Any]] = {attention: AttentionArgs, cached_attention: CachedArgs}
        if target in kinds:
            given = kinds[target](*args)
            # Graphs hold their own kind of dict, which Dynamo does not trace.
            self.check.check(target, given._replace(options=dict(given.options)))
        return super().call_function(target, args, kwargs)


@dataclasses.dataclass
class _Checker:
    """Checks calls one by one."""

    backend: str
    rows: int
    seed: int
    folder: Path | None
    found: list[CallCheck]

    def check(self, operator: Any, args: Any) -> None:
        """Check a call of tensors and graphs."""
        generator = torch.Generator().manual_seed(self.seed + len(self.found))
        call = _with_gradients(args, generator) if operator is attention else args
        results = _run_compiled(operator, call, self.backend)
        length = key_length(args)
        rows, keys = (
            some_places(n, self.rows, generator).to(args.query.device)
            for n in (args.query.size(2), length)
        )
        sample = whole_sample(args, rows, keys)
        forward = operands_of(AttentionArgs, call) if operator is attention else call
        grads = {name: t for name, t in results.items() if name.startswith("grad")}
        own = {name: t for name, t in results.items() if name not in grads}
        check = check_results(forward, own, sample)
        if grads:
            call = call._replace(out=results["out"], lse=results["lse"])
            check = _merged(check, check_results(call, grads, sample))
        if not check.ok:
            path = write_call(call, results, check, self.folder, mod_texts(args))
            check = dataclasses.replace(check, reproducer=path)
        self.found.append(check)


def _with_gradients(args: AttentionArgs, generator: torch.Generator) -> BackwardArgs:
    """The call with its derivative, and random gradients of its results."""
    joint = trace_joint(args.score_mod, args.query, args.score_captures)
    query = args.query

    def random(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=dtype).to(query.device)

    nothing: Any = None
    return operands_of(
        BackwardArgs, args, score_mod=joint.score_mod, joint=joint.joint, sites=joint.sites,
        score_captures=joint.captures, out=nothing, lse=nothing,
        grad_out=random(*query.shape[:3], args.value.size(3), dtype=query.dtype),
        grad_lse=random(*query.shape[:3], dtype=accumulate_dtype(query.dtype)),
    )  # fmt: skip


def _run_compiled(operator: Any, args: Any, backend: str) -> dict[str, Tensor]:
    """Results and gradients of the compiled call."""
    if operator is not attention:
        out, lse, largest = torch.compile(
            lambda given: operator(*given), backend=backend, fullgraph=True
        )(args)
        return {"out": out, "lse": lse, "max_scores": largest}
    places = learned_captures(args.sites)
    tensors = (args.query, args.key, args.value, *(args.score_captures[i] for i in places))
    leaves = [t.detach().requires_grad_() for t in tensors]

    def call(query: Tensor, key: Tensor, value: Tensor, *learned: Tensor) -> Any:
        captures = list(args.score_captures)
        for place, tensor in zip(places, learned, strict=True):
            captures[place] = tensor
        given = operands_of(AttentionArgs, args, query=query, key=key, value=value)
        return attention(*given._replace(score_captures=tuple(captures)))

    out, lse, largest = torch.compile(call, backend=backend, fullgraph=True)(*leaves)
    found = {"out": out.detach(), "lse": lse.detach(), "max_scores": largest.detach()}
    if not args.options.get("has_q_blocks", True):  # no backward pass is possible
        return found
    received = (args.grad_out, torch.where(lse.isfinite(), args.grad_lse, 0.0))
    grads = torch.autograd.grad((out, lse), leaves, received)
    names = ["grad_query", "grad_key", "grad_value", *(f"grad_capture_{n}" for n in places)]
    return found | dict(zip(names, grads, strict=True))


def _merged(first: CallCheck, second: CallCheck) -> CallCheck:
    return dataclasses.replace(
        first, ratios=first.ratios | second.ratios, worst=first.worst | second.worst,
        origin=first.origin or second.origin,
    )  # fmt: skip
