"""Operands of the operators as lowerings see them: IR in, facts and template inputs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexhop.compat import inductor
from flexhop.lowering.mods import ModBuffers
from flexhop.lowering.problem import MaskBlocks, Problem, read_device
from flexhop.ops.args import AttentionArgs, BackwardArgs, BlockTensors
from flexhop.options import KernelOptions

# Options that flexhop itself writes on the wire (ops/call.py); the others are the user's.
_OWN_OPTIONS = (
    "flexhop",
    "return_max",
    "deterministic",
    "q_block_size",
    "kv_block_size",
    "has_full_blocks",
    "has_q_blocks",
)


def user_options(wire: dict[str, Any]) -> KernelOptions:
    """The user's choices among the operator's options."""
    return KernelOptions.from_wire({k: v for k, v in wire.items() if k not in _OWN_OPTIONS})


def read_problem(args: AttentionArgs | BackwardArgs, mods: ModBuffers) -> Problem:
    """The facts of a call whose operands are IR."""
    hint, static = inductor.hint, inductor.static
    batch, heads, query_len, head_dim = args.query.get_size()
    kv_batch, kv_heads, key_len, value_dim = args.value.get_size()
    elements = 1
    for size in (batch, heads, max(hint(query_len), hint(key_len)), max(hint(head_dim), hint(value_dim))):
        elements *= hint(size)
    return Problem(
        device=read_device(args.query.get_device()),
        dtype=args.query.get_dtype(),
        batch=hint(batch),
        query_heads=static(heads),
        kv_heads=static(kv_heads),
        query_len=hint(query_len),
        key_len=hint(key_len),
        head_dim=static(head_dim),
        value_head_dim=static(value_dim),
        scale=float(args.scale),
        kv_batch_shared=kv_batch == 1 and batch != 1,
        blocks=_mask_blocks(args),
        has_score_mod=mods.has_score_mod,
        has_mask_mod=mods.has_mask_mod,
        has_captured_grads=isinstance(args, BackwardArgs) and bool(args.sites),
        returns_max=bool(args.options.get("return_max")),
        large_output=elements >= 2**31,
        is_query_multiple=lambda n: inductor.is_multiple(query_len, n),
        is_key_multiple=lambda n: inductor.is_multiple(key_len, n),
    )


def _mask_blocks(args: AttentionArgs | BackwardArgs) -> MaskBlocks | None:
    if not args.blocks:
        return None
    options = args.options
    return MaskBlocks(
        q_size=int(options["q_block_size"]),
        kv_size=int(options["kv_block_size"]),
        has_full=bool(options["has_full_blocks"]),
    )


def block_inputs(
    args: AttentionArgs | BackwardArgs, side: str, rank3: Any, rank4: Any
) -> list[Any]:
    """The four list tensors of one side; without a mask, tensors of equal rank that nothing reads.

    Args:
        side: "kv" for the lists of each query block, "q" for those of each key block.
        rank3: stands in for counts. rank4: stands in for indices.
    """
    if not args.blocks:
        return [rank3, rank4, rank3, rank4]
    blocks = BlockTensors(*args.blocks)
    if side == "kv":
        lists = (blocks.kv_num_blocks, blocks.kv_indices, blocks.full_kv_num_blocks, blocks.full_kv_indices)
    else:
        lists = (blocks.q_num_blocks, blocks.q_indices, blocks.full_q_num_blocks, blocks.full_q_indices)
    return inductor.realize(lists)


def benchmark_inputs(inputs: Sequence[Any], first_list: int) -> dict[int, Callable[[Any], torch.Tensor]]:
    """Contents of the block lists while tiles are timed: every block listed as partial, none as full.

    Random contents would read outside the tensors.
    """

    def counts(buffer: Any) -> torch.Tensor:
        columns = inductor.hint(inputs[first_list + 1].get_size()[-1])
        return _sized(buffer).fill_(columns)

    def indices(buffer: Any) -> torch.Tensor:
        target = _sized(buffer)
        return target.copy_(torch.arange(target.shape[-1], device=target.device).expand_as(target))

    def none(buffer: Any) -> torch.Tensor:
        return _sized(buffer).zero_()

    return {first_list: counts, first_list + 1: indices, first_list + 2: none, first_list + 3: none}


def _sized(buffer: Any) -> torch.Tensor:
    sizes = [inductor.hint(size) for size in buffer.get_size()]
    strides = [inductor.hint(stride) for stride in buffer.get_stride()]
    return torch.empty_strided(sizes, strides, dtype=buffer.get_dtype(), device=buffer.get_device())
