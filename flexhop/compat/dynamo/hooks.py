"""What Dynamo knows of this package before its other files here are imported. torch 2.11 to 2.15.

Dynamo looks up an operator's tracker by name in a private table and calls it like a class. The
entries here import the class at the first call, so a file that needs Dynamo can be imported before
Dynamo.

Dynamo follows a `raise` to the end of the traced function and then says only that it observed an
exception, without its text. A function with the mark of `torch.compiler.assume_constant_result`
runs as it is: an error that it raises reaches the user. Facts must be constants.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flexhop.errors import FlexhopError

__all__ = ["announce", "install_refusals"]


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


def install_refusals(convert: Callable[[FlexhopError], FlexhopError]) -> None:
    """Let errors that are made in traced code be raised there.

    convert: an error to one that Dynamo passes on.
    """

    def refuse(kind: type[FlexhopError], facts: dict[str, Any]) -> None:
        raise convert(kind(**facts))

    # As that decorator does, which imports Dynamo.
    refuse._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    FlexhopError.refuse = staticmethod(refuse)
