"""Our errors in code that Dynamo traces, raised while it traces. torch 2.11 to 2.15.

Dynamo follows a `raise` to the end of the traced function and then says only that it observed an
exception, without its text. A function with the mark of `torch.compiler.assume_constant_result`
runs as it is: an error that it raises reaches the user. Facts must be constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexhop.errors import FlexhopError

__all__ = ["install_refusals"]


def install_refusals(convert: Callable[[FlexhopError], FlexhopError]) -> None:
    """Let errors that are made in traced code be raised there.

    convert: an error to one that Dynamo passes on.
    """

    def refuse(kind: type[FlexhopError], facts: dict[str, Any]) -> None:
        raise convert(kind(**facts))

    # As that decorator does, which imports Dynamo.
    refuse._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    FlexhopError.refuse = staticmethod(refuse)
