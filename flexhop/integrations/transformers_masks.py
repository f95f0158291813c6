"""transformers' masks as block masks: `block_mask` creates one for each step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.utils.import_utils import is_tracing

from flexhop.block_mask import BlockMask, create_block_mask
from flexhop.block_mask.coverage import may_wait
from flexhop.compat.compilation import remember
from flexhop.integrations.transformers_models import tensor_mask
from flexhop.integrations.transformers_rows import visible_keys
from flexhop.mods import MaskMod, and_masks
from flexhop.mods.closures import describe

MaskFunction = Callable[..., Any]


def block_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> BlockMask | Tensor | None:
    """The mask of a step, as transformers requests it.

    Args:
        batch_size: B. q_length: M, queries of this step. kv_length: N, keys that they may see.
        q_offset: position of the first query in its sequence; kv_offset: of the first key.
        mask_function: (b, h, q_idx, kv_idx) -> bool, of positions in the sequence.
        attention_mask: [B, S] bool, False for padding; positions from S on are padding too.
        arguments: `device`; `use_vmap`, True if users' functions are part of mask_function;
            `allow_is_bidirectional_skip`, and `allow_is_causal_skip`, True if mask_function is one
            of transformers' own without more; `local_size`, its window; `config`, `dtype`. Others
            are for other implementations.

    Returns:
        a BlockMask for [B, H, M, N]; a tensor if the model computes with it, see
        `transformers_models`; for one query without gradient, the row of visible keys,
        [B or 1, 1, 1, N] bool; None if every key is visible.
    """
    if (make := tensor_mask(arguments.get("config"))) is not None:
        arguments |= dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
        return make(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **arguments,
        )
    is_open = mask_function is bidirectional_mask_function and attention_mask is None
    if is_open and arguments.get("allow_is_bidirectional_skip", False):
        return None
    keys = (kv_offset, kv_offset + kv_length)
    if q_length == 1 and _sees_every_key(q_offset, keys, attention_mask, arguments):
        return None
    device = torch.device(arguments.get("device", "cpu"))
    has_users_functions = bool(arguments.get("use_vmap", False))
    is_row = q_length == 1 and not (has_users_functions or torch.is_grad_enabled())
    if is_row and isinstance(kv_offset, int):
        sizes, offsets = (batch_size, kv_length), (q_offset, kv_offset)
        return visible_keys(mask_function, sizes, offsets, attention_mask, device)
    keep: MaskMod = mask_function
    if attention_mask is not None:
        keep = and_masks(keep, _padding(attention_mask, kv_length + kv_offset))
    has_offset = isinstance(q_offset, Tensor) or q_offset != 0 or kv_offset != 0
    if has_offset:
        keep = _shifted(keep, _scalar(q_offset, device), _scalar(kv_offset, device))
    is_shared = attention_mask is None and not has_users_functions
    is_shared = is_shared and not _depends_on_batch(mask_function, device)
    mask = create_block_mask(
        keep,
        None if is_shared else batch_size,
        None,
        q_length,
        kv_length,
        device,
        compute_q_blocks=torch.is_grad_enabled(),
    )
    return mask if torch.compiler.is_compiling() else _with_two_blocks(mask)


def _sees_every_key(
    position: int | Tensor,
    keys: tuple[int | Tensor, int | Tensor],
    attention_mask: Tensor | None,
    arguments: dict[str, Any],
) -> bool:
    """Whether one query sees all keys from the first on: it is the newest token, without padding.

    Reading attention_mask waits for the device, as `generate` itself does after each token. A
    position that is a tensor is that of a static cache, which has room for keys to come.
    """
    first, end = keys
    window = arguments.get("local_size")
    is_newest = isinstance(position, int) and position + 1 == end
    is_narrow = window is not None and end - first >= window
    if is_narrow or not (is_newest and arguments.get("allow_is_causal_skip", False)):
        return False
    if attention_mask is None:
        return True
    if is_tracing(attention_mask) or not may_wait(attention_mask.device):
        return False
    tokens = attention_mask[:, first:end]
    return tokens.size(1) == end - first and bool(tokens.all())


def _depends_on_batch(mask_function: MaskFunction, device: torch.device) -> bool:
    """Whether a mask of transformers' own, which all broadcast, reads the index of the batch.

    The shape of one score says it. Looking for tensors in closures would fail in a graph: Dynamo
    does not show the closure of a function that the graph itself made.
    """
    described = None if torch.compiler.is_compiling() else describe((mask_function,))
    if described is not None and described.key in _reads_batch:
        return _reads_batch[described.key]
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    found = mask_function(zero[:, None], zero, zero, zero).dim() > 1
    return found if described is None else remember(_reads_batch, described.key, found, 256)


_reads_batch: dict[Hashable, bool] = {}  # by mods.closures.describe


def _padding(attention_mask: Tensor, positions: Any) -> MaskMod:
    """Keys that are not padding: attention_mask[b, kv_idx], and False beyond its end."""
    missing = positions - attention_mask.size(-1)
    tokens = pad(attention_mask, (0, missing)) if missing > 0 else attention_mask

    def padding_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return tokens[b, kv_idx]

    return padding_mask


def _shifted(mask_function: MaskMod, q_offset: Tensor, kv_offset: Tensor) -> MaskMod:
    """Convert a function of positions to one of indices of this step's queries and keys."""

    def shifted_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_function(b, h, q_idx + q_offset, kv_idx + kv_offset)

    return shifted_mask


