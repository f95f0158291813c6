"""A third dialect, for tests: one program for each query, which holds all keys at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flexhop.compat.kernels import inductor
from flexhop.lowering.emission.kernel import Captured, KernelCall, Output, emit_one
from flexhop.lowering.plan import KernelPlan, show_plan
from flexhop.lowering.problem import Problem
from flexhop.ops.args import AttentionArgs, BackwardArgs, CachedArgs
from flexhop.options import KernelOptions

MOST_KEYS = 128


def _grid(batch: Any, heads: Any, length: Any, width: Any, meta: dict[str, Any]) -> Any:
    return (batch * heads * length, 1, 1)


_SOURCE = Path(__file__).with_name("kernel.py.jinja").read_text()
_TEMPLATE = inductor.make_template("flexhop_rows", _grid, _SOURCE)


@dataclasses.dataclass(frozen=True)
class Row:
    """What a program holds: one query and so many keys."""

    keys: int

    def words(self) -> str:
        """For reports."""
        return f"one query x {self.keys} keys, 1 warp"


def constants(problem: Problem) -> dict[str, Any]:
    """Constants of kernel.py.jinja."""
    return {
        "KEYS": 1 << (problem.key_len - 1).bit_length(),
        "WIDTH": problem.head_dim,
        "Q_HEADS": problem.query_heads,
        "GQA_GROUP": problem.group,
        "SM_SCALE": problem.scale,
    }


class Attention:
    """The forward kernel."""

    def obstacles(self, problem: Problem, options: KernelOptions) -> Iterator[str]:
        """Why it cannot serve a call."""
        if problem.key_len > MOST_KEYS or problem.key_len_varies:
            yield f"it takes at most {MOST_KEYS} keys"
        if problem.mods.has_score_mod or problem.blocks is not None or problem.dropout_p:
            yield "it knows no mods, masks and dropout"
        if problem.head_dim & (problem.head_dim - 1) or problem.head_dim != problem.value_head_dim:
            yield "it takes head sizes that are powers of two"
        if problem.cache is not None or problem.returns_max or problem.kv_batch_shared:
            yield "it reads no cache, returns no maximum, and shares no keys"

    def slower(self, problem: Problem, options: KernelOptions) -> Iterator[str]:
        """Always: it takes no tensor cores."""
        yield "it takes no tensor cores"

    def plans(
        self, problem: Problem, options: KernelOptions, passed: str
    ) -> tuple[KernelPlan, ...]:
        """The one kernel."""
        plan = KernelPlan(
            kernel="forward",
            tile=Row(constants(problem)["KEYS"]),
            reason="rows serve this call" + passed,
            shared_memory=1024,
            programs=problem.batch * problem.query_heads * problem.query_len,
            constants=constants(problem),
            notes=("Rows are added up without tensor cores.",),
        )
        return (plan,)

    def emit(self, call: KernelCall, args: AttentionArgs | CachedArgs, output: Output) -> Any:
        """The output."""
        show_plan("forward", lambda: self.plans(call.problem, call.options, call.passed)[0])
        inputs = [args.query, args.key, args.value, output.written[0]]
        return emit_one(_TEMPLATE, inputs, output, {"num_warps": 1, **constants(call.problem)})


class Gradients:
    """There are no backward kernels."""

    def obstacles(self, problem: Problem, options: KernelOptions) -> Iterator[str]:
        """The one reason."""
        yield "it has no backward kernels"

    def slower(self, problem: Problem, options: KernelOptions) -> Iterator[str]:
        """Never asked."""
        return iter(())

    def plans(
        self, problem: Problem, options: KernelOptions, passed: str
    ) -> tuple[KernelPlan, ...]:
        """Never asked."""
        raise NotImplementedError

    def emit(
        self, call: KernelCall, args: BackwardArgs, joint: Sequence[Any], captured: Captured
    ) -> tuple[Any, Any, Any] | None:
        """Never asked."""
        raise NotImplementedError

    def start(self, call: KernelCall, args: AttentionArgs, joint: Any) -> None:
        """Never asked."""
        raise NotImplementedError


class Rows:
    """See flexhop/lowering/dialect.py."""

    name = "rows"
    title = "kernel by rows"
    architectures = None
    forward = Attention()
    backward = Gradients()

    def expect(self) -> None:
        """Nothing."""


DIALECT = Rows()
