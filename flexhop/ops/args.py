"""The operands of the operators, named once, and example inputs for tracing user functions.

On the wire (in FX graphs and export files), an operator call is a flat tuple of positional
operands in the order of the fields below. Each container among them is homogeneous, because export
cannot serialise a tuple that mixes tensors and callables. Everywhere else, use the fields by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

NUM_INDICES = 4  # b, h, q_idx, kv_idx
SCORE_DTYPE = torch.float32
Capture = Any  # Tensor | int | SymInt | SymFloat: anything that a user function captured


class BlockTensors(NamedTuple):
    """The block lists of one mask; every pair is present.

    If the mask lacks a pair, another pair stands in; `Options` says which pairs are real. All are
    int32; counts are [B', H', rows], indices [B', H', rows, columns]; B' and H' broadcast.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


class RangeTensors(NamedTuple):
    """The ranges of a mask whose queries see one range of keys each (sequences/ranges.py).

    Query i sees keys first_key[i] .. end_key[i] - 1; key j is seen by queries first_query[j] ..
    end_query[j] - 1. All are int32 and non-decreasing.
    """

    first_key: Tensor  # [1, 1, M]
    end_key: Tensor  # [1, 1, M, 1]
    first_query: Tensor  # [1, 1, N]
    end_query: Tensor  # [1, 1, N, 1]


# The kind that `Options` names for RangeTensors; BlockTensors have none.
RANGES = "ranges"


class AttentionArgs(NamedTuple):
    """Operands of `flexhop_attention`."""

    query: Tensor  # [B, Hq, M, D]
    key: Tensor  # [B or 1, Hkv, N, D]
    value: Tensor  # [B or 1, Hkv, N, Dv]
    score_mod: Callable[..., Tensor]
    mask_mod: Callable[..., Tensor]
    blocks: tuple[Tensor, ...]  # (), or the fields of BlockTensors or RangeTensors
    scale: float
    options: dict[str, int | str | bool | float]
    score_captures: tuple[Capture, ...] = ()
    mask_captures: tuple[Capture, ...] = ()
    dropout_seed: tuple[Tensor, ...] = ()  # [2] int64, or nothing: graphs then omit it


