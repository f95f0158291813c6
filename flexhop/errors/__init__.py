"""Errors and warnings: one class per mistake, each with its message.

Raise a class with its facts by keyword, `raise HeadDimError(query_dim=64, key_dim=32)`; they are
formatted into its `message`. A fact is a plain value (a string, a number, a tuple, a dtype, a
device), so errors can be sent between processes. Each class derives from FlexhopError and from the
class that PyTorch's flex_attention raises for the same mistake: `except ValueError` keeps working.

Order: operands, block masks, mods and their captures, kernel options, calls, warnings.
"""

from __future__ import annotations

from flexhop.errors import base, checks

FlexhopError = base.FlexhopError


class RankError(FlexhopError, ValueError, NotImplementedError):
    """An operand has the wrong number of dimensions."""

    message = "{argument} must have {expected} dimensions, but has {rank}."


class SequenceLengthError(FlexhopError, ValueError, RuntimeError):
    """An empty sequence where at least one token is required, or a negative size."""

    message = "{argument} must be {expected}, but is {length}."


class HeadDimError(FlexhopError, ValueError):
    """Query and key have different head sizes."""

    message = "query and key must have the same head size, but have {query_dim} and {key_dim}."


class HeadDimRangeError(FlexhopError, ValueError):
    """A head size that no kernel supports."""

    message = (
        "The head size of {argument} is {dim}; flexhop supports 1 to {maximum}. Split a wider "
        "value into several calls of at most {maximum} columns and concatenate their outputs. "
        "Project a wider query and key to at most {maximum} columns, or split them over more "
        "heads."
    )


class LengthMismatchError(FlexhopError, ValueError):
    """Key and value have different lengths."""

    message = "key and value must have the same length, but have {key_len} and {value_len}."


class BatchError(FlexhopError, ValueError, RuntimeError):
    """Batch sizes that neither agree nor broadcast."""

    message = (
        "The batch must match: query has {query_batch}, key has {key_batch} and value has "
        "{value_batch}. key and value may have batch 1, which every query then shares."
    )


class HeadCountError(FlexhopError, ValueError):
    """Different numbers of heads without enable_gqa."""

    message = (
        "query has {query_heads} heads and key has {key_heads}. If each key head serves a group "
        "of query heads, pass enable_gqa=True."
    )


class GroupSizeError(FlexhopError, ValueError):
    """The number of query heads is not a multiple of the number of key heads."""

    message = (
        "enable_gqa: the number of query heads, {query_heads}, must be a multiple of the number "
        "of key heads, {key_heads}."
    )


class KeyValueHeadsError(FlexhopError, ValueError):
    """Key and value have different numbers of heads."""

    message = (
        "key and value must have the same number of heads, but have {key_heads} and {value_heads}."
    )


class DtypeError(FlexhopError, ValueError):
    """Operands of different dtypes."""

    message = (
        "query, key and value must have the same dtype, but have {query}, {key} and {value}. "
        "Convert them first, or call under torch.autocast."
    )


class UnsupportedDtypeError(FlexhopError, ValueError):
    """A dtype that attention does not support."""

    message = "{argument} is {dtype}; convert it to float16, bfloat16, float32 or float64."


class DeviceError(FlexhopError, ValueError):
    """Operands on different devices."""

    message = "query, key and value must be on one device, but are on {query}, {key} and {value}."


class UnsupportedDeviceError(FlexhopError, ValueError):
    """A device that flexhop has neither kernels nor an eager path for."""

    message = "flexhop runs on CUDA devices and on the CPU; got tensors on {device}."


class NestedTensorError(FlexhopError, NotImplementedError):
    """A nested tensor in a call that does not support it."""

    message = (
        "This call does not support NestedTensor inputs, but {argument} is one. Call "
        "flexhop.flex_attention with it, or pack the sequences and use flexhop.varlen_attention."
    )


class NestedOperandError(FlexhopError, ValueError, NotImplementedError):
    """Nested operands that do not match, or have an unsupported layout."""

    message = "{argument} {found}, but {expected}."


class AttentionMaskError(FlexhopError, ValueError, RuntimeError):
    """An attn_mask with a wrong dtype, device or shape."""

    message = "attn_mask {found}, but {expected}."


class BlockMaskTypeError(FlexhopError, TypeError):
    """A block_mask of the wrong type."""

    message = "block_mask must be a BlockMask (see create_block_mask) or None, but is a {found}."


