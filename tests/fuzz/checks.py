"""What is done with a problem: computed and judged, or its kernels compiled for GPUs not here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.compat.kernels.isolated import isolated
from flexhop.compat.offline.fake_gpu import GPUS
from flexhop.lowering.fallback import NoRoom
from flexhop.offline import generate_code
from flexhop.offline.codegen import compiled_by
from flexhop.offline.cubin import Cubin, compile_kernel, wrong_products
from flexhop.offline.interpret import Memory, interpret
from flexhop.offline.kernel import Kernel
from tests.budgets import (
    TF32,
    Formula,
    assert_unseen,
    assert_within_budget,
    kernel_formulas,
)
from tests.compiler_stages import compile_to_llvm
from tests.fuzz.derivatives import (
    MOVED,
    compute_derivative,
    inputs_of,
    leaving_forward_mode,
    make_derivative,
    named_results,
)
from tests.fuzz.devices import evaluate_mods
from tests.fuzz.oracle import compute, loss_of
from tests.fuzz.plan import Plan
from tests.fuzz.problem import Problem, make_call, make_problem

ORDERS = 24  # of sums, in which a problem is computed if its result may be held against luck
TWICE = 8  # of these, those in which a derivative sums its scores twice
FILLINGS = 16  # of its operands, likewise
DISTURBANCES = 8  # of its scores, likewise
Results = dict[str, Tensor]
Run = Callable[[], Results]
Oracle = Callable[..., Results]  # of a problem, as oracle.compute


class Rounded(NamedTuple):
    """How plain PyTorch rounds: a formula, and the number of the order of its sums."""

    formula: Formula
    order: int


def check_results(
    plan: Plan, seed: int, device: str = "cpu", backend: str = "eager", **how: Any
) -> str:
    """Forward and backward against fp64.

    Args:
        plan: the problem.
        seed: of its tensors.
        device: of its tensors.
        backend: "eager"; "aot_eager" or "inductor" of torch.compile; "interpreter", for the
            kernels of GPUs on a CPU.
        **how: of "interpreter": arguments of `interpret`.

    Returns:
        What this filling of the operands exceeds, though the same call does not over several, or
        though its scores leave the result open ("unstable: ..."); "".

    Raises:
        AssertionError: a result is further from fp64 than plain PyTorch of this dtype.
    """
    torch._dynamo.reset()
    problem = make_problem(plan, seed % 1000, device)
    problem.is_for_gpu = device == "cuda" or backend == "interpreter"
    lucky = _check(problem, seed % 1000, runner(problem, backend, how), compute)
    if plan.derivative:
        torch._dynamo.reset()
        problem = make_problem(plan, seed % 1000, device)
        problem.is_for_gpu = device == "cuda" or backend == "interpreter"
        run = derivative_runner(problem, backend, how)
        with leaving_forward_mode():
            lucky = _check(problem, seed % 1000, run, compute_derivative) or lucky
    return lucky


def _check(problem: Problem, seed: int, run: Run, oracle: Oracle) -> str:
    """Hold what `run` computes against the oracle; see check_results."""
    found = run()
    exceeded = judge(problem, found, oracle)
    if not exceeded:
        return ""
    _, first = next(iter(exceeded.items()))
    try:
        judge_fillings(problem, seed, run, {n: found[n] for n in exceeded}, oracle)
    except AssertionError as whole:
        problem.fill(make_problem(problem.plan, seed, problem.device))
        if not is_unstable(problem):
            raise first from whole
        return f"unstable: {first}"
    return str(first)


def is_unstable(problem: Problem) -> bool:
    """Whether sums of 16-bit products in fp32 leave the results open: no kernel can be judged.

    A mod may enlarge the scores' last bits, as the exponential of a large score does. PyTorch
    rounds scores to 16 bits, once for both directions, so its own error does not show that.
    """
    if problem.plan.dtype not in (torch.bfloat16, torch.float16):
        return False
    references = References.of(problem, compute)
    for number in range(DISTURBANCES):
        disturbed = compute(problem, None, "fused", disturbed=number)
        try:
            for name in problem.leaves():
                references.compare(problem, name, disturbed[name])
        except AssertionError:
            return True
    return False


def derivative_runner(problem: Problem, backend: str, how: dict[str, Any] | None = None) -> Run:
    """A function that computes the problem's derivative of what its leaves are now."""
    plan = problem.plan
    function = make_derivative(problem, by_autograd=backend == "eager")
    if backend not in ("eager", "interpreter"):
        function = torch.compile(function, backend=backend, fullgraph=True, dynamic=plan.dynamic)

    def run() -> Results:
        inputs = inputs_of(problem)
        if backend == "interpreter":
            memory = Memory(poison=True, check_bounds=True)
            found = interpret(
                function, *inputs, memory=memory, dynamic=plan.dynamic, **(how or {})
            ).result
        else:
            found = function(*inputs)
        return named_results(problem, [t.detach() for t in found])

    return run