def _scalar(value: int | Tensor, device: torch.device) -> Tensor:
    """A 0-d tensor: a number that changes with each token must not be compiled into kernels.

    A static cache returns its own counter and increments it during the step, hence the copy.
    """
    if isinstance(value, Tensor):
        return value.to(device, torch.int32, copy=True)
    return torch.full((), value, dtype=torch.int32, device=device)


def codes_of(function: Any) -> tuple[Hashable, ...]:
    """What compiled code is specialised on: the code of a function and of those that it holds, and
    numbers."""
    code = getattr(function, "__code__", type(function))
    held = [codes_of(value) if callable(value) else value for value in _held(function)]
    return (code, *(value for value in held if isinstance(value, (tuple, int, float))))


def _held(function: Any) -> list[Any]:
    """The values that a closure holds, also inside tuples."""
    cells = getattr(function, "__closure__", None) or ()
    held = [cell.cell_contents for cell in cells]
    return [part for value in held for part in (value if isinstance(value, tuple) else (value,))]


def _with_two_blocks(mask: BlockMask) -> BlockMask:
    """Room for two blocks of keys, and for two of queries unless there is one query.

    PyTorch specialises on sizes of 1. Without this, code that was compiled for short sequences
    would be recompiled as they grow past one block.
    """
    rows, columns = mask.kv_indices.shape[-2:]
    more_rows = 1 if rows == 1 and mask.seq_lengths[0] > 1 else 0
    more_columns = 1 if columns == 1 else 0
    if not (more_rows or more_columns):
        return mask
    room = {"kv": (more_rows, more_columns), "q": (more_columns, more_rows)}
    for side, (lists, entries) in room.items():
        for prefix in (side, f"full_{side}"):
            counts, indices = f"{prefix}_num_blocks", f"{prefix}_indices"
            if getattr(mask, counts) is not None:
                setattr(mask, counts, pad(getattr(mask, counts), (0, lists)))
                setattr(mask, indices, pad(getattr(mask, indices), (0, entries, 0, lists)))
    return mask


class BlocksOfAnyLength:
    """A BlockMask for compiled code, with the lengths of the operands.

    The mask's own lengths are Python ints, and PyTorch would recompile for each.
    """

    def __init__(self, mask: BlockMask, q_length: int, kv_length: int) -> None:
        self.kv_num_blocks, self.kv_indices = mask.kv_num_blocks, mask.kv_indices
        self.full_kv_num_blocks = mask.full_kv_num_blocks
        self.full_kv_indices = mask.full_kv_indices
        self.q_num_blocks, self.q_indices = mask.q_num_blocks, mask.q_indices
        self.full_q_num_blocks, self.full_q_indices = mask.full_q_num_blocks, mask.full_q_indices
        self.BLOCK_SIZE, self.mask_mod = mask.BLOCK_SIZE, mask.mask_mod
        self.seq_lengths = q_length, kv_length
