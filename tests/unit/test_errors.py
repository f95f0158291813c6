"""Every class of flexhop.errors: its whole message, its bases, and its way through pickle."""

import copy
import inspect
import pickle

import pytest

from flexhop import errors

# (class, facts, built-in bases, the whole message)
ERRORS = [
    (
        errors.RankError,
        {"argument": "query", "rank": 3, "expected": 4},
        (ValueError, NotImplementedError),
        "query must have 4 dimensions, but has 3.",
    ),
    (
        errors.SequenceLengthError,
        {"argument": "The length of query", "expected": "greater than 0", "length": 0},
        (ValueError, RuntimeError),
        "The length of query must be greater than 0, but is 0.",
    ),
    (
        errors.HeadDimError,
        {"query_dim": 64, "key_dim": 32},
        (ValueError,),
        "query and key must have the same head size, but have 64 and 32.",
    ),
    (
        errors.HeadDimRangeError,
        {"argument": "value", "dim": 2048, "maximum": 1024},
        (ValueError,),
        "The head size of value is 2048; flexhop supports 1 to 1024. Split a wider value "
        "into several calls of at most 1024 columns and concatenate their outputs. Project a "
        "wider query and key to at most 1024 columns, or split them over more heads.",
    ),
    (
        errors.LengthMismatchError,
        {"key_len": 128, "value_len": 64},
        (ValueError,),
        "key and value must have the same length, but have 128 and 64.",
    ),
    (
        errors.BatchError,
        {"query_batch": 4, "key_batch": 2, "value_batch": 2},
        (ValueError, RuntimeError),
        "The batch must match: query has 4, key has 2 and value has 2. key and value may have "
        "batch 1, which every query then shares.",
    ),
    (
        errors.HeadCountError,
        {"query_heads": 8, "key_heads": 2},
        (ValueError,),
        "query has 8 heads and key has 2. If each key head serves a group of query heads, pass "
        "enable_gqa=True.",
    ),
    (
        errors.GroupSizeError,
        {"query_heads": 8, "key_heads": 3},
        (ValueError,),
        "enable_gqa: the number of query heads, 8, must be a multiple of the number of key "
        "heads, 3.",
    ),
    (
        errors.KeyValueHeadsError,
        {"key_heads": 2, "value_heads": 4},
        (ValueError,),
        "key and value must have the same number of heads, but have 2 and 4.",
    ),
    (
        errors.DtypeError,
        {"query": "torch.float16", "key": "torch.float32", "value": "torch.float16"},
        (ValueError,),
        "query, key and value must have the same dtype, but have torch.float16, torch.float32 "
        "and torch.float16. Convert them first, or call under torch.autocast.",
    ),
    (
        errors.UnsupportedDtypeError,
        {"argument": "key", "dtype": "torch.int64"},
        (ValueError,),
        "key is torch.int64; convert it to float16, bfloat16, float32 or float64.",
    ),
    (
        errors.DeviceError,
        {"query": "cuda:0", "key": "cpu", "value": "cuda:0"},
        (ValueError,),
        "query, key and value must be on one device, but are on cuda:0, cpu and cuda:0.",
    ),
    (
        errors.UnsupportedDeviceError,
        {"device": "mps:0"},
        (ValueError,),
        "flexhop runs on CUDA devices and on the CPU; got tensors on mps:0.",
    ),
    (
        errors.NestedTensorError,
        {"argument": "key"},
        (NotImplementedError,),
        "This call does not support NestedTensor inputs, but key is one. Call "
        "flexhop.flex_attention with it, or pack the sequences and use flexhop.varlen_attention.",
    ),
    (
        errors.NestedOperandError,
        {"argument": "key", "found": "has 3 sequences", "expected": "query has 2"},
        (ValueError, NotImplementedError),
        "key has 3 sequences, but query has 2.",
    ),
    (
        errors.AttentionMaskError,
        {"found": "is on meta", "expected": "query is on cpu"},
        (ValueError, RuntimeError),
        "attn_mask is on meta, but query is on cpu.",
    ),
    (
        errors.BlockMaskTypeError,
        {"found": "Tensor"},
        (TypeError,),
        "block_mask must be a BlockMask (see create_block_mask) or None, but is a Tensor.",
    ),
    (
        errors.BlockMaskDeviceError,
        {"mask_device": "cpu", "query_device": "cuda:0"},
        (RuntimeError, ValueError),
        "Expect q/k/v and block_mask to be on the same device, but query is on cuda:0 and "
        "block_mask is on cpu. Move it with block_mask.to('cuda:0').",
    ),
    (
        errors.BlockMaskLengthError,
        {"mask_q": 128, "mask_kv": 256, "query_len": 100, "key_len": 300},
        (RuntimeError, ValueError),
        "block_mask was created for 128 queries and 256 keys, but query has length 100 and key "
        "has length 300. Create a mask for these lengths.",
    ),
    (
        errors.BlockMaskBatchError,
        {"mask_batch": 3, "batch": 4},
        (ValueError, RuntimeError),
        "block_mask has batch 3; it must be 1 or the query's batch, 4.",
    ),
    (
        errors.BlockMaskHeadsError,
        {"mask_heads": 3, "heads": 8},
        (ValueError, RuntimeError),
        "block_mask has 3 heads; their number must divide the query's, 8.",
    ),
    (
        errors.BlockSizeError,
        {"block_size": (0, 128), "reason": "both sizes must be positive"},
        (ValueError, RuntimeError),
        "BLOCK_SIZE=(0, 128) cannot be used: both sizes must be positive.",
    ),
    (
        errors.MissingQueryBlocksError,
        {},
        (RuntimeError,),
        "BlockMask q_indices is None, but the backward pass reads the query blocks of each key "
        "block. Create the BlockMask with compute_q_blocks=True, or call under torch.no_grad().",
    ),
    (
        errors.SlicedMaskModError,
        {},
        (RuntimeError,),
        "Cannot use mask_mod from a sliced BlockMask: slicing renumbers the rows, and only you "
        "know the offset. Take the mask_mod of the whole mask, shift its q_idx by the offset, "
        "and set it: sliced.mask_mod = shifted.",
    ),
    (
        errors.BlockMaskIndexError,
        {"count": 4},
        (IndexError,),
        "A BlockMask is indexed by batch, head, and Q-block, not by 4 indices.",
    ),
    (
        errors.BlockMaskFieldError,
        {"field": "kv_indices", "reason": "must be int32, but is torch.int64"},
        (ValueError, AssertionError),
        "BlockMask field kv_indices: must be int32, but is torch.int64.",
    ),
    (
        errors.SequenceOffsetsError,
        {"argument": "cu_seqlens_q", "found": "starts at 1", "expected": "must start at 0"},
        (ValueError, RuntimeError),
        "cu_seqlens_q starts at 1, but must start at 0.",
    ),
    (
        errors.PagesExhaustedError,
        {"requested": 2, "empty": 0},
        (AssertionError, RuntimeError),
        "requested 2 pages but there are only 0 empty pages. Erase a sequence, or make a larger "
        "cache.",
    ),
    (
        errors.UnmappedPositionError,
        {"position": 9, "sequence": 1, "capacity": 8},
        (IndexError, RuntimeError),
        "Position 9 of sequence 1 has no page: 8 tokens are reserved. Call reserve(batch_idx, "
        "seq_len) first.",
    ),
    (
        errors.CacheShapeError,
        {"argument": "k_val", "found": "requires a gradient", "expected": "a cache has none"},
        (RuntimeError, ValueError),
        "k_val requires a gradient, but a cache has none.",
    ),
    (
        errors.FlashArgumentError,
        {"argument": "kv", "found": "has 3 tensors in dimension 2", "expected": "needs 2"},
        (ValueError, RuntimeError),
        "kv has 3 tensors in dimension 2, but needs 2.",
    ),
    (
        errors.ModNotCallableError,
        {"argument": "and_masks argument 2", "found": "Tensor"},
        (TypeError, RuntimeError),
        "and_masks argument 2 must be callable, but is a Tensor.",
    ),
    (
        errors.ModArityError,
        {
            "mod": "mask_mod",
            "name": "causal",
            "expected": "(b, h, q_idx, kv_idx)",
            "found": "(q, k)",
        },
        (TypeError,),
        "mask_mod 'causal' is called as (b, h, q_idx, kv_idx), but its signature is (q, k).",
    ),
    (
        errors.ModResultError,
        {"mod": "mask_mod", "name": "f", "expected": "a bool tensor", "found": "an int"},
        (TypeError, ValueError),
        "mask_mod 'f' must return a bool tensor, but returned an int.",
    ),
    (
        errors.ModArgumentError,
        {"mod": "softcap", "argument": "cap", "value": 0, "allowed": "positive"},
        (ValueError,),
        "softcap: cap is 0, but must be positive.",
    ),
    (
        errors.ModLoweringError,
        {
            "mod": "score_mod",
            "operation": "aten.sum",
            "location": "train.py:7",
            "reason": "it reduces 256 elements",
        },
        (RuntimeError,),
        "score_mod cannot be compiled into the attention kernel: aten.sum at train.py:7: it "
        "reduces 256 elements. Buffers cannot be created inside the kernel, so a mod may use "
        "pointwise operations and reads of captured tensors; compute the rest before the call "
        "and capture the result.",
    ),
    (
        errors.CaptureDeviceError,
        {"mod": "score_mod", "index": 0, "capture_device": "cpu", "query_device": "cuda:0"},
        (RuntimeError, ValueError),
        "Captured tensor 0 of score_mod is on cpu, but query is on cuda:0. Move the "
        "tensor first: buffers cannot be created by the kernel.",
    ),
    (
        errors.MaskCaptureGradError,
        {"index": 1},
        (RuntimeError,),
        "Captured tensor 1 of mask_mod requires a gradient, but a mask is true or false and has "
        "none. Capture tensor.detach(), or add the tensor to the score in score_mod.",
    ),
    (
        errors.CaptureChangedError,
        {"mod": "score_mod 'bias'"},
        (RuntimeError,),
        "A tensor that score_mod 'bias' captured was written to before backward, which computes "
        "the scores again. Capture a clone of it.",
    ),
    (
        errors.CaptureMutationError,
        {"mod": "score_mod", "location": "train.py:7"},
        (RuntimeError,),
        "score_mod writes to a captured tensor at train.py:7; compute a new value instead.",
    ),
    (
        errors.UnknownOptionError,
        {"name": "BLOK_M", "close": "BLOCK_M", "known": "BLOCK_M, BLOCK_N"},
        (TypeError, ValueError),
        "Unknown kernel option 'BLOK_M'. Did you mean 'BLOCK_M'? Known options: BLOCK_M, BLOCK_N.",
    ),
    (
        errors.UnknownOptionError,
        {"name": "zebra", "close": None, "known": "BLOCK_M, BLOCK_N"},
        (TypeError, ValueError),
        "Unknown kernel option 'zebra'. Known options: BLOCK_M, BLOCK_N.",
    ),
    (
        errors.OptionValueError,
        {"name": "BACKEND", "value": "INVALID", "allowed": "'AUTO' or 'TRITON'"},
        (ValueError,),
        "Invalid BACKEND value 'INVALID': it must be 'AUTO' or 'TRITON'.",
    ),
    (
        errors.OptionConflictError,
        {
            "first": "BACKEND",
            "second": "legacy FORCE_USE_FLEX_ATTENTION",
            "reason": "both select the kernel; keep BACKEND",
        },
        (ValueError, RuntimeError),
        "BACKEND cannot be combined with legacy FORCE_USE_FLEX_ATTENTION: both select the "
        "kernel; keep BACKEND.",
    ),
    (
        errors.TileError,
        {"kernel": "forward", "block_m": 64, "block_n": 32, "q_block": 96, "kv_block": 96},
        (RuntimeError, ValueError),
        "Q and KV block sizes must be divisible by the selected tile sizes, but the forward "
        "kernel was asked for BLOCK_M=64 and BLOCK_N=32 with SPARSE_Q_BLOCK_SIZE=96 and "
        "SPARSE_KV_BLOCK_SIZE=96. Choose a smaller tile, or another BLOCK_SIZE in "
        "create_block_mask.",
    ),
    (
        errors.TileResourceError,
        {
            "kernel": "forward",
            "tile": "Tile(256, 256)",
            "needed": 300000,
            "available": 232448,
            "device": "NVIDIA H100",
        },
        (RuntimeError,),
        "The forward kernel with Tile(256, 256) needs 300000 bytes of shared memory; NVIDIA H100 "
        "has 232448. Choose a smaller tile or fewer stages.",
    ),
    (
        errors.AuxConflictError,
        {},
        (ValueError,),
        "Cannot specify both return_lse and return_aux; keep AuxRequest(lse=True).",
    ),
    (
        errors.VmapError,
        {"argument": "query of flex_attention"},
        (NotImplementedError,),
        "torch.vmap cannot map query of flex_attention; fold it into the batch instead.",
    ),
    (
        errors.NoTritonError,
        {},
        (RuntimeError,),
        "Triton is not installed, so kernels cannot be compiled: pip install triton.",
    ),
    (
        errors.MissingPackageError,
        {"feature": "BlockMask.plot", "package": "matplotlib"},
        (ImportError,),
        "BlockMask.plot needs matplotlib, which is not installed: pip install matplotlib.",
    ),
    (
        errors.UnsupportedFeatureError,
        {"feature": "Paged attention", "reason": "no kernel", "hint": "Gather the pages first"},
        (NotImplementedError,),
        "Paged attention is not supported: no kernel. Gather the pages first.",
    ),
    (
        errors.PlanError,
        {"argument": "mesh", "found": "has 8 ranks", "expected": "the plan is for 4"},
        (ValueError,),
        "mesh has 8 ranks, but the plan is for 4.",
    ),
    (
        errors.ShardedCallError,
        {"argument": "query", "found": "has 64 tokens", "expected": "every rank has 32"},
        (ValueError, RuntimeError),
        "Inside context_parallel, query has 64 tokens, but every rank has 32.",
    ),
    (
        errors.RankDisagreementError,
        {"subject": "the batch", "found": "2 on rank 0; 3 on rank 1", "hint": "Use one"},
        (RuntimeError, ValueError),
        "The ranks of the mesh disagree about the batch: 2 on rank 0; 3 on rank 1. Use one.",
    ),
    (
        errors.PlacementError,
        {
            "argument": "query",
            "found": "(Shard(2),)",
            "expected": "tokens stay whole",
            "hint": "Redistribute it",
        },
        (ValueError, NotImplementedError),
        "query is placed as (Shard(2),), but tokens stay whole. Redistribute it.",
    ),
    (
        errors.WrongResultError,
        {"check": "WRONG: out 2.00 of budget"},
        (AssertionError,),
        "FLEXHOP_VERIFY found a wrong result. WRONG: out 2.00 of budget.",
    ),
]