class BlockMaskDeviceError(FlexhopError, RuntimeError, ValueError):
    """A mask on a different device than query."""

    message = (
        "Expect q/k/v and block_mask to be on the same device, but query is on {query_device} and "
        "block_mask is on {mask_device}. Move it with block_mask.to({query_device!r})."
    )

    def words(self) -> dict[str, object]:
        """Devices as strings, so that the suggested call can be pasted."""
        return {name: str(device) for name, device in self.facts.items()}


class BlockMaskLengthError(FlexhopError, RuntimeError, ValueError):
    """A mask created for different lengths."""

    message = (
        "block_mask was created for {mask_q} queries and {mask_kv} keys, but query has length "
        "{query_len} and key has length {key_len}. Create a mask for these lengths."
    )


class BlockMaskBatchError(FlexhopError, ValueError, RuntimeError):
    """A mask whose batch is neither 1 nor query's."""

    message = "block_mask has batch {mask_batch}; it must be 1 or the query's batch, {batch}."


class BlockMaskHeadsError(FlexhopError, ValueError, RuntimeError):
    """A mask whose number of heads does not divide query's."""

    message = "block_mask has {mask_heads} heads; their number must divide the query's, {heads}."


class BlockSizeError(FlexhopError, ValueError, RuntimeError):
    """An invalid block size."""

    message = "BLOCK_SIZE={block_size} cannot be used: {reason}."


class MissingQueryBlocksError(FlexhopError, RuntimeError):
    """The mask lacks the query blocks of each key block, which the backward pass needs."""

    message = (
        "BlockMask q_indices is None, but the backward pass reads the query blocks of each key "
        "block. Create the BlockMask with compute_q_blocks=True, or call under torch.no_grad()."
    )


class SlicedMaskModError(FlexhopError, RuntimeError):
    """A sliced mask was used without a new mask_mod; its indices would start at 0 again."""

    message = (
        "Cannot use mask_mod from a sliced BlockMask: slicing renumbers the rows, and only you "
        "know the offset. Take the mask_mod of the whole mask, shift its q_idx by the offset, "
        "and set it: sliced.mask_mod = shifted."
    )


class BlockMaskIndexError(FlexhopError, IndexError):
    """Too many indices for a BlockMask."""

    message = "A BlockMask is indexed by batch, head, and Q-block, not by {count} indices."


class BlockMaskFieldError(FlexhopError, ValueError, AssertionError):
    """A BlockMask tensor that does not match the others."""

    message = "BlockMask field {field}: {reason}."


class SequenceOffsetsError(FlexhopError, ValueError, RuntimeError):
    """Offsets that do not divide packed tokens into sequences."""

    message = "{argument} {found}, but {expected}."


class PagesExhaustedError(FlexhopError, AssertionError, RuntimeError):
    """The KV cache is full."""

    message = (
        "requested {requested} pages but there are only {empty} empty pages. Erase a sequence, or "
        "make a larger cache."
    )


class UnmappedPositionError(FlexhopError, IndexError, RuntimeError):
    """A token without a reserved page."""

    message = (
        "Position {position} of sequence {sequence} has no page: {capacity} tokens are reserved. "
        "Call reserve(batch_idx, seq_len) first."
    )


class CacheShapeError(FlexhopError, RuntimeError, ValueError):
    """A tensor that does not match the KV cache."""

    message = "{argument} {found}, but {expected}."


class FlashArgumentError(FlexhopError, ValueError, RuntimeError):
    """An argument of a flexhop.flash function that does not match the others."""

    message = "{argument} {found}, but {expected}."


class ModNotCallableError(FlexhopError, TypeError, RuntimeError):
    """A mod that is not callable."""

    message = "{argument} must be callable, but is a {found}."


class ModArityError(FlexhopError, TypeError):
    """A mod with the wrong number of parameters."""

    message = "{mod} {name!r} is called as {expected}, but its signature is {found}."


class ModResultError(FlexhopError, TypeError, ValueError):
    """A mod that returns the wrong type, shape or dtype."""

    message = "{mod} {name!r} must return {expected}, but returned {found}."


class ModArgumentError(FlexhopError, ValueError):
    """An invalid argument of a built-in mod or mask."""

    message = "{mod}: {argument} is {value}, but must be {allowed}."


