"""The main entry point: flex_attention."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from flexhop import errors
from flexhop.block_mask.mask import BlockMask
from flexhop.block_mask.selection import sliced_mask_mod
from flexhop.cache.pages import PageTable
from flexhop.cache.reading import CacheReading, read_cache, stores_numbers
from flexhop.compat.dtensors import is_dtensor
from flexhop.mods.functions import MaskMod, ScoreMod, noop_mask, noop_score
from flexhop.mods.keys import KeyMod
from flexhop.ops import mask_lists, wide_lse
from flexhop.ops.args import RANGES, AttentionArgs, CachedArgs
from flexhop.ops.call import Call, MaskFacts, Mistake, note_mistake, note_wrong_type
from flexhop.ops.dispatch import run_cached_operator, run_operator
from flexhop.ops.dropout import place
from flexhop.ops.dropout_seed import NO_DROPOUT, Dropout
from flexhop.ops.replicated import SLOT, shared_seed, view_of
from flexhop.ops.sinks import add_sinks, sinks_mistake
from flexhop.ops.uncompiled.repeats import ask
from flexhop.options import FlexKernelOptions, KernelOptions
from flexhop.sequences.nested import has_nested, pack, unpack
from flexhop.sequences.ranges import RangeMask

Options = KernelOptions | FlexKernelOptions | Mapping[str, Any] | None


class AuxRequest(NamedTuple):
    """Which statistics to return with the output.

    Source: torch.nn.attention.flex_attention.AuxRequest.
    """

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """The requested statistics. A field that was not requested is None.

    Args:
        lse: [B, Hq, M] fp32, natural log of the sum of exponentials; differentiable.
        max_scores: [B, Hq, M] fp32, largest score after score_mod and mask; not differentiable.

    Source: torch.nn.attention.flex_attention.AuxOutput.
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Any | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: Options = None,
    *,
    return_aux: None = None,
    sinks: Tensor | None = None,
    page_table: PageTable | None = None,
    k_mod: KeyMod | None = None,
    v_mod: KeyMod | None = None,
    dropout_p: float = 0,
    dropout_seed: Tensor | None = None,
) -> Tensor: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Any | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    kernel_options: Options = None,
    return_aux: None = None,
    sinks: Tensor | None = None,
    page_table: PageTable | None = None,
    k_mod: KeyMod | None = None,
    v_mod: KeyMod | None = None,
    dropout_p: float = 0,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Any | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: Options = None,
    *,
    return_aux: AuxRequest,
    sinks: Tensor | None = None,
    page_table: PageTable | None = None,
    k_mod: KeyMod | None = None,
    v_mod: KeyMod | None = None,
    dropout_p: float = 0,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, AuxOutput]: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Any | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Options = None,
    *,
    return_aux: AuxRequest | None = None,
    sinks: Tensor | None = None,
    page_table: PageTable | None = None,
    k_mod: KeyMod | None = None,
    v_mod: KeyMod | None = None,
    dropout_p: float = 0,
    dropout_seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]: ...
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Any | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Options = None,
    *,
    return_aux: AuxRequest | None = None,
    sinks: Tensor | None = None,
    page_table: PageTable | None = None,
    k_mod: KeyMod | None = None,
    v_mod: KeyMod | None = None,
    dropout_p: float = 0,
    dropout_seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention with your own score and mask functions.

    Under `torch.compile` it becomes one fused kernel. Otherwise the reference implementation runs
    in plain PyTorch, for debugging.

    Args:
        query: [B, Hq, M, D], fp16, bf16, fp32 or fp64; or a jagged nested tensor, ragged in M.
        key: [B or 1, Hkv, N, D], dtype and device of query; nested if query is. May also be
            float8_e4m3fn or float8_e5m2, used as is, without gradient.
        value: [B or 1, Hkv, N, Dv], the same.
        score_mod: (score, b, h, q_idx, kv_idx) -> score, applied to every scaled score.
        block_mask: which key blocks each block of queries visits, and the mask_mod of partial
            blocks. A BlockMask of flexhop or PyTorch; for nested tensors, one from
            create_nested_block_mask. None: every key of the same sequence is visible.
        scale: the factor of q·k before score_mod. None is 1/sqrt(D).
        enable_gqa: allow Hq to be a multiple of Hkv. Query head h reads key head h // G, with G =
            Hq // Hkv.
        return_lse: deprecated, use return_aux.
        kernel_options: KernelOptions, or a dict with PyTorch's keys.
        return_aux: the statistics to return with the output.
        sinks: [Hq], one logit per head that takes part in every softmax but has no value. Sinks
            get a gradient. lse includes them, max_scores does not.
        page_table: key and value are paged caches, [P, Hkv, page_size, D] or [1, Hkv, P *
            page_size, D]. Each sequence has its own pages and length. Mods and block_mask see
            positions in the sequence, 0 to page_table.capacity - 1. Calls with page_table, k_mod
            or v_mod have no gradient.
        k_mod: (k, b, h, kv_idx) -> k, applied to every element of key when a kernel reads it. b is
            the batch, h the key head. key may then be float8_e4m3fn, float8_e5m2 or int8; see
            flexhop.mods.dequantize.
        v_mod: the same for value.
        dropout_p: probability that a softmax weight becomes 0. The others are divided by 1 -
            dropout_p. lse and max_scores do not change. See docs/dropout.md.
        dropout_seed: [2] int64, determines which weights are dropped; see flexhop.dropout_mask.
            None draws a seed from the device's PyTorch generator.

    Returns:
        out [B, Hq, M, Dv] in the dtype and dimension order of query; with return_lse (out, lse);
        with return_aux (out, AuxOutput). For a query that sees no key, out is 0 and lse is -inf.
        If query is nested, so are the results. Without a batch or queries, they have no elements.

    Raises:
        FlexhopError: see flexhop.errors. Each class also derives from the class that PyTorch
            raises.

    Source: torch.nn.attention.flex_attention.flex_attention (torch 2.13).
    """
    if return_lse and return_aux is None and not torch.compiler.is_dynamo_compiling():
        warnings.warn(errors.ReturnLseDeprecationWarning(), stacklevel=2)
    packed = mistake = asked = None
    operands = (query, key, value)
    is_simple = sinks is None and dropout_seed is None and return_aux is None
    is_read = page_table is not None or k_mod is not None or v_mod is not None
    if is_simple and not (torch.compiler.is_dynamo_compiling() or is_read or return_lse):
        choices = (scale, enable_gqa, kernel_options, dropout_p)
        asked = ask(operands, (score_mod, block_mask), choices, mask_operands)
        if asked is not None and (out := asked.run()) is not None:
            return out
    if has_nested(*operands):
        packed = pack(operands, score_mod, block_mask)
        operands, score_mod, block_mask, mistake = packed
    cache = None
    if is_read or stores_numbers(key, value):
        operands, cache, found = read_cache(operands, page_table, k_mod, v_mod)
        mistake = mistake or found
    result = attend(
        *operands, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
        return_aux, sinks=sinks, dropout=Dropout(dropout_p, dropout_seed), mistake=mistake,
        cache=cache,
    )  # fmt: skip
    if asked is not None:
        asked.keep()
    return result if packed is None else _nested_like(query, result)


def _nested_like(query: Tensor, result: Any) -> Any:
    """Convert results of packed tokens to flex_attention's return forms, nested like query."""
    if isinstance(result, Tensor):
        return unpack(result, query)
    out, more = result
    if isinstance(more, Tensor):
        return unpack(out, query), unpack(more, query)
    statistics = (None if t is None else unpack(t, query) for t in more)
    return unpack(out, query), AuxOutput(*statistics)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | Any | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Options,
    return_aux: AuxRequest | None,
    *,
    sinks: Tensor | None = None,
    dropout: Dropout = NO_DROPOUT,
    mistake: Mistake | None = None,
    cache: CacheReading | None = None,
    sum_groups: str = "",
    first: tuple[int, int] = (0, 0),
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention as every entry point calls it.

    Takes flex_attention's arguments and: `mistake`, an error that the entry point found; `cache`,
    how to read key and value from a cache; `sum_groups`, process groups over which gradients of
    captured tensors are summed; `first`, the global indices of the first batch and head, for
    dropout.
    """
    if is_dtensor(query) or is_dtensor(key) or is_dtensor(value):
        return SLOT.attend_dtensors(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse,
            kernel_options, return_aux, sinks=sinks, dropout=dropout, mistake=mistake, cache=cache,
        )  # fmt: skip
    # Errors are recorded here and raised by `prepare`. Under torch.compile(fullgraph=True), an
    # exception from this traced code would reach the user as a compiler error.
    mistake = mistake or note_wrong_type(
        query, key, value, scale, return_aux, enable_gqa=enable_gqa, return_lse=return_lse
    )
    if mistake is not None:
        scale, return_aux, enable_gqa, return_lse = None, None, False, False
    wants_max = return_aux is not None and return_aux.max_scores
    is_mask = block_mask is None or _has_view(block_mask) or _is_mask(block_mask)
    wrong_mask = None if is_mask else type(block_mask).__name__
    blocks, mask_mod, facts = mask_operands(block_mask if is_mask else None)
    is_wide = cache is None and wide_lse.is_wanted(score_mod)  # caches have no gradients
    score_mod = noop_score if score_mod is None else score_mod
    two_requests = return_lse and return_aux is not None
    if mistake is None and sinks is not None:
        mistake = sinks_mistake(sinks, query)
    if mistake is None:
        mistake = dropout.mistake(query)
        blocks = mask_lists.of_heads(blocks, facts, query)
    call = Call(
        scale, enable_gqa, kernel_options, wants_max, facts, wrong_mask, two_requests, mistake,
        dropout.p if mistake is None else 0, sum_groups, first, wide_lse=is_wide,
    )  # fmt: skip
    operands = (query, key, value, score_mod, mask_mod)
    wants_lse = return_lse or sinks is not None or (return_aux is not None and return_aux.lse)
    results = _run(operands, blocks, call, (block_mask, cache, dropout, wants_lse))
    out, lse, max_scores = results
    if sinks is not None:
        sinks = sinks if SLOT.current is None else SLOT.current.sum_gradient(sinks)
        out, lse = add_sinks(out, lse, sinks)
    if return_lse:
        return out, lse
    if return_aux is None:
        return out
    return out, AuxOutput(lse if return_aux.lse else None, max_scores if wants_max else None)


def _run(
    operands: tuple[Any, Any, Any, Any, Any],
    blocks: tuple[Tensor, ...],
    call: Call,
    more: tuple[Any, ...],
) -> tuple[Tensor, Any, Tensor]:
    """Run the operator, or the active context, which shards the sequence.

    Args:
        operands: query, key, value, score_mod, mask_mod.
        blocks, call: block lists of the mask, and all other choices.
        more: the mask itself, the cache, dropout, and whether lse is used.
    """
    block_mask, cache, dropout, wants_lse = more
    context = SLOT.current
    if context is not None:
        call = call if cache is None else call._replace(mistake=_cache_mistake())
        seed = context.seed(dropout, operands[0]) if call.mistake is None else ()
        args = AttentionArgs(*operands, blocks, 0.0, {}, dropout_seed=seed)
        return context.run(args, call, block_mask, wants_lse)
    if cache is None:
        seed = dropout.operand(operands[0]) if call.mistake is None else ()
        if seed and call.sum_groups:
            seed, call = _seed_of_all(seed[0], dropout, call, operands)
        args = AttentionArgs(*operands, blocks, 0.0, {}, dropout_seed=seed)
        return run_operator(args, call)
    return run_cached_operator(
        CachedArgs(*operands, cache.key_mod, cache.value_mod, blocks, cache.pages, 0.0, {}), call
    )


def _seed_of_all(
    seed: Tensor, dropout: Dropout, call: Call, operands: tuple[Any, ...]
) -> tuple[tuple[Tensor], Call]:
    """The seed of a call whose other batches and heads are on other ranks."""
    if dropout.seed is None:
        seed = shared_seed(seed, call.sum_groups)
    counts = [(operand.size(2) + 15) // 16 for operand in operands[:2]]
    groups = torch.cat([torch.arange(count, device=seed.device) for count in counts])
    placed = place(seed, call.first, groups)
    return (placed,), call._replace(dropout_groups=counts[0])


def _cache_mistake() -> Mistake:
    return note_mistake(
        errors.ShardedCallError, argument="page_table, k_mod or v_mod", found="is given",
        expected="sharded caches need flexhop.distributed.decode_attention",
    )  # fmt: skip


def _has_view(block_mask: Any) -> bool:
    """Whether an active context knows the mask and has different lists for it."""
    return SLOT.current is not None and view_of(block_mask) is not None


def _is_mask(block_mask: Any) -> bool:
    """Whether it has the fields of a block mask. PyTorch's own masks have them too."""
    return isinstance(block_mask, RangeMask) or hasattr(block_mask, "kv_num_blocks")


