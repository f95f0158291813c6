"""Check one call and serialise its static operands; plain Python on real or fake tensors.

Under `torch.compile`, Dynamo does not trace this module: the operator's tracker calls it on fake
tensors. A mistake therefore raises the same error, compiled or not, and sizes compared here become
guards.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop import errors, mods
from flexhop.compat.collectives import agree
from flexhop.compat.compilation import source_fingerprint
from flexhop.compat.operators.autograd import dtype_under, wanted_dtype
from flexhop.compat.sizes import is_empty, is_flag
from flexhop.ops import wide_lse
from flexhop.ops.verification.certified import verify_option
from flexhop.options import KernelOptions

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 576
PROBABILITIES = "at least 0 and below 1, which would drop everything"
Wire = dict[str, int | str | bool | float]


class MaskFacts(NamedTuple):
    """The facts of a block mask that are not tensors."""

    query_length: int
    key_length: int
    q_block_size: int
    kv_block_size: int
    has_full_blocks: bool
    has_q_blocks: bool
    is_sliced: bool = False  # whether its mask_mod was lost by slicing
    kind: str = ""  # RANGES of ops/args.py, or empty for lists
    sizes: tuple[int, int] = (1, 1)  # batches and heads, also of lists that they share


class Mistake(NamedTuple):
    """An error to raise: its class, and its facts as pairs, which Dynamo treats as constants."""

    error: type[errors.FlexhopError]
    facts: tuple[tuple[str, Any], ...]


def note_mistake(error: type[errors.FlexhopError], **facts: Any) -> Mistake:
    """Record the error error(**facts)."""
    return Mistake(error, tuple(facts.items()))


def note_rank(rank: int, **tensors: Any) -> Mistake | None:
    """The error of the first that is no tensor or has not `rank` dimensions, if there is one."""
    for argument, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            return _wrong_type(argument, tensor, "a tensor")
        if tensor.dim() != rank:
            return note_mistake(
                errors.RankError, argument=argument, rank=tensor.dim(), expected=rank
            )
    return None


def note_wrong_type(
    query: Any, key: Any, value: Any, scale: Any, return_aux: Any, **flags: Any
) -> Mistake | None:
    """An OptionValueError for the first of an entry point's arguments of a wrong type, if any."""
    for name, operand in (("query", query), ("key", key), ("value", value)):
        if not isinstance(operand, Tensor):
            return _wrong_type(name, operand, "a tensor")
    if isinstance(scale, (Tensor, str, bool)):
        return _wrong_type("scale", scale, "a float or None; multiply query by a tensor instead")
    if return_aux is not None and not hasattr(return_aux, "max_scores"):
        return _wrong_type("return_aux", return_aux, "an AuxRequest or None")
    for name, flag in flags.items():
        if not is_flag(flag):
            return _wrong_type(name, flag, "True or False")
    return None


def _wrong_type(name: str, found: Any, allowed: str) -> Mistake:
    return note_mistake(
        errors.OptionValueError, name=name, value=type(found).__name__, allowed=allowed
    )


class Call(NamedTuple):
    """The non-tensor arguments of one call; `prepare` checks them."""

    scale: float | None
    enable_gqa: bool
    kernel_options: Any
    return_max: bool
    mask: MaskFacts | None
    wrong_mask: str | None = None  # type of a block_mask argument that is not a block mask
    has_two_requests: bool = False  # return_lse and return_aux at once
    mistake: Mistake | None = None  # found by the entry point
    dropout_p: float = 0
    sum_groups: str = ""  # process groups over which gradients of captured tensors are summed
    first: tuple[int, int] = (0, 0)  # global indices of the call's first batch and head
    dropout_groups: int = 0  # groups of 16 queries in a placed seed (ops/dropout.py); 0: none
    agree_groups: str = ""  # process groups whose ranks must make the same call
    wide_lse: bool = False  # lse in fp64; see ops/wide_lse.py


