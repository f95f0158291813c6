"""Second derivatives by kernels: the tangent of the backward pass.

Every second-order derivative is built from one function. It maps tangents of the backward pass's
inputs to tangents of its results. Let s = score_mod(scale · q·k), P the softmax of s, and G the
gradient of out. The backward pass is

    D = rowsum(G ∘ out) - grad_lse,    dS = P ∘ (G Vᵀ - D),
    dQ = scale dS K,    dK = scale dSᵀ Q,    dV = Pᵀ G.

With a dot for a tangent, ṡ as in forward mode, and the tangents of lse and out from the
forward-mode kernel, its tangent is

    Ṗ = P ∘ (ṡ - lse_dot),    D_dot = rowsum(G_dot ∘ out + G ∘ out_dot) - grad_lse_dot,
    dS_dot = Ṗ ∘ (G Vᵀ - D) + P ∘ (G_dot Vᵀ + G V_dotᵀ - D_dot),
    dQ_dot = scale (dS_dot K + dS K_dot),    dK_dot = scale (dS_dotᵀ Q + dSᵀ Q_dot),
    dV_dot = Ṗᵀ G + Pᵀ G_dot.

Only four numbers per query are stored. A score_mod multiplies dS and dS_dot by its derivative m',
and adds dS times the tangent of m' to the latter. The gradient of a captured tensor t is the sum
of dS dm/dt over the scores that read it; its tangent is the sum of dS_dot dm/dt and dS times the
tangent of dm/dt. Tangents of captured tensors count in ṡ and in these tangents. With dropout, the
weights beside G, and all products with Vᵀ, are multiplied by what dropout leaves of each weight.

The gradient of a gradient is the same function, because second derivatives are symmetric.
Differentiating <A, dQ> + <B, dK> + <C, dV> by query, key and value gives their gradients' tangents
along (A, B, C); by G it gives out_dot, and by grad_lse it gives lse_dot. The gradient of out and
its tangent, with G_dot the gradient of out and G that of the tangent, is the same function too.
For the tangents of query, key and value it is the backward pass.

Matrix products of size M x N, if query, key and value have tangents and G has none: 6 for out_dot,
7 for query, 7 for key and 4 for value. That is 24, compared with 7 in the portable backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flexhop.ops.derivatives.program import capture_name, capture_position, read_step

_NAMES = ("query", "key", "value")
_RESULTS = ("out", "lse", "out_dot", "lse_dot")


class Wanted(NamedTuple):
    """A result: a gradient ("grad"), its tangent ("grad_dot"), or a tangent ("dot") of `name`.

    Captured tensors have the names of ops/derivatives/program.py.
    """

    kind: str
    name: str

    @property
    def capture(self) -> int | None:
        """The position of a captured tensor; None for other values."""
        return capture_position(self.name)


class Second(NamedTuple):
    """A second-order derivative, as tangents of the backward pass.

    grads: of "out" and "lse", those whose gradients the backward pass takes. dots: what has a
    tangent, of query, key, value, captured tensors, "out" and "lse", where the last two are those
    of `grads`. Both say by which of the call's directions. results: in the order of the program.
    """

    grads: dict[str, int]
    dots: dict[str, int]
    results: tuple[Wanted, ...]

    @property
    def moved(self) -> dict[int, int]:
        """The captured tensors that have tangents, by position, and by which direction."""
        places = ((capture_position(name), at) for name, at in self.dots.items())
        return {position: at for position, at in places if position is not None}


def read_second(program: Sequence[str], num_captures: int) -> Second | None:
    """Classify a program of two steps; None for others."""
    if len(program) != 2:
        return None
    first, last = map(read_step, program)
    count = len(first.given)  # directions of the first step
    inputs = dict(enumerate((*_NAMES, *map(capture_name, range(num_captures)))))
    if first.kind == "vjp":
        results_at = {len(inputs) + i: _RESULTS[at] for i, at in enumerate(first.given)}
        names = inputs | results_at
        wanted = [names.get(i, "") for i in first.wanted]
        grads = {_RESULTS[at]: i for i, at in enumerate(first.given)}
        if last.kind == "vjp":
            dots = {wanted[at]: count + i for i, at in enumerate(last.given)}
            results = [_symmetric(names.get(i, "")) for i in last.wanted]
        else:
            dots = {names.get(at, ""): count + i for i, at in enumerate(last.given)}
            results = [Wanted(kind, name) for kind in ("grad", "grad_dot") for name in wanted]
    elif last.kind == "vjp":
        tangents = [inputs[i] for i in first.given]
        dots = {name: i for i, name in enumerate(tangents)}
        named = {_RESULTS[at]: count + i for i, at in enumerate(last.given)}
        dots |= {name: named[name] for name in ("out", "lse") if name in named}
        grads = {n: named[f"{n}_dot"] for n in ("out", "lse") if f"{n}_dot" in named}
        of_inputs = {i: Wanted("grad_dot", name) for i, name in inputs.items()}
        of_tangents = {len(inputs) + i: Wanted("grad", n) for i, n in enumerate(tangents)}
        results = [(of_inputs | of_tangents).get(i, Wanted("", "")) for i in last.wanted]
    else:
        return None
    found = Second(grads, dots, tuple(results))
    return found if _is_served(found) else None


def _symmetric(name: str) -> Wanted:
    """The gradient of a gradient, for one input of the backward pass."""
    return Wanted("dot" if name in ("out", "lse") else "grad_dot", name)


def _is_served(second: Second) -> bool:
    """Whether kernels exist: a gradient of out or lse, a tangent of an input of attention."""
    known = {*second.dots, *(wanted.name for wanted in second.results)}
    has_tangent = bool(second.moved) or any(name in second.dots for name in _NAMES)
    return "" not in known and bool(second.grads) and has_tangent
