"""Lowering of the forward operators on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexhop.compat.graphs import inline
from flexhop.compat.kernels import cpp_kernel, inductor
from flexhop.compat.kernels.cpp_kernel import Printer
from flexhop.lowering.cpu.mods import Mods, lower_mods, score_functions
from flexhop.lowering.cpu.operands import (
    blocks_of,
    dense,
    dropout_of,
    layout_of,
    lower_seed,
    lower_states,
    lse_pointers,
    operand_numbers,
    operand_pointers,
    states_of,
    strided,
)
from flexhop.ops import wide_lse
from flexhop.ops.args import AttentionArgs, CachedArgs, index_sizes, operands_of
from flexhop.ops.cached_eager import ordered_args
from flexhop.templates import header


def lower_attention(args: AttentionArgs) -> tuple[Any, Any, Any]:
    """Emit the kernel: (out, lse, max_scores).

    Raises:
        ModLoweringError: as `lower_mods`.
    """
    mods = lower_mods(args)
    args = args._replace(query=dense(args.query), key=dense(args.key), value=dense(args.value))
    return _emit(args, mods, lower_states(args), None)


def lower_cached_attention(args: CachedArgs) -> tuple[Any, Any, Any]:
    """The same for keys from a cache: they are put in order first, if need be.

    Raises:
        ModLoweringError: as `lower_mods`.
    """
    ordered, states = _in_order(args)
    (lengths,) = inductor.realize(args.pages[1:]) or (None,)
    mods = lower_mods(ordered, index_sizes(CachedArgs(*inline.fake_operands())))
    return _emit(ordered, mods, states, lengths)


def _in_order(args: CachedArgs) -> tuple[AttentionArgs, Any]:
    """Operands with keys and values in order, with storage; the states of their blocks."""

    def formula(args: CachedArgs) -> list[Tensor]:
        ordered = ordered_args(args)
        return [ordered.key, ordered.value, *states_of(ordered)]

    key, value, *states = (dense(one) for one in inline.lower_operands(formula, args))
    query = dense(args.query)
    ordered = operands_of(AttentionArgs, args, query=query, key=key, value=value)
    return ordered, states[0] if states else None


def _emit(args: AttentionArgs, mods: Mods, states: Any, lengths: Any) -> tuple[Any, Any, Any]:
    query: Any = args.query
    value: Any = args.value
    device, dtype = inductor.device_of(query), torch.float32
    out_meta, _, max_meta = inductor.output_meta()
    size = [*query.get_size()[:3], value.get_size()[3]]
    layout, strides = layout_of(query, size, out_meta)
    lse = inductor.empty(size[:3], None, wide_lse.dtype_of(args.options, dtype), device)
    largest = inductor.empty(inductor.as_expressions(max_meta.shape), None, dtype, device)
    returns_max = bool(args.options.get("return_max"))
    written = inductor.realize([lse, largest][: 1 + returns_max])
    optional = [one for one in (states, lengths) if one is not None]
    seed = lower_seed(args)
    inputs = [query, args.key, args.value, *optional, *seed, *mods.captured_tensors]

    def text(out: Any, printer: Printer) -> str:
        call = f"""
using scalar_t = {printer.dtype(query.get_dtype())};
const flexhop::Forward<scalar_t> call{{
  {{{operand_numbers(printer, args)}}},
  {operand_pointers(printer, args)},
  {strided(printer, out)},
  {lse_pointers(printer, written[0])},
  {printer.pointer(written[1]) if returns_max else "nullptr"},
  {printer.pointer(lengths) if lengths is not None else "nullptr"},
  {blocks_of(printer, args, states, mods)},
  {dropout_of(printer, args, seed)}}};
{score_functions(printer, mods, by_key=False)}
flexhop::attend(call, full, partial);
"""
        # Inductor writes the signature between the declarations and the body.
        files = ("products", "tiles", "packed", "dropout", "lse", "forward")
        return header(*files) + "KERNEL_BODY" + call

    symbols = [*mods.captures, *inputs]
    out = cpp_kernel.emit(layout, inputs, written, symbols, text)
    return inline.with_strides(out, strides), lse, largest
