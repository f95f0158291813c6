"""Hugging Face transformers: `attn_implementation="flexhop"`.

    import flexhop.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flexhop")

Importing this module registers two functions with transformers. `block_mask` creates the mask of a
step, a BlockMask that all layers with the same mask share. `attention` computes one layer.
docs/transformers.md says what is covered.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from flexhop import AuxRequest, install
from flexhop.attention import flex_attention
from flexhop.block_mask import BlockMask
from flexhop.block_mask.fields import TENSOR_FIELDS
from flexhop.compat.dynamo.compiling import mark_dynamic
from flexhop.compat.mods.held import captured_tensors
from flexhop.integrations.transformers_masks import (
    BlocksOfAnyLength,
    block_mask,
    codes_of,
)
from flexhop.integrations.transformers_models import selected_keys, with_sinks
from flexhop.integrations.transformers_rows import STEP, block_lists, is_row, row_blocks
from flexhop.mods import ScoreMod, softcap
from flexhop.sdpa import causal_blocks, mask_score

NAME = "flexhop"


def register(name: str = NAME, *, compiled: bool = True) -> None:
    """Register `attn_implementation=name`. Importing this module calls `register()`.

    Args:
        name: name of the implementation.
        compiled: False runs the reference in plain PyTorch, for debugging. A model under
            `torch.compile` is compiled in either case.

    If there is a GPU, this imports the compiler and starts its processes, which takes a few
    seconds. The first step of a model then need not wait for them.
    """
    if compiled and torch.cuda.is_available():
        install(workers=True)
    AttentionInterface.register(name, attention if compiled else uncompiled_attention)
    AttentionMaskInterface.register(name, block_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it.

    Args:
        module: the layer.
        query: [B, Hq, M, D]; key: [B, Hkv, N, D]; value: [B, Hkv, N, Dv].
        attention_mask: from `block_mask`; or a tensor that broadcasts to [B, Hq, M, N], either
            bool (True is visible) or added to the scores; or None: every key is visible.
        arguments: `scaling`, `softcap`, `s_aux` (sinks, [Hq]), `position_bias` (added to the
            scores, broadcasts to [B, Hq, M, N]), `dropout`, `is_causal` (used if there is no
            mask), `kernel_options`, `sinks` ([B, Hq, M, 1]), and those of `selected_keys`. Others
            are for other implementations.

    Returns:
        out [B, M, Hq, Dv], and None in place of the weights.
    """
    if torch.compiler.is_compiling():
        attend = flex_attention
    else:
        kind = _kind(query, key, value, attention_mask, arguments)
        attend = _compiled(kind)
        lengths = _lengths.setdefault(kind, set())
        if len(lengths) < 2:
            lengths.add((query.size(2), key.size(2)))
        if len(lengths) > 1 or query.size(2) == 1:
            _let_lengths_change(query, key, value, attention_mask)
    return _attention(attend, module, (query, key, value), attention_mask, arguments), None


def uncompiled_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """`attention` with the reference implementation, not compiled."""
    operands = query, key, value
    return _attention(flex_attention, module, operands, attention_mask, arguments), None


@functools.lru_cache(maxsize=256)
def _compiled(key: Hashable) -> Callable[..., Tensor]:
    """flex_attention, compiled separately for calls of one kind.

    PyTorch limits how often a function is recompiled, and the layers of a few models together
    would reach the limit. Each kind gets its own function with its own name, because PyTorch
    tracks dynamic sizes by name.
    """

    def attend(
        query: Tensor, key: Tensor, value: Tensor, block_mask: Any, **arguments: Any
    ) -> Tensor:
        if isinstance(block_mask, tuple):
            block_mask = row_blocks(*block_mask)
        elif block_mask is not None:
            block_mask = BlocksOfAnyLength(block_mask, query.size(2), key.size(2))
        return flex_attention(query, key, value, block_mask=block_mask, **arguments)

    code = attend.__code__.replace(co_name=f"flexhop_attention_{next(_numbers)}")
    return _compile(FunctionType(code, globals()))


