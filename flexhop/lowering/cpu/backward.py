"""Lowering of the gradients on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from flexhop.compat.graphs import inline
from flexhop.compat.kernels import cpp_kernel, inductor
from flexhop.compat.kernels.cpp_kernel import Printer
from flexhop.lowering.cpu.joint import Joint, joint_functions, lower_joint
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
    strided,
)
from flexhop.ops.args import BackwardArgs
from flexhop.templates import header

aten, prims = torch.ops.aten, torch.ops.prims
_TILE = 64  # queries, as in templates/cpu/tiles.h


def lower_attention_backward(args: BackwardArgs) -> tuple[Any, Any, Any, list[Any]]:
    """Emit the kernel: gradients of query, key, value and captures.

    Raises:
        ModLoweringError: as `lower_mods`.
    """
    mods = lower_mods(args)
    joint = lower_joint(args, mods)
    states = lower_states(args)
    names = ("query", "key", "value", "out", "grad_out")
    args = args._replace(**{name: dense(getattr(args, name)) for name in names})
    return _emit(args, mods, joint, states)


def _emit(
    args: BackwardArgs, mods: Mods, joint: Joint, states: Any
) -> tuple[Any, Any, Any, list[Any]]:
    query: Any = args.query
    device, dtype = inductor.device_of(query), query.get_dtype()
    key: Any = args.key
    value: Any = args.value
    parts = _parts(args)
    grad_key, grad_value = (
        inductor.empty([parts, *one.get_size()], None, torch.float32, device)
        for one in (key, value)
    )
    written = inductor.realize([grad_key, grad_value, *joint.sums.values()])
    saved = [inductor.contiguous(one) for one in (args.lse, args.grad_lse) if one is not None]
    seed = lower_seed(args)
    optional = [*seed, *([] if states is None else [states])]
    inputs = [
        query, args.key, args.value, args.out, args.grad_out, *saved, *optional,
        *mods.captured_tensors,
    ]  # fmt: skip
    # Threads add to captured tensors in any order; without captured tensors no sum depends on it.
    is_ordered = bool(args.options.get("deterministic")) and bool(joint.sites)

    def text(grad_query: Any, printer: Printer) -> str:
        call = f"""
using scalar_t = {printer.dtype(dtype)};
const flexhop::Backward<scalar_t> call{{
  {{{operand_numbers(printer, args)}}},
  {operand_pointers(printer, args)},
  {strided(printer, args.out)},
  {strided(printer, args.grad_out)},
  {lse_pointers(printer, saved[0])},
  {printer.pointer(saved[1]) if len(saved) > 1 else "nullptr"},
  {strided(printer, grad_query)},
  {printer.pointer(written[0])}, {printer.pointer(written[1])}, {parts},
  {"true" if is_ordered else "false"},
  {blocks_of(printer, args, states, mods)},
  {dropout_of(printer, args, seed)}}};
{score_functions(printer, mods, by_key=True)}
{joint_functions(printer, mods, joint, dict(zip(joint.sums, written[2:], strict=True)))}
const flexhop::Functions<decltype(full), decltype(partial), decltype(joint_full),
                         decltype(joint_partial)>
    mods{{full, partial, joint_full, joint_partial}};
flexhop::differentiate(call, mods, captured);
"""
        files = ("products", "tiles", "packed", "captured", "dropout", "lse", "backward")
        return header(*files) + "KERNEL_BODY" + call

    metas = inline.leaves(inductor.output_meta())
    layout, strides = layout_of(query, query.get_size(), metas[0])
    out = cpp_kernel.emit(layout, inputs, written, [*mods.captures, *inputs], text)
    grads = [
        _summed(sums, like.get_dtype(), meta)
        for sums, like, meta in zip((grad_key, grad_value), (key, value), metas[1:3], strict=True)
    ]
    captured = [
        inductor.call_lowering(
            prims.convert_element_type.default, sums, args.score_captures[i].get_dtype()
        )
        for i, sums in sorted(joint.sums.items())
    ]
    return (inline.with_strides(out, strides), *grads, captured)


def _parts(args: BackwardArgs) -> int:
    """Into how many parts the tiles of queries of one head of keys are divided."""
    query: Any = args.query
    key: Any = args.key
    heads = max(1, inductor.hint(key.get_size()[0]) * inductor.hint(key.get_size()[1]))
    tiles = -(-inductor.hint(query.get_size()[2]) // _TILE)
    return max(1, min(-(-cpp_kernel.threads() // heads), tiles))


def _summed(parts: Any, dtype: torch.dtype, meta: Any) -> Any:
    """The sum of what the parts found, like `meta`."""
    total = inductor.call_lowering(aten.sum.dim_IntList, parts, [0])
    total = inductor.call_lowering(prims.convert_element_type.default, total, dtype)
    return inline.with_strides(total, inductor.as_expressions(meta.stride()))
