"""Graphs of mods inside the graph that is being recorded.

The names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.utils import reenter_make_fx
from torch.fx.experimental import proxy_tensor

__all__ = ["retrace"]


def retrace(function: Callable[..., Any]) -> Callable[..., torch.fx.GraphModule]:
    """Trace a mod into the graph that is being recorded.

    Inductor's decompositions drop `detach`, which is right once derivatives are taken. Those of
    mods are still to come.
    """
    tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER
    table = {} if tracer is None else tracer.decomposition_table
    kept = {op: rule for op, rule in table.items() if op is not torch.ops.aten.detach.default}
    return reenter_make_fx(function, subgraph_decomp_table=kept)
