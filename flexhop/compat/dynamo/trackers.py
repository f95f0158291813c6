"""Register operators with Dynamo before their trackers are imported.

Dynamo looks up an operator's tracker by name in a private table (the same in 2.11 to 2.15) and
calls it like a class. The entries here import the class at the first call, so a file that needs
Dynamo can be imported before Dynamo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["announce"]


def announce(names: Iterable[str], load: Callable[[], Mapping[str, type]]) -> None:
    """Add operators to Dynamo's table; call it once Dynamo is imported.

    Args:
        names: names of the operators.
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
