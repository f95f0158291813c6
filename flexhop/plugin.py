"""Tell PyTorch about flexhop; the only file that knows every room."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from flexhop import debug, mods
from flexhop.compat import check_torch_version, dynamo
from flexhop.indexing import IndexMode
from flexhop.ops import call
from flexhop.ops.backward import attention_backward
from flexhop.ops.forward import attention


def install(*, lowering: bool = False) -> None:
    """Register our operators with Dynamo, and the lowerings when the first graph is traced.

    Args:
        lowering: register the lowerings now, for graphs that did not come through Dynamo (an
            exported program that is loaded and then compiled). Takes as long as to import
            Inductor.

    Calling it again changes nothing.
    """
    _install_operators()
    if lowering:
        _install_lowerings()


@functools.cache
def _install_operators() -> None:
    check_torch_version()
    debug.wanted()  # a wrong name is refused at import, not inside the compiler
    rules = dynamo.ModRules(
        prepare=_prepare,
        check_function=mods.check_arity,
        check_result=call.check_result,
        check_captures=call.check_captures,
        on_trace=_install_lowerings,
        index_mode=IndexMode,
    )
    dynamo.register(attention.name(), attention_backward.name(), rules)


def _prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: tuple[Tensor, ...],
    flat_call: tuple[Any, ...],
) -> tuple[float, call.Wire]:
    """Named again: Dynamo was handed plain tuples (ops/dispatch.py)."""
    given = call.Call(*flat_call)
    facts = None if given.mask is None else call.MaskFacts(*given.mask)
    return call.prepare(query, key, value, blocks, given._replace(mask=facts))


@functools.cache
def _install_lowerings() -> None:
    # Inductor costs seconds to import: not before it is needed.
    from flexhop.lowering import register

    register()
