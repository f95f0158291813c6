"""Inductor's search for softmaxes, which leaves out those of mods (torch 2.11, 2.12).

Inductor finds a softmax in a graph, to compute its largest element and its sum in one loop. If the
row is shorter than eight numbers, or the loop is split, 2.11 computes them apart and warns that it
does. `weight.softmax(-1)[h]` in a mod is computed before the kernel, so the softmax is one of the
graph although nobody wrote it there. It is computed apart without a warning. A softmax outside of
attention warns as it does without flexhop. 2.13 never warns.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._inductor.fx_passes import post_grad

from flexhop.compat import torch_version
from flexhop.compat.mods.location import is_inside_flexhop

__all__ = ["leave_softmaxes_of_mods"]


def leave_softmaxes_of_mods() -> None:
    """From now on, the search leaves out what our functions put into a graph.

    It must come before Inductor's first graph, which prepares the search.
    """
    if torch_version() >= (2, 13):
        return
    wants = post_grad.prepare_softmax_extra_check

    @functools.wraps(wants)
    def wants_and_is_apart(match: Any) -> bool:
        return wants(match) and not any(map(is_inside_flexhop, match.nodes))

    post_grad.prepare_softmax_extra_check = wants_and_is_apart