class AttentionDoor(NamedTuple):
    """Operands of `flexhop_attention` as Dynamo sees them: `call` is not checked yet."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Callable[..., Tensor]
    mask_mod: Callable[..., Tensor]
    blocks: tuple[Tensor, ...]
    call: tuple[Any, ...]  # a Call of ops/call.py, as plain tuples
    dropout_seed: tuple[Tensor, ...]


class CachedArgs(NamedTuple):
    """Operands of `flexhop_cached_attention`, which reads a KV cache and has no gradient.

    With pages (table [B, W] int32, lengths [B] int32), key is [P, Hkv, page_size, D] and value
    likewise, N is W * page_size, and keys from lengths[b] on do not exist.
    """

    query: Tensor  # [B, Hq, M, D]
    key: Tensor  # [B or 1, Hkv, N, D], of any dtype if key_mod decodes it
    value: Tensor
    score_mod: Callable[..., Tensor]
    mask_mod: Callable[..., Tensor]
    key_mod: Callable[..., Tensor]
    value_mod: Callable[..., Tensor]
    blocks: tuple[Tensor, ...]  # (), or the fields of BlockTensors or RangeTensors
    pages: tuple[Tensor, ...]
    scale: float
    options: dict[str, int | str | bool | float]
    score_captures: tuple[Capture, ...] = ()
    mask_captures: tuple[Capture, ...] = ()
    key_captures: tuple[Capture, ...] = ()
    value_captures: tuple[Capture, ...] = ()


class CachedDoor(NamedTuple):
    """Like AttentionDoor, for `flexhop_cached_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Callable[..., Tensor]
    mask_mod: Callable[..., Tensor]
    key_mod: Callable[..., Tensor]
    value_mod: Callable[..., Tensor]
    blocks: tuple[Tensor, ...]
    pages: tuple[Tensor, ...]
    call: tuple[Any, ...]  # the call, and whether there are a key_mod and a value_mod


class BackwardArgs(NamedTuple):
    """Operands of `flexhop_attention_backward`.

    joint(score, b, h, q_idx, kv_idx, grad_score, *score_captures) returns the gradient of the
    unmodified score, then one value per scatter site, then the indices of every site. `sites`
    holds one (capture position, number of indices) pair per site, flattened.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None
    score_mod: Callable[..., Tensor]
    joint: Callable[..., tuple[Tensor, ...]]
    mask_mod: Callable[..., Tensor]
    blocks: tuple[Tensor, ...]
    scale: float
    options: dict[str, int | str | bool | float]
    score_captures: tuple[Capture, ...] = ()
    mask_captures: tuple[Capture, ...] = ()
    sites: tuple[int, ...] = ()
    dropout_seed: tuple[Tensor, ...] = ()


class DerivativeArgs(NamedTuple):
    """Operands of `flexhop_attention_derivative`: a derivative of attention, of any order.

    The results are the outputs of ops/derivatives/program.py's function, in its order.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Callable[..., Tensor]
    mask_mod: Callable[..., Tensor]
    blocks: tuple[Tensor, ...]
    scale: float
    options: dict[str, int | str | bool | float]
    program: tuple[str, ...]
    directions: tuple[Tensor, ...]  # the inputs that the program adds: tangents and gradients
    score_captures: tuple[Capture, ...] = ()
    mask_captures: tuple[Capture, ...] = ()
    dropout_seed: tuple[Tensor, ...] = ()


Wanted = TypeVar("Wanted", AttentionArgs, BackwardArgs, DerivativeArgs)


def operands_of(kind: type[Wanted], args: Any, **others: Any) -> Wanted:
    """Build one operator's operands from another's, which have the same names.

    Args:
        kind: the operands to build.
        args: the operands of the other operator.
        **others: operands that the other lacks, or that differ.
    """
    shared = {name: getattr(args, name) for name in kind._fields if hasattr(args, name)}
    return kind(**(shared | others))


def read_blocks(
    args: AttentionArgs | CachedArgs | BackwardArgs | DerivativeArgs,
) -> BlockTensors | RangeTensors | None:
    """The tensors of a call's mask, of the kind that `Options` names."""
    if not args.blocks:
        return None
    if args.options.get("mask_kind") == RANGES:
        return RangeTensors(*args.blocks)
    return BlockTensors(*args.blocks)


def index_sizes(args: Any) -> tuple[Any, Any, Any, Any]:
    """Numbers of batches, query heads, queries and keys of an operator's operands.

    They may be symbols. With pages, keys are those that the table has room for.
    """
    batch, heads, length, _ = args.query.shape
    keys: Any = args.key.size(2)
    pages = getattr(args, "pages", ())
    return batch, heads, length, keys * pages[0].size(1) if pages else keys


class Site(NamedTuple):
    """One read of a captured tensor that needs a gradient."""

    capture: int  # position among score_captures
    value: int  # position of its gradient value among the joint graph's outputs
    indices: tuple[int, ...]  # positions of its indices among the joint graph's outputs


def learned_captures(sites: tuple[int, ...]) -> list[int]:
    """Positions of the captured tensors that get a gradient, from the flat `sites` operand."""
    return sorted(set(sites[::2]))


def unpack_sites(sites: tuple[int, ...]) -> tuple[Site, ...]:
    """Read the flat `sites` operand: outputs are [grad_score, values..., indices...]."""
    pairs = list(zip(sites[::2], sites[1::2], strict=True))
    first_index = 1 + len(pairs)
    found = []
    for position, (capture, count) in enumerate(pairs):
        found.append(Site(capture, 1 + position, tuple(range(first_index, first_index + count))))
        first_index += count
    return tuple(found)


def index_examples(device: torch.device) -> list[Tensor]:
    """Distinct 0-d int32 tensors for b, h, q_idx, kv_idx.

    They are distinct because tracers merge equal objects: `q_idx - kv_idx` became `kv_idx -
    kv_idx`.
    """
    return [torch.zeros((), dtype=torch.int32, device=device) for _ in range(NUM_INDICES)]


def score_examples(device: torch.device, dtype: torch.dtype = SCORE_DTYPE) -> list[Tensor]:
    """Example inputs of a score_mod without its captures."""
    return [torch.zeros((), dtype=dtype, device=device), *index_examples(device)]


def key_examples(device: torch.device, dtype: torch.dtype = SCORE_DTYPE) -> list[Tensor]:
    """Example inputs of a key_mod or value_mod without its captures: a number, b, h, kv_idx."""
    return [torch.zeros((), dtype=dtype, device=device), *index_examples(device)[1:]]


def joint_examples(device: torch.device, dtype: torch.dtype = SCORE_DTYPE) -> list[Tensor]:
    """Example inputs of a joint graph without captures: score, indices, the score's gradient."""
    return [*score_examples(device, dtype), torch.zeros((), dtype=dtype, device=device)]


def score_dtype(query: Tensor) -> torch.dtype:
    """Scores are fp32, and fp64 for fp64 queries."""
    return torch.float64 if query.dtype == torch.float64 else SCORE_DTYPE
