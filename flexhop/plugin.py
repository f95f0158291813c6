"""Register flexhop with PyTorch. The only file that knows every room."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexhop import compat, mods
from flexhop.block_mask.operator import block_lists
from flexhop.compat import compilation
from flexhop.compat.dynamo.hooks import announce, install_refusals
from flexhop.compat.imports import after_import
from flexhop.compat.mods.indexing import IndexMode
from flexhop.errors import FlexhopError, NoTritonError
from flexhop.ops import call
from flexhop.ops.args import CachedArgs
from flexhop.ops.backward import attention_backward
from flexhop.ops.cached import cached_attention
from flexhop.ops.cached_call import prepare_cached
from flexhop.ops.derivatives.operator import attention_derivative
from flexhop.ops.forward import attention
from flexhop.ops.replicated import SLOT
from flexhop.options import debug
from flexhop.options.progress import PROGRESS


def install(*, lowering: bool = False, workers: bool = False) -> None:
    """Register flexhop with PyTorch: the operators now, the lowerings with the first graph.

    Args:
        lowering: register the lowerings now. Graphs that do not come through Dynamo need this,
            such as a loaded exported program that is compiled. It imports Inductor, which takes
            seconds.
        workers: register the lowerings, and start the processes in which Inductor compiles
            kernels. They start in the background while a program loads its weights, say. The
            first compiled call then need not wait for them, which saves five to eight seconds.

    Later calls have no effect.
    """
    _install_operators()
    if workers:
        # First: they start while this process imports the rest.
        from flexhop.compat.workers.early import begin

        begin()
        from flexhop.compat.workers.warm import start_workers

        start_workers()
        _load_trackers()
    if lowering or workers:
        _install_lowerings()
    if workers:
        from flexhop.lowering.dialect import dialects

        dialects()


@functools.cache
def _install_operators() -> None:
    compat.check_torch_version()
    debug.wanted()  # a wrong name raises at import, not inside the compiler
    SLOT.attend_dtensors = _attend_dtensors
    after_import("torch._dynamo", _install_trackers, before=_begin_workers)
    after_import("torch._inductor.codegen.cpp", _repair_cpp)
    after_import("torch._inductor.codegen.triton", _repair_triton)
    after_import("torch._inductor.codegen.triton_split_scan", _repair_split_scans)
    after_import("torch._inductor.codegen.cuda.device_op_overrides", _repair_packages)
    after_import("torch._inductor.fx_passes.post_grad", _repair_search_for_softmaxes)


def _begin_workers() -> None:
    if torch.cuda.is_initialized():  # this program probably compiles for a GPU
        from flexhop.compat.workers.early import begin

        begin()


def _repair_cpp() -> None:
    from flexhop.compat.graphs.repairs import keep_renames
    from flexhop.compat.kernels.cpp_checks import keep_rows_apart, place_checks, split_evenly

    keep_renames()
    place_checks()
    keep_rows_apart()
    split_evenly()


def _repair_triton() -> None:
    from flexhop.compat.graphs.mended import mend_own_graphs
    from flexhop.compat.graphs.repairs import separate_loops

    separate_loops()
    mend_own_graphs()


def _repair_split_scans() -> None:
    from flexhop.compat.graphs.repairs import repair_split_scans

    repair_split_scans()


def _repair_packages() -> None:
    from flexhop.compat.graphs.repairs import repair_scratch

    repair_scratch()


def _repair_search_for_softmaxes() -> None:
    from flexhop.compat.graphs.repairs import leave_softmaxes_of_mods

    leave_softmaxes_of_mods()


def _install_trackers() -> None:
    operators = (
        attention,
        attention_backward,
        attention_derivative,
        cached_attention,
        block_lists,
    )
    announce([operator.name() for operator in operators], _load_trackers)
    install_refusals(_as_dynamo_error)


def _as_dynamo_error(error: FlexhopError) -> FlexhopError:
    from flexhop.compat.dynamo.calls import as_dynamo_error

    return as_dynamo_error(error)


@functools.cache
def _load_trackers() -> dict[str, type]:
    # They import Dynamo, which takes seconds, so only once something compiles.
    from flexhop.compat.dynamo import calls as dynamo
    from flexhop.compat.dynamo import others

    dynamo.AttentionVariable.rules = dynamo.ModRules(
        prepare=_prepare,
        prepare_cached=_prepare_cached,
        check_function=mods.check_arity,
        check_result=call.check_result,
        check_captures=call.check_captures,
        on_trace=_expect_graph,
        index_mode=IndexMode,
    )
    return {
        attention.name(): dynamo.AttentionVariable,
        attention_backward.name(): dynamo.BackwardVariable,
        attention_derivative.name(): dynamo.BackwardVariable,
        cached_attention.name(): others.CachedVariable,
        block_lists.name(): others.BlockListsVariable,
    }


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
        flat_call: a Call as plain tuples, as Dynamo received it (ops/dispatch.py).

    Raises:
        FlexhopError: as `call.prepare`; NoTritonError, because Inductor would wrap it.
    """
    given = _read_call(flat_call)
    found = call.prepare(query, key, value, blocks, given)
    _require_triton(query)
    if given.agree_groups:
        call.agree_on_shapes(query, key, value, given.agree_groups)
    return found


def _prepare_cached(*operands: Any) -> tuple[float, call.Wire]:
    """The same for a call that reads a cache.

    Args:
        operands: query, key, value, blocks and pages as in CachedArgs; and a pair: a Call as plain
            tuples, and whether there are a key_mod and a value_mod.
    """
    query, key, value, blocks, pages, (flat_call, has_mods) = operands
    _require_triton(query)
    mod: Any = None  # mods are not read
    args = CachedArgs(query, key, value, mod, mod, mod, mod, blocks, pages, 0.0, {})
    return prepare_cached(args, _read_call(flat_call), has_mods)


def _require_triton(query: Tensor) -> None:
    if query.device.type == "cuda" and not (compat.has_triton() or torch.compiler.is_exporting()):
        raise NoTritonError()


def _read_call(flat_call: tuple[Any, ...]) -> call.Call:
    given = call.Call(*flat_call)
    facts = None if given.mask is None else call.MaskFacts(*given.mask)
    return given._replace(mask=facts)


def _attend_dtensors(*operands: Any, **more: Any) -> Any:
    # Without DTensors, do not pay for their imports.
    from flexhop.distributed.tensor_parallel import attend_dtensors

    return attend_dtensors(*operands, **more)


@functools.cache
def _watched() -> Callable[[], None]:
    from flexhop.compat.dynamo.compiling import watch_compilations

    def end() -> None:
        PROGRESS.end()
        compilation.forget()

    return watch_compilations(PROGRESS.start, end)


def _expect_graph() -> None:
    """Called while a graph with one of our operators is traced; it will be lowered soon."""
    _watched()()
    PROGRESS.enter("tracing a model with attention")
    if torch.cuda.is_initialized():
        # Before the lowerings: workers start while this process imports Inductor.
        from flexhop.compat.workers.warm import start_pool

        start_pool()
    _install_lowerings()
    from flexhop.lowering import expect_kernels

    expect_kernels()


@functools.cache
def _install_lowerings() -> None:
    # Importing Inductor takes seconds, so only when it is needed.
    from flexhop.lowering import register

    register()
