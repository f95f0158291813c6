"""How many kernels a call launches, and what the one before the Hopper backward kernel computes.

A launch takes the host several microseconds, which short calls wait for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import flexhop
from flexhop.masks import causal
from flexhop.offline import Kernel, generate_code
from flexhop.offline.codegen import Graph, trace
from flexhop.offline.interpret import Memory, load
from tests.needs import needs_hopper


class Call(NamedTuple):
    """Sizes, mods and kernels of a call."""

    queries: int = 1024
    keys: int = 1024
    columns: int = 64
    value_columns: int = 64
    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    backend: Any = "hopper"
    is_deterministic: bool = False
    scale: float = 0.25

    def operands(self) -> list[torch.Tensor]:
        """Random leaves."""
        generator = torch.Generator().manual_seed(0)
        sizes = (self.queries, self.columns), (self.keys, self.columns)
        return [
            torch.randn(1, 2, *size, generator=generator).bfloat16().requires_grad_()
            for size in (*sizes, (self.keys, self.value_columns))
        ]

    def function(self) -> Callable[..., torch.Tensor]:
        """The call."""
        sizes = self.queries, self.keys
        mask = self.mask and flexhop.create_block_mask(self.mask, None, None, *sizes, "cpu")
        options = flexhop.KernelOptions(backend=self.backend, deterministic=self.is_deterministic)
        return lambda q, k, v: flexhop.flex_attention(
            q, k, v, self.score, block_mask=mask, scale=self.scale, kernel_options=options
        )


def launches(code: str | None) -> list[str]:
    """Names of the kernels that a wrapper launches, in order."""
    return re.findall(r"(?m)^ +(\w+)\.run\(", code or "")


def distance(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - (q - k).abs() * 0.1 * (h + 1)


BACKWARD = {
    "dense": (Call(), 3),
    "causal": (Call(mask=causal), 3),
    "distance": (Call(score=distance), 3),
    "odd lengths": (Call(queries=1000, keys=900, columns=80, value_columns=80), 3),
    # Out has other columns than query, whose gradient is cleared by a kernel of its own.
    "narrow values": (Call(columns=192, value_columns=128), 4),
    # The order of additions to blocks that a mask lists.
    "fixed order": (Call(mask=causal, is_deterministic=True), 4),
    "portable": (Call(queries=256, backend="triton"), 3),
}


@needs_hopper
@pytest.mark.parametrize("case", BACKWARD)
def test_launches_of_a_backward_pass(case: str) -> None:
    """Statistics and zeros come from one kernel; the last one rounds the gradient of query."""
    call, most = BACKWARD[case]
    generated = generate_code(call.function(), *call.operands(), grad=True)
    assert len(launches(generated.backward)) == most, launches(generated.backward)


def _named(kernel: Kernel, arguments: dict[str, Any], name: str) -> Any:
    """The argument that a template calls `name`; one buffer may have several names."""
    found = re.search(rf"(?m)^ +{name} = (\w+)$", kernel.source)
    assert found, name
    return arguments[found[1]]


class Seen(NamedTuple):
    """What the backward kernel found, and what it added to the gradient of query."""

    found: dict[str, torch.Tensor]
    added: torch.Tensor


def run(call: Call, gradient: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Any:
    """Run both passes with Hopper kernels that store `out` and `lse`, and random gradients."""
    seen: list[Seen] = []

    def stand_in(kernel: Kernel, arguments: dict[str, Any]) -> None:
        if "DELTA" not in kernel.source:
            arguments["out_ptr0"].copy_(out)
            _named(kernel, arguments, "LSE").copy_(lse)
            return
        names = ("LSE", "DELTA", "COUNTER", "GRAD_QUERY")
        found = {name: _named(kernel, arguments, name).clone() for name in names}
        added = _named(kernel, arguments, "GRAD_QUERY").normal_()
        seen.append(Seen(found, added.clone()))

    def launch(graph: Graph) -> Callable[..., Any]:
        return load(graph.codes[0], Memory(poison=True, check_bounds=True), gluon=stand_in)

    leaves = call.operands()
    trace(call.function(), launch, (9, 0), dynamic=False)(*leaves).backward(gradient)
    (only,) = seen
    return only, leaves[0].grad


@needs_hopper
@pytest.mark.parametrize("case", [name for name in BACKWARD if name != "portable"])
def test_the_backward_kernel_finds_statistics_and_zeros(case: str) -> None:
    call, _ = BACKWARD[case]
    generator = torch.Generator().manual_seed(1)
    size = (1, 2, call.queries, call.value_columns)
    out, gradient = (torch.randn(size, generator=generator).bfloat16() for _ in range(2))
    lse = torch.randn(size[:3], generator=generator)
    lse[0, 1, 5] = -math.inf  # sees nothing
    seen, grad_query = run(call, gradient, out, lse)
    found, rows = seen.found, call.queries
    wanted = torch.where(lse == -math.inf, math.inf, lse * math.log2(math.e))
    torch.testing.assert_close(found["LSE"][..., :rows], wanted)
    delta = (out.double() * gradient.double()).sum(-1).float()
    torch.testing.assert_close(found["DELTA"][..., :rows], delta, rtol=1e-5, atol=1e-5)
    assert (found["LSE"][..., rows:] == math.inf).all()
    assert not found["DELTA"][..., rows:].any()
    assert not found["COUNTER"].any() and not found["GRAD_QUERY"].any()
    needed = 1 + found["LSE"].numel() // 64 if call.is_deterministic else 1
    assert found["COUNTER"].numel() >= needed
    rounded = (seen.added[:, :, :rows] * call.scale).bfloat16()
    torch.testing.assert_close(grad_query, rounded, rtol=0, atol=0)