class ModLoweringError(FlexhopError, RuntimeError):
    """A mod that cannot be compiled into a kernel."""

    message = (
        "{mod} cannot be compiled into the attention kernel: {operation} at {location}: {reason}. "
        "Buffers cannot be created inside the kernel, so a mod may use pointwise operations and "
        "reads of captured tensors; compute the rest before the call and capture the result."
    )


class CaptureDeviceError(FlexhopError, RuntimeError, ValueError):
    """A captured tensor on a different device than query."""

    message = (
        "Captured tensor {index} of {mod} is on {capture_device}, but query is on "
        "{query_device}. Move the tensor first: buffers cannot be created by the kernel."
    )


class MaskCaptureGradError(FlexhopError, RuntimeError):
    """A mask_mod that captures a tensor that requires a gradient."""

    message = (
        "Captured tensor {index} of mask_mod requires a gradient, but a mask is true or false and "
        "has none. Capture tensor.detach(), or add the tensor to the score in score_mod."
    )


class CaptureMutationError(FlexhopError, RuntimeError):
    """A mod that writes to a captured tensor."""

    message = "{mod} writes to a captured tensor at {location}; compute a new value instead."


CaptureChangedError = checks.CaptureChangedError


class UnknownOptionError(FlexhopError, TypeError, ValueError):
    """An option that does not exist."""

    message = "Unknown kernel option {name!r}{hint} Known options: {known}."

    def words(self) -> dict[str, object]:
        """The closest known name as a question, if there is one."""
        words = dict(self.facts)
        close = words.pop("close")
        return words | {"hint": f". Did you mean {close!r}?" if close else "."}


class OptionValueError(FlexhopError, ValueError):
    """An option value outside the allowed range."""

    message = "Invalid {name} value {value!r}: it must be {allowed}."


class OptionConflictError(FlexhopError, ValueError, RuntimeError):
    """Two options that contradict each other."""

    message = "{first} cannot be combined with {second}: {reason}."


class TileError(FlexhopError, RuntimeError, ValueError):
    """A tile that does not divide the blocks of the mask."""

    message = (
        "Q and KV block sizes must be divisible by the selected tile sizes, but the {kernel} "
        "kernel was asked for BLOCK_M={block_m} and BLOCK_N={block_n} with "
        "SPARSE_Q_BLOCK_SIZE={q_block} and SPARSE_KV_BLOCK_SIZE={kv_block}. "
        "Choose a smaller tile, or another BLOCK_SIZE in create_block_mask."
    )


class TileResourceError(FlexhopError, RuntimeError):
    """A tile that needs more shared memory than the device has."""

    message = (
        "The {kernel} kernel with {tile} needs {needed} bytes of shared memory; {device} has "
        "{available}. Choose a smaller tile or fewer stages."
    )


class AuxConflictError(FlexhopError, ValueError):
    """return_lse and return_aux in one call."""

    message = "Cannot specify both return_lse and return_aux; keep AuxRequest(lse=True)."


class VmapError(FlexhopError, NotImplementedError):
    """A torch.vmap transform that the operator does not support."""

    message = "torch.vmap cannot map {argument}; fold it into the batch instead."


class NoTritonError(FlexhopError, RuntimeError):
    """Triton is not installed."""

    message = "Triton is not installed, so kernels cannot be compiled: pip install triton."


class MissingPackageError(FlexhopError, ImportError):
    """A missing optional package."""

    message = "{feature} needs {package}, which is not installed: pip install {package}."


class UnsupportedFeatureError(FlexhopError, NotImplementedError):
    """A combination that flexhop does not support."""

    message = "{feature} is not supported: {reason}. {hint}."


PlanError = checks.PlanError
PlacementError = checks.PlacementError
RankDisagreementError = checks.RankDisagreementError
ShardedCallError = checks.ShardedCallError

NanWarning = checks.NanWarning
UncheckedWarning = checks.UncheckedWarning
WrongResultError = checks.WrongResultError
WrongResultWarning = checks.WrongResultWarning

EagerWarning = base.EagerWarning
FlexhopWarning = base.FlexhopWarning
KernelFallbackWarning = base.KernelFallbackWarning
OptionIgnoredWarning = base.OptionIgnoredWarning
ReturnLseDeprecationWarning = base.ReturnLseDeprecationWarning
TorchVersionWarning = base.TorchVersionWarning
