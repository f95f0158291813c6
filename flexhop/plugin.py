"""Tell PyTorch about flexhop; the only file that knows every room."""

from __future__ import annotations

import functools

from flexhop import mods
from flexhop.compat import check_torch_version, dynamo
from flexhop.indexing import IndexMode
from flexhop.ops import call
from flexhop.ops.backward import attention_backward
from flexhop.ops.forward import attention


def install(*, lowering: bool = False) -> None:
    """Register our operators with Dynamo, and the lowerings when the first graph is traced.

    Args:
        lowering: register the lowerings now, for graphs that did not come through Dynamo (an
            exported program that is loaded and then compiled). Takes as long as importing Inductor.

    Calling it again changes nothing.
    """
    _install_operators()
    if lowering:
        _install_lowerings()


@functools.cache
def _install_operators() -> None:
    check_torch_version()
    rules = dynamo.ModRules(
        prepare=_prepare,
        check_function=mods.check_arity,
        check_result=_check_result,
        check_captures=call.check_captures,
        on_trace=_install_lowerings,
        index_mode=IndexMode,
    )
    dynamo.register(attention.name(), attention_backward.name(), rules)


def _prepare(query, key, value, blocks, flat_call):  # noqa: ANN
    scale, enable_gqa, options, return_max, mask = flat_call
    facts = None if mask is None else call.MaskFacts(*mask)
    return call.prepare(
        query, key, value, blocks, call.Call(scale, enable_gqa, options, return_max, facts)
    )


def _check_result(result: object, kind: str) -> None:
    check = mods.check_score_result if kind == "score_mod" else mods.check_mask_result
    check(result)


@functools.cache
def _install_lowerings() -> None:
    from flexhop.lowering import register  # Inductor costs seconds to import: not before it is needed

    register()
