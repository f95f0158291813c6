"""Graphs of mods inside the graph that is being recorded.

The names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.utils import reenter_make_fx
from torch.fx.experimental import proxy_tensor

from flexhop.compat.compilation import copy_of, forms_of, once
from flexhop.compat.graphs import shared_graphs
from flexhop.compat.mods.constants import spell_constants

__all__ = ["retraced"]


def retraced(
    function: Callable[..., Any],
    example: Sequence[Any],
    mode_of_mods: Callable[[], contextlib.AbstractContextManager[Any]],
) -> torch.fx.GraphModule:
    """The graph of a mod in the graph that is being recorded.

    It belongs to one operator, because Inductor changes it.

    Args:
        function: a mod.
        example: its inputs.
        mode_of_mods: under which it is traced.
    """
    tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER

    def make() -> torch.fx.GraphModule:
        with mode_of_mods():
            return spell_constants(_retrace(function, tracer)(*example))

    known = shared_graphs.origin(function)
    if not isinstance(known, torch.fx.GraphModule):
        return make()
    key = (retraced, tracer, forms_of(example), mode_of_mods, known is function)
    return copy_of(once(key, known, make))


def _retrace(function: Callable[..., Any], tracer: Any) -> Callable[..., torch.fx.GraphModule]:
    """Inductor's decompositions drop `detach`, which is right once derivatives are taken. Those of
    mods are still to come."""
    table = {} if tracer is None else tracer.decomposition_table
    kept = {op: rule for op, rule in table.items() if op is not torch.ops.aten.detach.default}
    return reenter_make_fx(function, subgraph_decomp_table=kept)
