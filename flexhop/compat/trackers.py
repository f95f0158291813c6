"""Telling Dynamo which operators have trackers, before the trackers are imported.

Dynamo finds the tracker of an operator by its name in one private table (the same in 2.11 to
2.15), and calls it like the class. The entries here import the class at the first call.
A file that needs Dynamo can therefore be imported before Dynamo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["announce"]


def announce(names: Iterable[str], load: Callable[[], Mapping[str, type]]) -> None:
    """Enter operators in Dynamo's table; call it when Dynamo has been imported.

    Args:
        names: of the operators.
        load: returns the class of each operator's tracker, by the operator's name.
    """
    from torch._dynamo.variables import higher_order_ops

    for name in names:
        entry = functools.partial(_build, load, name)
        higher_order_ops._hop_name_to_variable_class[name] = entry


def _build(
    load: Callable[[], Mapping[str, type]], name: str, operator: Any, *given: Any, **more: Any
) -> Any:
    return load()[name](operator, *given, **more)