def prepare(
    query: Tensor, key: Tensor, value: Tensor, blocks: tuple[Tensor, ...], call: Call
) -> tuple[float, Wire]:
    """Check a call and return the operator's scale and options.

    Args:
        query: [B, Hq, M, D]; key: [B or 1, Hkv, N, D]; value: [B or 1, Hkv, N, Dv].
        blocks: as in AttentionArgs.
        call: everything else.

    Raises:
        FlexhopError: one of its subclasses, for each mistake named in flexhop.errors.
    """
    check_requests(call)
    options = KernelOptions.of(call.kernel_options)
    _check_operands(query, key, value)
    _check_heads(query, key, value, call.enable_gqa)
    wire: Wire = {**options.to_wire(), "flexhop": source_fingerprint(), **verify_option()}
    wire.pop("eager_kernels", None)  # compiled calls have kernels anyway; see ops/dispatch.py
    if call.return_max:
        wire["return_max"] = True
    if call.wide_lse and query.dtype != torch.float64:
        wire[wide_lse.OPTION] = True
    dropout_p = float(call.dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise errors.OptionValueError(name="dropout_p", value=dropout_p, allowed=PROBABILITIES)
    if dropout_p > 0.0:
        wire["dropout_p"] = dropout_p
        if call.dropout_groups:
            wire["dropout_groups"] = int(call.dropout_groups)
    if is_determinism_required():
        wire["deterministic"] = True
    if call.sum_groups:
        wire["sum_groups"] = call.sum_groups
    if call.mask is not None:
        _check_mask(query, key, blocks, call.mask)
        _check_tile("forward", wire, call.mask.q_block_size, call.mask.kv_block_size)
        wire.update(_mask_options(call.mask))
    return _scale(call.scale, query), wire


def agree_on_shapes(query: Tensor, key: Tensor, value: Tensor, groups: str) -> None:
    """Compare a call's shapes with those of the other ranks in some groups.

    Raises:
        RankDisagreementError: they differ.
    """
    named = {"query": query, "key": key, "value": value}
    text = ", ".join(f"{name} {_sizes(t)} {t.dtype}" for name, t in named.items())
    for group in groups.split(","):
        agree("the operands of attention", text, group, "Give every rank a part of the same batch")


def _sizes(tensor: Tensor) -> str:
    """Sizes; sizes that are dynamic under torch.compile are not compared."""
    return str(["any" if isinstance(s, torch.SymInt) else s for s in tensor.shape])


def is_determinism_required() -> bool:
    """Whether PyTorch requires deterministic results."""
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not warns_only


def check_requests(call: Call) -> None:
    """Raise the entry point's error, or an error of the call's options."""
    if call.mistake is not None:
        error, facts = call.mistake
        raise error(**dict(facts))
    if call.has_two_requests:
        raise errors.AuxConflictError()
    if call.wrong_mask is not None:
        raise errors.BlockMaskTypeError(found=call.wrong_mask)
    if call.mask is not None and call.mask.is_sliced:
        raise errors.SlicedMaskModError()


def _scale(scale: float | None, query: Tensor) -> float:
    if scale is None:
        return 1.0 / math.sqrt(query.size(-1))
    try:
        return float(scale)
    except (TypeError, ValueError):
        raise errors.OptionValueError(
            name="scale", value=scale, allowed="a float or None"
        ) from None


def _check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if tensor.is_nested:
            raise errors.NestedTensorError(argument=name)
        if tensor.dim() != 4:
            raise errors.RankError(argument=name, rank=tensor.dim(), expected=4)
    devices = {name: str(tensor.device) for name, tensor in named.items()}
    if len(set(devices.values())) > 1:
        raise errors.DeviceError(**devices)
    if query.device.type not in ("cpu", "cuda", "meta"):
        raise errors.UnsupportedDeviceError(device=devices["query"])
    wanted = wanted_dtype(query.device.type)
    dtypes = {name: dtype_under(wanted, tensor.dtype) for name, tensor in named.items()}
    if len(set(dtypes.values())) > 1:
        raise errors.DtypeError(**dtypes)
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise errors.UnsupportedDtypeError(argument=name, dtype=dtype)
    _check_sizes(query, key, value)


def _check_sizes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if is_empty(key.size(2)):
        raise errors.SequenceLengthError(
            argument="The length of key", expected="greater than 0", length=0
        )
    if query.size(3) != key.size(3):
        raise errors.HeadDimError(query_dim=int(query.size(3)), key_dim=int(key.size(3)))
    if key.size(2) != value.size(2):
        raise errors.LengthMismatchError(key_len=int(key.size(2)), value_len=int(value.size(2)))
    for name, tensor in (("query", query), ("value", value)):
        if not 1 <= tensor.size(3) <= MAX_HEAD_DIM:
            raise errors.HeadDimRangeError(
                argument=name, dim=int(tensor.size(3)), maximum=MAX_HEAD_DIM
            )
    batch = query.size(0)
    shared = key.size(0) == 1 and value.size(0) == 1
    if not (shared or (key.size(0) == batch and value.size(0) == batch)):
        raise errors.BatchError(
            query_batch=int(batch), key_batch=int(key.size(0)), value_batch=int(value.size(0))
        )


def _check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    heads, key_heads, value_heads = int(query.size(1)), int(key.size(1)), int(value.size(1))
    if heads == 0:
        allowed = "a tensor with at least one head"
        raise errors.OptionValueError(name="query", value=tuple(query.shape), allowed=allowed)
    if key_heads != value_heads:
        raise errors.KeyValueHeadsError(key_heads=key_heads, value_heads=value_heads)
    if heads == key_heads:
        return
    if not enable_gqa:
        raise errors.HeadCountError(query_heads=heads, key_heads=key_heads)
    if key_heads == 0 or heads % key_heads != 0:
        raise errors.GroupSizeError(query_heads=heads, key_heads=key_heads)


def _check_mask(query: Tensor, key: Tensor, blocks: tuple[Tensor, ...], mask: MaskFacts) -> None:
    counts = blocks[0]
    if counts.device != query.device:
        raise errors.BlockMaskDeviceError(
            mask_device=str(counts.device), query_device=str(query.device)
        )
    if query.size(2) != mask.query_length or key.size(2) != mask.key_length:
        raise errors.BlockMaskLengthError(
            mask_q=int(mask.query_length), mask_kv=int(mask.key_length),
            query_len=int(query.size(2)), key_len=int(key.size(2)),
        )  # fmt: skip
    # Lists that all share have one batch or head.
    batch, heads = (
        size if size != 1 else of for size, of in zip(counts.shape[:2], mask.sizes, strict=True)
    )
    if batch != 1 and batch != query.size(0):
        raise errors.BlockMaskBatchError(mask_batch=int(batch), batch=int(query.size(0)))
    is_shared = counts.size(1) == 1 and heads > 0 and query.size(1) % heads == 0
    if not is_shared and heads != query.size(1):
        raise errors.BlockMaskHeadsError(mask_heads=int(heads), heads=int(query.size(1)))


def _mask_options(mask: MaskFacts) -> Wire:
    wire: Wire = {"mask_kind": mask.kind} if mask.kind else {}
    return wire | {
        "q_block_size": int(mask.q_block_size),
        "kv_block_size": int(mask.kv_block_size),
        "has_full_blocks": mask.has_full_blocks,
        "has_q_blocks": mask.has_q_blocks,
    }


def check_backward(is_needed: bool, options: Wire) -> None:
    """If a backward pass will follow, check that its kernels can run.

    Raises:
        MissingQueryBlocksError: the mask has no query lists.
        TileError: a tile from the user does not divide the blocks of the mask.
    """
    if not is_needed or "q_block_size" not in options:
        return
    if not options["has_q_blocks"]:
        raise errors.MissingQueryBlocksError()
    for field in ("grad_query", "grad_key_value"):
        _check_tile(field, options, int(options["q_block_size"]), int(options["kv_block_size"]))


def _check_tile(field: str, options: Wire, q_block: int, kv_block: int) -> None:
    """Check that a tile from the user divides the blocks of the mask."""
    rows, columns = (options.get(f"{field}.{side}") for side in ("block_m", "block_n"))
    # Unset fields are chosen to fit.
    if q_block % int(rows or 1) or kv_block % int(columns or 1):
        raise errors.TileError(
            kernel=field, block_m=rows, block_n=columns, q_block=q_block, kv_block=kv_block
        )


def check_gradients(mask_captures: tuple[Any, ...], options: Wire) -> None:
    """Check that every captured tensor that needs a gradient can have one."""
    check_backward(True, options)
    for position, capture in enumerate(mask_captures):
        if isinstance(capture, Tensor) and capture.requires_grad:
            raise errors.MaskCaptureGradError(index=position)


def check_result(result: object, kind: str, name: str) -> None:
    """Check that a mod's result is a scalar of the right dtype."""
    if kind == "mask_mod":
        mods.check_mask_result(result, name)
    else:
        mods.check_score_result(result, name, kind)
    if isinstance(result, Tensor) and result.dim() != 0:
        raise errors.ModResultError(
            mod=kind, name=name, expected="one number per score",
            found=f"a tensor of shape {tuple(result.shape)}",
        )  # fmt: skip


def check_captures(query: Tensor, mod: str, captures: tuple[Any, ...]) -> None:
    """Check that captured tensors are on query's device."""
    for position, capture in enumerate(captures):
        if isinstance(capture, Tensor) and capture.device != query.device and capture.dim() > 0:
            raise errors.CaptureDeviceError(
                mod=mod, index=position,
                capture_device=str(capture.device), query_device=str(query.device),
            )  # fmt: skip
