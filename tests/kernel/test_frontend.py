"""What Triton visits of a Hopper kernel, once for each kind of arguments."""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from triton.compiler.code_generator import CodeGenerator

import flexhop
from flexhop.offline import Kernel, generate_code
from flexhop.options import KernelOptions
from tests.compiler_stages import compile_to_layouts
from tests.needs import needs_hopper

pytestmark = needs_hopper

HEADS, LENGTH = 4, 512


def forward_and_backward(score_mod: Any = None) -> list[Kernel]:
    inputs = [
        torch.zeros(1, HEADS, LENGTH, 64, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    options = KernelOptions(backend="hopper")
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, score_mod, kernel_options=options),
        *inputs, grad=True,
    )  # fmt: skip
    return [kernel for kernel in generated.templates if kernel.is_gluon]


def visited(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often Triton visits each function."""
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    found: Counter[str] = Counter()
    visit = CodeGenerator.visit_FunctionDef

    def count(self: CodeGenerator, node: ast.FunctionDef) -> Any:
        found[node.name] += 1
        return visit(self, node)

    with mock.patch.object(CodeGenerator, "visit_FunctionDef", count):
        compile_to_layouts(kernel, 90)
    return found


def arguments(kernel: Kernel, function: str) -> list[str]:
    (node,) = ast.parse(kernel.function_text(function)).body
    assert isinstance(node, ast.FunctionDef)
    return [argument.arg for argument in node.args.args]


def test_consumers_share_what_they_call(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = forward_and_backward()
    (changed, _) = forward_and_backward(lambda score, b, h, q_idx, kv_idx: score * 2)
    for kernel, loops in ((forward, "attend_in_one_loop"), (changed, "attend_in_three_loops")):
        counts = visited(kernel, monkeypatch)
        assert counts["consume"] == 2  # each knows its number
        assert counts["update_softmax"] == counts[loops] == 1
    assert counts["first_step"] == counts["attend_steps"] == 1
    counts = visited(backward, monkeypatch)
    assert counts["differentiate"] == 2
    assert counts["grad_scores"] == counts["as_operand"] == 1


def test_functions_take_only_arguments_of_the_kernel_that_some_read() -> None:
    slopes = torch.ones(HEADS)

    def scaled(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * slopes[h]

    forward, _ = forward_and_backward(scaled)
    for function in ("consume", "attend_steps", "attend_in_one_loop", "score_mod"):
        captured, *others = arguments(forward, function)
        assert captured in forward.parameters, function
        assert not {*others} & {*forward.parameters}, function
    assert f"tl.load({captured} +" in forward.function_text("score_mod")
