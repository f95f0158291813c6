"""Operators that check themselves at run time, if FLEXHOP_VERIFY requests it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexhop.compat.graphs import inline
from flexhop.compat.kernels import inductor
from flexhop.ops.args import BackwardArgs, learned_captures
from flexhop.ops.verification.certified import OPTION, add_site


def certifying(kind: type[Any], lower: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering that emits a check after the kernels, if the operator has the option.

    Args:
        kind: of the operator's operands.
        lower: its lowering.
    """

    @functools.wraps(lower)
    def certified(*operands: Any) -> Any:
        args = kind(*operands)
        results = lower(*operands)
        if OPTION in args.options:
            _emit_check(args, results)
        return results

    return certified


def _emit_check(args: Any, results: Any) -> None:
    fakes = type(args)(*inline.fake_operands())
    positions, rebuild = inline.separate(fakes)
    flat = inline.leaves(args)
    values = [flat[i] for i in positions]
    of_tensors = [i for i, value in enumerate(values) if inductor.is_ir(value)]
    of_sizes = [i for i, value in enumerate(values) if not inductor.is_ir(value)]

    def in_order(given: Sequence[Any]) -> Any:
        """Operands from the tensors, then the sizes."""
        by_place = dict(zip(of_tensors + of_sizes, given, strict=True))
        return rebuild([by_place[i] for i in range(len(values))])

    captured = learned_captures(args.sites) if isinstance(args, BackwardArgs) else []
    site = add_site(str(args.options[OPTION]), type(args), in_order, captured)
    tensors = inductor.realize([*inline.leaves(results), *(values[i] for i in of_tensors)])
    sizes = [values[i] for i in of_sizes]
    inline.call_at_run_time(torch.ops.flexhop.certify.default, tensors, sizes, site)