def runner(problem: Problem, backend: str, how: dict[str, Any] | None = None) -> Run:
    """A function that computes what the operands give now."""
    plan, loss, call = problem.plan, loss_of(problem), make_call(problem)
    if backend == "interpreter":
        assert plan.dtype != torch.float64, "no kernel computes in fp64"
    elif backend != "eager":
        call = torch.compile(call, backend=backend, fullgraph=True, dynamic=plan.dynamic)

    def run() -> Results:
        for leaf in problem.leaves().values():
            leaf.grad = None
        if backend == "interpreter":
            memory = Memory(poison=True, check_bounds=True)
            grad = loss if plan.is_differentiated else False
            result = interpret(
                call, *problem.operands, grad=grad, memory=memory, dynamic=plan.dynamic,
                **(how or {}),
            ).result  # fmt: skip
        else:
            result = call(*problem.operands)
            if plan.is_differentiated:
                loss(result).backward()
        return results_of(problem, result)

    return run


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
        is_cast = problem.plan.around == "autocast" and name.startswith("grad_")
        found[name] = grad.to(problem.plan.dtype) if is_cast else grad
    return found


class References(NamedTuple):
    """What results must be: in fp64; in the dtype of the problem, and with other roundings."""

    gold: Results
    others: list[Results]

    @classmethod
    def of(cls, problem: Problem, oracle: Oracle, *more: Rounded) -> References:
        formulas = kernel_formulas(problem.plan.dtype, truncates=problem.truncates)
        if oracle is compute_derivative:  # of which fused.py is the one of kernels
            formulas = formulas[-1:]
        others = [oracle(problem, None, formula) for formula in ("plain", *formulas)]
        others += _rounded(problem, oracle, more)
        return cls(oracle(problem, torch.float64), others)

    def compare(self, problem: Problem, name: str, actual: Tensor, *more: Results) -> None:
        """Judge one result."""
        allowed = [other[name] for other in (*self.others, *more)]
        assert_within_budget(
            actual, self.gold[name], *allowed, name=name,
            captured=name.removeprefix(MOVED) in (*problem.plan.learned, "sinks"),
            unseen=self.gold.get(f"unseen_{name}"),
            budget=TF32 if problem.truncates else None,
        )  # fmt: skip


def judge(problem: Problem, found: Results, oracle: Oracle = compute) -> dict[str, AssertionError]:
    """Hold results against fp64: what exceeds its budget."""
    references = References.of(problem, oracle)
    reordered: list[Results] = []
    formulas = [Rounded("plain", n) for n in range(1, ORDERS + 1)] + apart(problem, oracle)
    exceeded: dict[str, AssertionError] = {}
    for name, actual in found.items():
        try:
            references.compare(problem, name, actual)
            continue
        except AssertionError:
            # Sums of few numbers, or one sum: plain PyTorch may be exact by luck. It is as far off
            # as it is in the worst of several orders.
            reordered = reordered or _rounded(problem, oracle, formulas)
        try:
            references.compare(problem, name, actual, *reordered)
        except AssertionError as error:
            exceeded[name] = error
    return exceeded


def apart(problem: Problem, oracle: Oracle) -> list[Rounded]:
    """Formulas that take sums which cancel in two orders: theirs, and that of the operands.

    A kernel finds scores anew, and subtracts rowsum(out * grad_out) from products that it sums in
    another order. In a row with one key, both are equal in exact numbers. Plain PyTorch takes the
    differences of equal sums (of derivatives: means over weights), and finds exactly 0. References
    of 16 bits have the kernels' sums in one order, which may be a lucky one; those of fp32 have
    none. Formulas of gradients that round operands are further off than such a difference.
    """
    numbers = range(1, TWICE + 1)
    if oracle is compute_derivative:
        return [Rounded(formula, -n) for formula in ("plain", "online") for n in numbers]
    if kernel_formulas(problem.plan.dtype, truncates=problem.truncates):
        return []
    return [Rounded("again", n) for n in numbers]


