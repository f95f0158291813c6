"""What is done with a problem: computed and judged, or its kernels compiled for GPUs not here."""

from __future__ import annotations

from typing import Any

import torch

from flexhop.offline import generate_code
from flexhop.offline.cubin import compile_kernel
from tests.case_inputs import make_call, make_inputs, make_loss
from tests.fuzz.draw import Problem
from tests.judging import Outcome, assert_case


def check_results(
    problem: Problem, seed: int, device: str = "cpu", backend: str = "eager"
) -> None:
    """Forward and backward against fp64; backend: "eager", or one of torch.compile.

    Raises:
        AssertionError: a result is further from fp64 than plain PyTorch of this dtype.
    """
    case = problem.case
    inputs = make_inputs(case, device, seed=seed % 1000)
    call: Any = make_call(case, inputs)
    torch._dynamo.reset()
    if backend != "eager":
        call = torch.compile(call, backend=backend, fullgraph=True, dynamic=problem.dynamic)
    result = call(inputs.query, inputs.key, inputs.value)
    make_loss(case, inputs)(result).backward()
    assert_case(case, inputs, Outcome.of(case, result, inputs))


def compile_offline(problem: Problem, architectures: tuple[int, ...] = (90,)) -> int:
    """Generate the kernels of a problem, and compile them; the number of kernels."""
    case, count = problem.case, 0
    for architecture in architectures:
        inputs = make_inputs(case)
        generated = generate_code(
            make_call(case, inputs), inputs.query, inputs.key, inputs.value,
            grad=make_loss(case, inputs), dynamic=problem.dynamic,
            capability=(architecture // 10, architecture % 10),
        )  # fmt: skip
        for kernel in generated.templates:
            compile_kernel(kernel, architecture)
            count += 1
    return count