WARNINGS = [
    (
        errors.EagerWarning,
        {},
        (UserWarning,),
        "flex_attention called without torch.compile: it computes the scores in plain PyTorch, "
        "which is meant for debugging. Use torch.compile(flex_attention) for the fused kernels.",
    ),
    (
        errors.KernelFallbackWarning,
        {"candidate": "flexhop_forward with tiles of 64 x 32: RuntimeError: ptxas"},
        (UserWarning,),
        "A flexhop kernel failed to compile, so another one runs instead, perhaps more slowly. "
        "Please report this with the mod and the shapes: flexhop_forward with tiles of 64 x 32: "
        "RuntimeError: ptxas. FLEXHOP_STRICT=1 makes it an error.",
    ),
    (
        errors.WrongResultWarning,
        {"check": "WRONG: out 2.00 of budget"},
        (UserWarning,),
        "FLEXHOP_VERIFY found a wrong result. WRONG: out 2.00 of budget. Please report it with "
        "that file. FLEXHOP_STRICT=1 makes it an error.",
    ),
    (
        errors.NanWarning,
        {"shape": "[1, 1, 8, 16]", "origin": "the first NaN comes from key[0, 0, 3]"},
        (UserWarning,),
        "FLEXHOP_VERIFY found a NaN in a call of [1, 1, 8, 16]: the first NaN comes from "
        "key[0, 0, 3].",
    ),
    (
        errors.UncheckedWarning,
        {"shape": "[1, 1, 8, 16]"},
        (UserWarning,),
        "FLEXHOP_VERIFY did not check a call with a query of [1, 1, 8, 16]: there was not enough "
        "memory. Leave some free, or unset FLEXHOP_VERIFY.",
    ),
    (
        errors.OptionIgnoredWarning,
        {"names": "USE_TMA, kpack"},
        (UserWarning,),
        "Kernel options that tune only PyTorch's own kernels were ignored: USE_TMA, kpack.",
    ),
    (
        errors.TorchVersionWarning,
        {"found": "3.0.0", "supported": "2.11 to 2.15"},
        (UserWarning,),
        "flexhop supports torch 2.11 to 2.15, but this is 3.0.0; it may not work.",
    ),
    (
        errors.ReturnLseDeprecationWarning,
        {},
        (UserWarning, FutureWarning),
        "return_lse is deprecated; pass return_aux=AuxRequest(lse=True) instead.",
    ),
]