def mask_operands(
    block_mask: Any,
) -> tuple[tuple[Tensor, ...], MaskMod, MaskFacts | None]:
    """Operands of a flexhop or PyTorch block mask: tensors, mask_mod, facts."""
    if block_mask is None:
        return (), noop_mask, None
    if _has_view(block_mask):
        return (), block_mask.mask_mod, None
    mask = block_mask
    (q_len, kv_len), (q_size, kv_size) = mask.seq_lengths, mask.BLOCK_SIZE
    if isinstance(mask, RangeMask):
        facts = MaskFacts(q_len, kv_len, q_size, kv_size, mask.is_all, True, kind=RANGES)
        # In the order of RangeTensors.
        ends = (mask.first_key, mask.end_key, mask.first_query, mask.end_query)
        return ends, mask.mask_mod, facts
    partial = (mask.kv_num_blocks, mask.kv_indices)
    has_full = mask.full_kv_num_blocks is not None
    has_queries = mask.q_num_blocks is not None
    full = (mask.full_kv_num_blocks, mask.full_kv_indices) if has_full else partial
    queries = (mask.q_num_blocks, mask.q_indices) if has_queries else partial
    full_queries = queries
    if has_queries and mask.full_q_num_blocks is not None:
        full_queries = (mask.full_q_num_blocks, mask.full_q_indices)
    is_sliced = mask.mask_mod is sliced_mask_mod
    # In the order of BlockTensors.
    lists, sizes = mask_lists.normalized((*partial, *full, *queries, *full_queries))
    facts = MaskFacts(q_len, kv_len, q_size, kv_size, has_full, has_queries, is_sliced, "", sizes)
    return lists, mask.mask_mod, facts