def _rounded(problem: Problem, oracle: Oracle, formulas: Sequence[Rounded]) -> list[Results]:
    return [oracle(problem, None, formula, order=order) for formula, order in formulas]


def judge_fillings(
    problem: Problem, seed: int, run: Run, found: Results, oracle: Oracle = compute
) -> None:
    """Hold results against fp64 again, as one tensor of those of several fillings.

    Few sums of rounded numbers may be exact by luck in plain PyTorch: not in every filling. Each
    row is still held against its own reference, all its fillings side by side: of 16 times 6,000
    rows of one column, some are exact by luck.

    Args:
        problem: filled again by this.
        seed: of its tensors until now, which belong to the fillings.
        run: computes its results.
        found: those to judge.
        oracle: what they must be.

    Raises:
        AssertionError: one is too far away.
    """
    kept: list[tuple[Results, References]] = []
    for number in range(FILLINGS):
        if number:
            problem.fill(make_problem(problem.plan, 1000 * number + seed, problem.device))
            results = run()
            found = {name: results[name] for name in found}
        whole = References.of(problem, oracle, *apart(problem, oracle)[-1:])
        names = [*found, *(f"unseen_{name}" for name in found)]
        gold, *others = ({n: r[n] for n in names if n in r} for r in (whole.gold, *whole.others))
        for name, actual in found.items():
            assert_unseen(actual, gold.get(f"unseen_{name}"), name)
        kept.append((found, References(gold, others)))
    stacked = References(
        _stack([r.gold for _, r in kept]),
        [_stack(list(same)) for same in zip(*(r.others for _, r in kept), strict=True)],
    )
    for name, actual in _stack([results for results, _ in kept]).items():
        stacked.compare(problem, name, actual)


def _stack(results: list[Results]) -> Results:
    """Columns of all fillings in one row; of rows that must be 0, those of every filling."""
    stacked = {name: torch.stack([r[name] for r in results], -1) for name in results[0]}
    return {
        name: t.all(-1) if name.startswith("unseen_") else t.flatten(max(t.dim() - 2, 0))
        for name, t in stacked.items()
    }


def compile_offline(
    plan: Plan, architectures: tuple[int, ...] = (90,), level: str = "cubin"
) -> int:
    """Generate the kernels of a problem, and compile them; the number of kernels.

    Args:
        plan: the problem.
        architectures: such as 90.
        level: "text": their texts alone; "llvm": as far as Triton goes; "cubin": machine code,
            which must fit into the shared memory of such a GPU.
    """
    count = 0
    evaluate_mods(make_problem(plan, 0))
    for architecture in architectures:
        made: list[Cubin] = []
        with compiled_by(functools.partial(_compile, architecture, level, made)):
            kernels = _kernels(plan, (architecture // 10, architecture % 10))
        for cubin in made:
            wrong = wrong_products(cubin)
            assert not wrong, (cubin.name, wrong)
        assert level != "cubin" or len(made) >= len(kernels), (len(made), len(kernels))
        count += len(kernels)
    return count


def _compile(architecture: int, level: str, made: list[Cubin], kernel: Kernel) -> None:
    """What fails here fails on a GPU, where another kernel would serve."""
    if level == "llvm":
        compile_to_llvm(kernel, architecture)
    if level == "cubin":
        with isolated():
            cubin = compile_kernel(kernel, architecture)
        room = GPUS[divmod(architecture, 10)].shared_memory
        if cubin.shared > room:
            raise NoRoom(f"{kernel.name} needs {cubin.shared} bytes of shared memory of {room}")
        made.append(cubin)


def _kernels(plan: Plan, capability: tuple[int, int]) -> list[Kernel]:
    """The kernels of results and gradients, and of the derivative."""
    problem = make_problem(plan, 0)
    generated = generate_code(
        make_call(problem), *problem.operands, dynamic=plan.dynamic, capability=capability,
        grad=loss_of(problem) if plan.is_differentiated else False,
    )  # fmt: skip
    if not plan.derivative:
        return generated.templates
    problem = make_problem(plan, 0)
    inputs = inputs_of(problem)
    derived = generate_code(
        make_derivative(problem), *inputs, dynamic=plan.dynamic, capability=capability
    )
    return [*generated.templates, *derived.templates]
