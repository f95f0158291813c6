"""What is done with a problem: computed and judged, or its kernels compiled for GPUs not here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexhop.offline import generate_code
from flexhop.offline.cubin import compile_kernel, wrong_products
from flexhop.offline.interpret import Memory, interpret
from tests.budgets import TF32, assert_within_budget
from tests.compiler_stages import compile_to_llvm
from tests.fuzz.devices import evaluate_mods
from tests.fuzz.oracle import compute, loss_of, truncates
from tests.fuzz.plan import Plan
from tests.fuzz.problem import Problem, make_call, make_problem

ORDERS = 24  # of sums, in which a problem is computed if its result may be held against luck


def check_results(plan: Plan, seed: int, device: str = "cpu", backend: str = "eager") -> None:
    """Forward and backward against fp64.

    Args:
        plan: the problem.
        seed: of its tensors.
        device: of its tensors.
        backend: "eager"; "aot_eager" or "inductor" of torch.compile; "interpreter", for the
            portable kernels of GPUs on a CPU.

    Raises:
        AssertionError: a result is further from fp64 than plain PyTorch of this dtype.
    """
    problem = make_problem(plan, seed % 1000, device)
    call, loss = make_call(problem), loss_of(problem)
    torch._dynamo.reset()
    if backend == "interpreter":
        assert plan.dtype != torch.float64, "no kernel computes in fp64"
        memory = Memory(poison=True, check_bounds=True)
        grad = loss if plan.is_differentiated else False
        result = interpret(
            call, *problem.operands, grad=grad, memory=memory, dynamic=plan.dynamic
        ).result
    else:
        if backend != "eager":
            call = torch.compile(call, backend=backend, fullgraph=True, dynamic=plan.dynamic)
        result = call(*problem.operands)
        if plan.is_differentiated:
            loss(result).backward()
    judge(problem, results_of(problem, result))


def results_of(problem: Problem, result: Any) -> dict[str, Tensor]:
    """Results and gradients by name."""
    out, aux = result if isinstance(result, tuple) else (result, None)
    found = {"out": out}
    if problem.plan.lse:
        found["lse"] = aux.lse
    if problem.plan.max_scores:
        found["max_scores"] = aux.max_scores
    for name, leaf in problem.leaves().items():
        grad = leaf.grad
        # Autograd knows that nothing depends on it.
        if grad is None and (problem.plan.ignores_score or name == "sinks"):
            grad = torch.zeros_like(leaf)
        assert grad is not None, f"{name} has no gradient"
        found[name] = grad
    return found


def judge(problem: Problem, found: dict[str, Tensor]) -> None:
    """Hold results against fp64.

    Raises:
        AssertionError: one is too far away.
    """
    plan = problem.plan
    gold, reference = compute(problem, torch.float64), compute(problem, None)
    others: list[dict[str, Tensor]] = []
    if plan.dtype in (torch.bfloat16, torch.float16):
        others = [compute(problem, None, "fused"), compute(problem, None, "online")]
    captured = (*plan.learned, "sinks")
    reordered: list[dict[str, Tensor]] = []
    for name, actual in found.items():

        def compare(*references: dict[str, Tensor], name: str = name, actual: Tensor = actual):
            assert_within_budget(
                actual, gold[name], reference[name], *(other[name] for other in references),
                name=name, captured=name in captured, unseen=gold.get(f"unseen_{name}"),
                budget=TF32 if truncates(problem) else None,
            )  # fmt: skip

        try:
            compare(*others)
        except AssertionError:
            # Sums of few numbers, or one sum: plain PyTorch may be exact by luck. It is as far off
            # as it is in the worst of several orders.
            reordered = reordered or [compute(problem, None, order=n + 1) for n in range(ORDERS)]
            compare(*others, *reordered)


def compile_offline(
    plan: Plan, architectures: tuple[int, ...] = (90,), level: str = "cubin"
) -> int:
    """Generate the kernels of a problem, and compile them; the number of kernels.

    Args:
        plan: the problem.
        architectures: such as 90.
        level: "text": their texts alone; "llvm": as far as Triton goes; "cubin": machine code.
    """
    count = 0
    evaluate_mods(make_problem(plan, 0))
    for architecture in architectures:
        problem = make_problem(plan, 0)
        generated = generate_code(
            make_call(problem), *problem.operands, dynamic=plan.dynamic,
            grad=loss_of(problem) if plan.is_differentiated else False,
            capability=(architecture // 10, architecture % 10),
        )  # fmt: skip
        for kernel in generated.templates:
            if level == "llvm":
                compile_to_llvm(kernel, architecture)
            if level == "cubin":
                wrong = wrong_products(compile_kernel(kernel, architecture))
                assert not wrong, (kernel.name, wrong)
            count += 1
    return count