CASES = [pytest.param(*case, id=case[0].__name__) for case in ERRORS + WARNINGS]


@pytest.mark.parametrize(("cls", "facts", "bases", "text"), CASES)
def test_message(cls, facts, bases, text):
    assert str(cls(**facts)) == text


@pytest.mark.parametrize(("cls", "facts", "bases", "text"), CASES)
def test_bases(cls, facts, bases, text):
    family = errors.FlexhopWarning if issubclass(cls, Warning) else errors.FlexhopError
    assert issubclass(cls, family)
    assert all(issubclass(cls, base) for base in bases)
    with pytest.raises(bases[-1]):
        raise cls(**facts)


@pytest.mark.parametrize(("cls", "facts", "bases", "text"), CASES)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy])
def test_survives_pickling_and_copying(cls, facts, bases, text, again):
    error = cls(**facts)
    error.add_note("seen by rank 3")
    returned = again(error)
    assert type(returned) is cls
    assert str(returned) == text
    assert returned.facts == facts
    assert returned.__notes__ == ["seen by rank 3"]


def test_every_class_is_tested():
    bases = (errors.FlexhopError, errors.FlexhopWarning)
    public = {
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, bases) and cls not in bases
    }
    assert public == {case[0] for case in ERRORS + WARNINGS}


def test_facts_are_checked():
    with pytest.raises(TypeError, match=r"HeadDimError tells \['key_dim', 'query_dim'\]"):
        errors.HeadDimError(query_dim=64)
    with pytest.raises(TypeError, match="not"):
        errors.AuxConflictError(reason="none wanted")


def test_devices_and_dtypes_are_facts_too():
    import torch

    error = errors.BlockMaskDeviceError(
        mask_device=torch.device("cpu"), query_device=torch.device("cuda", 1)
    )
    assert str(error).endswith("Move it with block_mask.to('cuda:1').")
    assert pickle.loads(pickle.dumps(error)).facts["query_device"] == torch.device("cuda", 1)


def test_warnings_are_given_as_instances():
    with pytest.warns(errors.EagerWarning, match=r"without torch\.compile"):
        import warnings

        warnings.warn(errors.EagerWarning(), stacklevel=1)