def _kind(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask | Tensor | None,
    arguments: dict[str, Any],
) -> Hashable:
    """The kind of a call: everything that recompiles, except lengths, batches and layouts."""
    is_tensor = isinstance(mask, Tensor)
    mod = () if mask is None or is_tensor else _codes(mask)
    names = (
        "softcap", "s_aux", "position_bias", "dropout", "sinks", "indices", "block_indices",
    )  # fmt: skip
    given = tuple(name for name in names if arguments.get(name) is not None)
    sizes = (query.size(1), key.size(1), query.size(3), value.size(3), query.size(2) == 1)
    where = (query.dtype, query.device, torch.is_grad_enabled())
    return (is_tensor, mod, given, sizes, where)


def _codes(mask: BlockMask) -> Hashable:
    """codes_of its mask_mod, computed once for all layers."""
    known = mask.__dict__
    if "_codes" not in known:
        known["_codes"] = codes_of(mask.mask_mod)
    return known["_codes"]


_compile = functools.partial(torch.compile, fullgraph=True)
_numbers = itertools.count()
_lengths: dict[Hashable, set[tuple[int, int]]] = {}


def _let_lengths_change(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask | Tensor | None
) -> None:
    for tensor in (query, key, value):
        mark_dynamic(tensor, (2,))
    if isinstance(mask, Tensor):
        mark_dynamic(mask, (2, 3))
    elif mask is not None and "_changes" not in mask.__dict__:  # once for all layers
        mask.__dict__["_changes"] = True
        for name in TENSOR_FIELDS:
            if (tensor := getattr(mask, name, None)) is not None:
                mark_dynamic(tensor, range(2, tensor.dim()))
        for table in captured_tensors(mask.mask_mod):  # [B, positions], those of transformers
            mark_dynamic(table, range(1, table.dim()))


def _attention(
    attend: Callable[..., Tensor],
    module: nn.Module,
    operands: tuple[Tensor, Tensor, Tensor],
    mask: BlockMask | Tensor | None,
    arguments: dict[str, Any],
) -> Tensor:
    query, key, _ = operands
    biases = [arguments.get("position_bias"), *selected_keys(module, arguments, key.size(2))]
    sinks = arguments.get("sinks")
    blocks: Any = None if isinstance(mask, Tensor) else mask
    if isinstance(mask, Tensor) and is_row(mask, query):
        blocks = _row(mask, key.size(2), is_lazy=attend is not flex_attention)
    elif isinstance(mask, Tensor):
        biases.append(mask[..., : key.size(2)])
    elif mask is None and arguments.get("is_causal") and query.size(2) > 1:
        blocks = causal_blocks(query, key)
    out: Any = attend(
        *operands,
        score_mod=_score_mod(arguments.get("softcap"), [t for t in biases if t is not None]),
        block_mask=blocks,
        scale=arguments.get("scaling"),
        enable_gqa=query.size(1) != key.size(1),
        kernel_options=arguments.get("kernel_options"),
        sinks=arguments.get("s_aux"),
        dropout_p=arguments.get("dropout") or 0,
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is not None:
        out = with_sinks(out[0], out[1].lse, sinks)
    return out.transpose(1, 2).contiguous()


def _row(mask: Tensor, length: int, *, is_lazy: bool) -> Any:
    """The keys that one query sees, as a block mask, or as the tensors to create it from."""
    row = mask if mask.size(3) == length else mask[..., :length]
    lists = block_lists(row) if torch.compiler.is_compiling() else _shared_lists(mask, row)
    return (row, lists) if is_lazy else row_blocks(row, lists)


def _shared_lists(mask: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """The block lists of a row, computed once for all layers of a step.

    Those of a user's tensor are computed anew, because it may be overwritten between steps.
    """
    known = vars(mask)
    if (lists := known.get(STEP)) is None:
        lists = block_lists(row)
        mark_dynamic(lists[1], (3,))
        if STEP in known:
            known[STEP] = lists
    return lists


def _score_mod(cap: float | None, biases: list[Tensor]) -> ScoreMod | None:
    """Soft-cap first, then added biases: the order of transformers' eager attention."""
    mods = [] if cap is None else [_softcap(cap)]
    mods += [mask_score(bias) for bias in biases]
    if len(mods) < 2:
        return mods[0] if mods else None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for mod in mods:
            score = mod(score, b, h, q_idx, kv_idx)
        return score

    return score_mod


_softcap = functools.cache(softcap)

register()
