"""Tell PyTorch about flexhop; the only file that knows every room."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flexhop import compat, debug, mods
from flexhop.compat import dynamo
from flexhop.errors import NoTritonError
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
    compat.check_torch_version()
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
    """Check a call that is being compiled, not exported.

    Args:
        query, key, value, blocks: as in `call.prepare`.
        flat_call: a Call as plain tuples, which is what Dynamo was handed (ops/dispatch.py).

    Raises:
        FlexhopError: as `call.prepare`; NoTritonError, because Inductor would say it wrapped.
    """
    if query.device.type == "cuda" and not (compat.has_triton() or torch.compiler.is_exporting()):
        raise NoTritonError()
    given = call.Call(*flat_call)
    facts = None if given.mask is None else call.MaskFacts(*given.mask)
    return call.prepare(query, key, value, blocks, given._replace(mask=facts))


@functools.cache
def _install_lowerings() -> None:
    # Inductor costs seconds to import: not before it is needed.
    from flexhop.lowering import register

    register()
