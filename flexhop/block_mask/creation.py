"""Find the blocks that a mask_mod needs, without materialising the mask.

Two facts classify a block: whether mask_mod keeps any pair in it, and whether it keeps every pair.
coverage.py decides whole blocks in eager mode; scores.py evaluates every score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexhop.block_mask.coverage import (
    Look,
    coverage,
    first_look,
    has_unknown,
    look_again,
    settled,
)
from flexhop.block_mask.fields import as_int, block_size_pair
from flexhop.block_mask.graphed import Mask, graph_coverage
from flexhop.block_mask.listing import all_lists, listed
from flexhop.block_mask.lists import dense_to_lists
from flexhop.block_mask.mask import BlockMask
from flexhop.block_mask.operator import block_lists
from flexhop.block_mask.remembered import Found, remembered
from flexhop.block_mask.scores import (
    Grid,
    compiled_coverage,
    count_up,
    evaluate_mod,
    whole_blocks,
)
from flexhop.compat.mods.errors import refused
from flexhop.compat.mods.held import captured_tensors
from flexhop.compat.mods.private import private
from flexhop.compat.sizes import is_exporting, is_flag, is_symbolic
from flexhop.errors import (
    BlockMaskFieldError,
    CaptureDeviceError,
    ModResultError,
    OptionValueError,
    SequenceLengthError,
)
from flexhop.mods.functions import MaskMod, ScoreMod, check_arity, is_score_mod


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | int | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
    *,
    compute_q_blocks: bool = True,
) -> BlockMask:
    """Find the blocks that a mask_mod needs.

    The dense mask is never stored: memory is that of the block lists. flexhop decides most blocks
    as a whole, from the operators of mask_mod (docs/analysis.md). The lists equal those from
    evaluating every pair. Under torch.compile the same analysis becomes part of the graph, and
    nothing synchronises with the device. Eager calls synchronise only for blocks that remain
    undecided. They never do so if each query provably sees one range of keys (causal, windows,
    prefixes, padding), in CUDA graphs, or if `torch.cuda.set_sync_debug_mode` forbids it.
    Sizes may be integers of NumPy or 0-d integer tensors, which are read.

    Args:
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> bool, of 0-d int32 tensors, all in range.
        B: number of batches; None is 1, shared by all batches.
        H: number of query heads, or a divisor: head h has the blocks of h % H. None is 1. Batches
            and heads that mask_mod does not tell apart share the memory of their lists; `clone`
            gives each its own, to write to.
        Q_LEN: number of queries.
        KV_LEN: number of keys.
        device: the device of the lists. None is the accelerator, or the CPU if there is none.
        BLOCK_SIZE: queries and keys per block; an int means a square.
        _compile: the same as torch.compile(create_block_mask).
        separate_full_blocks: list full blocks separately, so that kernels skip mask_mod there.
        compute_dq_write_order: also compute dq_write_order.
        dq_kv_order: its order of key blocks: True is descending, False ascending.
        compute_q_blocks: also list the query blocks of each key block, which the backward pass
            needs.

    Raises:
        SequenceLengthError: a size is negative.
        OptionValueError: a size is no int, or a flag no bool.
        BlockSizeError: BLOCK_SIZE is not positive.
        ModArityError, ModResultError: mask_mod has the wrong parameters or result.
        ModLoweringError: mask_mod branches on the value of an index.
        BlockMaskFieldError: dq_kv_order is not a bool.
    """
    flags = {
        "separate_full_blocks": separate_full_blocks, "compute_q_blocks": compute_q_blocks,
        "compute_dq_write_order": compute_dq_write_order, "_compile": _compile,
    }  # fmt: skip
    for name, flag in flags.items():
        if not is_flag(flag):
            raise OptionValueError(name=name, value=type(flag).__name__, allowed="True or False")
    if not isinstance(dq_kv_order, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BlockMaskFieldError(
            field="dq_kv_order", reason="dq_kv_order must be a bool for create_block_mask"
        )
    if _compile:
        _check_mask_mod(mask_mod)
    grid = _grid(B, H, (Q_LEN, KV_LEN), block_size_pair(BLOCK_SIZE), device)
    build = torch.compile(_block_mask) if _compile else _block_mask
    mask = build(mask_mod, grid, bool(separate_full_blocks), bool(compute_q_blocks))
    if compute_dq_write_order:
        mask.compute_dq_write_order(dq_kv_order)
    return mask


def create_mask(
    mod_fn: ScoreMod | MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | int | None = None,
) -> Tensor:
    """Evaluate a mod for every pair, as a dense bool tensor [B, H, Q_LEN, KV_LEN].

    Args:
        mod_fn: a mask_mod or a score_mod. A score_mod hides a pair if it maps 0 to -inf.
        B: batches; None is 1.
        H: query heads; None is 1.
        Q_LEN: number of queries.
        KV_LEN: number of keys.
        device: None is the accelerator, or the CPU if there is none.

    Raises:
        SequenceLengthError, ModArityError, ModResultError, ModLoweringError: see
            create_block_mask.
    """
    grid = _grid(B, H, (Q_LEN, KV_LEN), (1, 1), device)
    # Not typing.cast, which Dynamo would call with the mod.
    mod: Any = mod_fn
    keep = _keep_of_scores(mod) if is_score_mod(mod) else checked(mod)
    sizes = (grid.batch, grid.heads, grid.q_len, grid.kv_len)
    return evaluate_mod(keep, *(count_up(size, grid.device) for size in sizes))


def _grid(
    batch: int | None,
    heads: int | None,
    lengths: tuple[int, int],
    block: tuple[int, int],
    device: torch.device | str | int | None,
) -> Grid:
    batch, heads = 1 if batch is None else batch, 1 if heads is None else heads
    named = {"B": batch, "H": heads, "Q_LEN": lengths[0], "KV_LEN": lengths[1]}
    sizes = [_size(name, size) for name, size in named.items()]
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return Grid(sizes[0], sizes[1], sizes[2], sizes[3], block, torch.device(device))


def _size(name: str, given: Any) -> int:
    """A size that was given as an int, or as what PyTorch takes for one."""
    size = as_int(given)
    # Dynamo has classes of its own for integers of NumPy, and leaves them to eager mode.
    is_int = isinstance(size, (int, torch.SymInt)) or torch.compiler.is_compiling()
    if not is_int or size is None or isinstance(size, (bool, float, str, Tensor)):
        raise OptionValueError(name=name, value=type(size).__name__, allowed="an int")
    if size < 0:
        raise SequenceLengthError(argument=name, expected="0 or more", length=size)
    return size  # pyright: ignore[reportReturnType] (symbols count as ints)


def _check_mask_mod(mask_mod: MaskMod) -> None:
    if not torch.compiler.is_compiling():  # signatures cannot be traced
        check_arity(mask_mod, "mask_mod")


def _block_mask(
    mask_mod: MaskMod, grid: Grid, separate_full_blocks: bool, compute_q_blocks: bool
) -> BlockMask:
    is_open = is_symbolic(grid.q_len) or is_symbolic(grid.kv_len)
    is_traced = torch.compiler.is_dynamo_compiling() and not (is_open and is_exporting())
    sides = (separate_full_blocks, compute_q_blocks)
    if torch.compiler.is_compiling() and not is_traced:
        return _by_every_score(mask_mod, grid, separate_full_blocks, compute_q_blocks)
    if 0 in grid[:4]:  # nothing to analyse or to evaluate
        _check_mask_mod(mask_mod)
        nothing = torch.zeros(1, 1, grid.rows, grid.columns, dtype=torch.bool, device=grid.device)
        fields = _of_all(listed((nothing, nothing), grid, sides, in_graph=True), grid)
    elif is_traced:
        probe = torch.empty(0, device=grid.device)
        fields = block_lists(probe, mask_mod, grid[:4], grid.block, sides)
    else:
        # A mask may outlive an evaluation that made it, and be used in training.
        with torch.inference_mode(False), torch.no_grad():
            fields = _of_all(_remembered_lists(mask_mod, grid, sides), grid)
    counts, indices, *others = all_lists(fields, sides)
    assert counts is not None and indices is not None  # the others may be omitted
    lengths = (grid.q_len, grid.kv_len)
    return BlockMask(lengths, counts, indices, *others, BLOCK_SIZE=grid.block, mask_mod=mask_mod)


def _by_every_score(
    mask_mod: MaskMod, grid: Grid, separate_full_blocks: bool, compute_q_blocks: bool
) -> BlockMask:
    """For exported graphs with symbolic lengths, and graphs that do not come from Dynamo."""
    some, every = compiled_coverage(checked(mask_mod), grid)
    full: tuple[Tensor | None, Tensor | None] = (None, None)
    if separate_full_blocks:
        full_blocks = every & whole_blocks(grid)
        full = dense_to_lists(full_blocks)
        some = some & ~full_blocks
    mask = BlockMask.from_kv_blocks(
        *dense_to_lists(some),
        *full,
        BLOCK_SIZE=grid.block,
        mask_mod=mask_mod,
        seq_lengths=(grid.q_len, grid.kv_len),
        compute_q_blocks=False,
    )
    if compute_q_blocks:
        mask.list_query_blocks(grid.columns)
    return mask


def _lists(
    mask: MaskMod | Mask, grid: Grid, sides: tuple[bool, bool], *, in_graph: bool
) -> tuple[Tensor, ...]:
    """The lists of a mask, for all batches and heads: graphs know less of it than eager calls.

    sides: whether to list full blocks, and the query side.
    """
    find: Callable[..., tuple[Tensor, Tensor]] = graph_coverage if in_graph else coverage
    covered = find(mask, checked(mask), grid)
    return _of_all(listed(covered, grid, sides, in_graph=in_graph), grid)


block_lists.find = _lists


def _of_all(lists: tuple[Tensor, ...], grid: Grid) -> tuple[Tensor, ...]:
    """Lists of every batch and head. Kernels do more for a mask if some share theirs."""
    if lists[0].shape[:2] == grid[:2]:
        return lists
    return tuple(t.expand(grid.batch, grid.heads, *t.shape[2:]) for t in lists)


def _remembered_lists(
    mask_mod: MaskMod, grid: Grid, sides: tuple[bool, bool]
) -> tuple[Tensor, ...]:
    """The same, eagerly; waits for the device only if it has to know which blocks are unknown."""
    keep = checked(mask_mod)

    def find() -> Found:
        _check_mask_mod(mask_mod)
        look = first_look(mask_mod, keep, grid)
        is_constant = look.is_constant
        if is_constant and look.unknown is not None:
            look = Look(*settled(look, keep))
        lists = listed(look[:2], grid, sides, in_graph=False)
        return Found(lists, None if look.unknown is None else look, is_constant)

    lists, look, _ = remembered(mask_mod, grid, sides, find)
    if look is None or look.unknown is None or not has_unknown(look.unknown):
        return lists
    if look.search is None:
        look = look_again(mask_mod, keep, grid, look)
    covered = look[:2] if look.unknown is None else settled(look, keep)
    return listed(covered, grid, sides, in_graph=False)


def checked(mask_mod: MaskMod) -> MaskMod:
    """mask_mod with checks of its result and of attempts to branch."""

    def keep(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        result = _call("mask_mod", mask_mod, (b, h, q_idx, kv_idx))
        if not isinstance(result, Tensor) or result.dtype != torch.bool or result.dim():
            raise _result_error("mask_mod", mask_mod, "a 0-d bool tensor", result)
        return result

    return keep


def _keep_of_scores(score_mod: ScoreMod) -> MaskMod:
    """The pairs that a score_mod keeps, as a mask_mod: all that it does not map from 0 to -inf."""

    def keep(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score = torch.zeros((), device=q_idx.device)
        result = _call("score_mod", score_mod, (score, b, h, q_idx, kv_idx))
        if not isinstance(result, Tensor) or result.is_complex() or result.dim():
            raise _result_error("score_mod", score_mod, "a 0-d tensor of real numbers", result)
        return ~torch.isneginf(result)

    return keep


def _call(kind: str, mod: Callable[..., Any], indices: tuple[Tensor, ...]) -> Any:
    """Call a mod. If it does what no kernel can, raise our own error."""
    if torch.compiler.is_compiling():
        return mod(*indices)
    try:
        result = private(mod)(*indices)
    except Exception as error:
        ours = refused(error, f"{kind} {_name(mod)!r}")
        if ours is None:
            raise
        raise ours from error
    is_without_values = isinstance(result, Tensor) and result.device.type == "meta"
    if is_without_values and indices[0].device.type != "meta":
        raise _meta_error(kind, mod, indices[0].device)
    return result


def _meta_error(kind: str, mod: Callable[..., Any], device: torch.device) -> CaptureDeviceError:
    """For a mod that captures a tensor without values."""
    places = (i for i, tensor in enumerate(captured_tensors(mod)) if tensor.is_meta)
    return CaptureDeviceError(
        mod=f"{kind} {_name(mod)!r}", index=next(places, 0), capture_device="meta",
        query_device=str(device),
    )  # fmt: skip


def _result_error(
    kind: str, mod: Callable[..., Any], expected: str, found: object
) -> ModResultError:
    words = type(found).__name__
    if isinstance(found, Tensor):
        words = f"a {found.dtype} tensor of shape {tuple(found.shape)}"
    return ModResultError(mod=kind, name=_name(mod), expected=expected, found=words)


def _name(mod: Callable[..., Any]) -> str:
    return getattr(mod, "__name__", None) or type(mod).__name__
