"""The fields of a BlockMask: names, consistency checks, and serialisation.

`MaskFields` holds them and converts them: to a tuple, to a state for torch.save, to pytree leaves.
BlockMask (mask.py) documents their meaning.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

from flexhop.block_mask.lists import block_count, by_memory, lists_to_dense
from flexhop.compat.pytree import attribute_key
from flexhop.errors import BlockMaskFieldError, BlockSizeError
from flexhop.errors.base import shape_text
from flexhop.mods.functions import MaskMod

PAIRS = (
    ("kv_num_blocks", "kv_indices"),
    ("full_kv_num_blocks", "full_kv_indices"),
    ("q_num_blocks", "q_indices"),
    ("full_q_num_blocks", "full_q_indices"),
)
TENSOR_FIELDS = (
    *(name for pair in PAIRS for name in pair),
    "dq_write_order",
    "dq_write_order_full",
    "dq_kv_order",
)
_HAS_ORDERS = "dq_write_order" in inspect.signature(TorchBlockMask.__init__).parameters
PLAIN_FIELDS = ("seq_lengths", "BLOCK_SIZE", "dq_kv_order_spt")


class MaskFields:
    """The data of a BlockMask; see BlockMask for shapes and meaning."""

    seq_lengths: tuple[int, int]
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    q_num_blocks: Tensor | None
    q_indices: Tensor | None
    full_q_num_blocks: Tensor | None
    full_q_indices: Tensor | None
    dq_write_order: Tensor | None
    dq_write_order_full: Tensor | None
    dq_kv_order: Tensor | None
    dq_kv_order_spt: bool | None
    BLOCK_SIZE: tuple[int, int]
    mask_mod: MaskMod

    _TENSOR_ATTRS: ClassVar[list[str]] = list(TENSOR_FIELDS)
    _CONTEXT_ATTRS: ClassVar[list[str]] = [
        "seq_lengths",
        "BLOCK_SIZE",
        "mask_mod",
        "dq_kv_order_spt",
    ]

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, query length, key length)."""
        return (*self.kv_indices.shape[:-2], *self.seq_lengths)

    @property
    def device(self) -> torch.device:
        """The device of the lists."""
        return self.kv_indices.device

    def numel(self) -> int:
        """Number of (query, key) pairs, visited or not."""
        total = 1
        for size in self.shape:
            total *= size
        return total

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """The fields of the installed PyTorch's BlockMask in its order, for its own attention.

        flatten splits lengths and block size. The four dq fields came with 2.13.
        """
        lengths = self.seq_lengths if flatten else (self.seq_lengths,)
        sizes = self.BLOCK_SIZE if flatten else (self.BLOCK_SIZE,)
        names = (*TENSOR_FIELDS, "dq_kv_order_spt") if _HAS_ORDERS else TENSOR_FIELDS[:8]
        return (*lengths, *(getattr(self, name) for name in names), *sizes, self.mask_mod)

    def state_dict(self) -> dict[str, Any]:
        """Everything but mask_mod: tensors and plain numbers, for torch.save.

        A function has no tensors to save. `pickle` and `torch.save` of the mask itself also work
        if mask_mod can be pickled, that is, if it is defined at module level.
        """
        return {name: getattr(self, name) for name in (*TENSOR_FIELDS, *PLAIN_FIELDS)}

    def __repr__(self) -> str:
        """Shapes only: a debugger or a log must not synchronise with the device."""
        lines = [f"    {name}={getattr(self, name)}," for name in PLAIN_FIELDS[:2]]
        for name in TENSOR_FIELDS:
            tensor = getattr(self, name)
            if tensor is not None:
                lines.append(f"    {name}={tuple(tensor.shape)},")
        mod = getattr(self.mask_mod, "__name__", self.mask_mod)
        return "\n".join(["BlockMask(", *lines, f"    mask_mod={mod},", ")"])

    def _flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The tensors that exist, and everything else."""
        pairs, context = self._flatten_with_keys()
        return tuple(leaf for _, leaf in pairs), context

    def _flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        """Like _flatten, each tensor with its name."""
        present = [name for name in TENSOR_FIELDS if getattr(self, name) is not None]
        absent = tuple(name for name in TENSOR_FIELDS if getattr(self, name) is None)
        leaves = tuple((attribute_key(name), getattr(self, name)) for name in present)
        key = MaskModKey(self.mask_mod)
        return leaves, (self.seq_lengths, self.BLOCK_SIZE, key, self.dq_kv_order_spt, absent)

    @classmethod
    def _unflatten(cls, leaves: Sequence[Any], context: tuple[Any, ...]) -> Self:
        """Rebuild from leaves of any kind: trees also carry axes, shapes and None."""
        mask = cls.__new__(cls)
        lengths, block_size, key, spt, absent = context
        plain = {"seq_lengths": lengths, "BLOCK_SIZE": block_size, "dq_kv_order_spt": spt}
        for name, value in plain.items():
            setattr(mask, name, value)
        mask.mask_mod = key.mask_mod
        present = [name for name in TENSOR_FIELDS if name not in absent]
        for name in absent:
            setattr(mask, name, None)
        for name, leaf in zip(present, leaves, strict=True):
            setattr(mask, name, leaf)
        return mask


def dense_blocks(mask: MaskFields) -> tuple[Tensor, Tensor]:
    """Partial blocks and full blocks of a mask, each [B, H, R, C] bool.

    Lists of a compiled function may have room for one more row than exists.
    """
    rows, columns = (block_count(mask.seq_lengths[i], mask.BLOCK_SIZE[i]) for i in (0, 1))
    partial = lists_to_dense(mask.kv_num_blocks, mask.kv_indices, columns)[..., :rows, :]
    if mask.full_kv_num_blocks is None or mask.full_kv_indices is None:
        return partial, torch.zeros_like(partial)
    full = lists_to_dense(mask.full_kv_num_blocks, mask.full_kv_indices, columns)
    return partial, full[..., :rows, :]


def as_int(value: Any) -> Any:
    """An integer of NumPy or a 0-d integer tensor as an int; anything else as it is.

    Symbols stay symbols, and code that is being compiled keeps what it was given.
    """
    if isinstance(value, (int, torch.SymInt)) or torch.compiler.is_compiling():
        return value
    if isinstance(value, Tensor) and (value.dim() > 0 or value.dtype == torch.bool):
        return value  # PyTorch would take it as an index
    try:
        return operator.index(value)
    except TypeError:
        return value


def block_size_pair(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """(queries, keys) of a block, as `as_int` gives them; an int means a square.

    Raises:
        BlockSizeError: not one or two positive ints.
    """
    pair = tuple(block_size) if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(pair) != 2:
        raise BlockSizeError(block_size=block_size, reason="it must be one or two ints")
    pair = as_int(pair[0]), as_int(pair[1])
    if not all(isinstance(size, (int, torch.SymInt)) for size in pair):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BlockSizeError(block_size=block_size, reason="sizes must be ints")
    if pair[0] <= 0 or pair[1] <= 0:
        raise BlockSizeError(block_size=block_size, reason="sizes must be greater than 0")
    return pair[0], pair[1]


def narrow_lists(fields: MaskFields) -> None:
    """Convert lists of int64, as topk and sort return them, to int32. Others stay as they are."""
    for name in (name for pair in PAIRS for name in pair):
        tensor = getattr(fields, name)
        if isinstance(tensor, Tensor) and tensor.dtype == torch.int64:
            setattr(fields, name, by_memory(lambda one: one.to(torch.int32))(tensor))


def check_fields(fields: MaskFields) -> None:
    """Check that the tensors match each other.

    Raises:
        BlockMaskFieldError: names the field.
    """
    for name in PAIRS[0]:
        if getattr(fields, name) is None:
            raise BlockMaskFieldError(field=name, reason="it must be provided")
    for counts, indices in PAIRS:
        _check_pair(fields, counts, indices)
    if fields.dq_write_order_full is not None and fields.dq_write_order is None:
        raise BlockMaskFieldError(
            field="dq_write_order_full", reason="dq_write_order_full requires dq_write_order"
        )
    if not torch.compiler.is_compiling():  # would bind symbolic lengths to symbolic shapes
        _check_rows(fields)


def _check_pair(fields: MaskFields, counts_name: str, indices_name: str) -> None:
    counts, indices = getattr(fields, counts_name), getattr(fields, indices_name)
    if counts is None and indices is None:
        return
    if counts is None or indices is None:
        missing, given = (
            (counts_name, indices_name) if counts is None else (indices_name, counts_name)
        )
        raise BlockMaskFieldError(field=missing, reason=f"{given} was given without it")
    for name, tensor in ((counts_name, counts), (indices_name, indices)):
        if tensor.dtype != torch.int32:
            raise BlockMaskFieldError(
                field=name, reason=f"its dtype must be torch.int32, but is {tensor.dtype}"
            )
        if tensor.device != fields.kv_indices.device:
            raise BlockMaskFieldError(
                field=name, reason=f"it is on {tensor.device}, not on {fields.kv_indices.device}"
            )
    if indices.dim() < 2:
        raise BlockMaskFieldError(field=indices_name, reason="it must have at least 2 dimensions")
    if counts.shape != indices.shape[:-1]:
        raise BlockMaskFieldError(
            field=counts_name,
            reason=f"its shape {shape_text(counts.shape)} must be that of {indices_name}, "
            f"{shape_text(indices.shape)}, without the last dimension",
        )


def _check_rows(fields: MaskFields) -> None:
    """Kernels find a query's row by its position, so every query needs one."""
    rows = fields.kv_indices.shape[-2]
    covered = rows * fields.BLOCK_SIZE[0]
    if covered < fields.seq_lengths[0]:
        raise BlockMaskFieldError(
            field="kv_indices",
            reason=f"its {rows} rows cover {covered} of {fields.seq_lengths[0]} queries",
        )


def is_mask_like(value: object) -> bool:
    """Whether value has the attributes of PyTorch's BlockMask, in every version."""
    needed = ("seq_lengths", "BLOCK_SIZE", "mask_mod", *PAIRS[0])
    return not isinstance(value, type) and all(hasattr(value, name) for name in needed)


class MaskModKey:
    """A mask_mod that compares by code and captured values.

    Pytrees compare their contexts. A closure recreated in each step is the same mask if its code
    and its captured values are the same; tensors compare by identity.
    """

    __slots__ = ("mask_mod",)

    def __init__(self, mask_mod: MaskMod) -> None:
        self.mask_mod = mask_mod

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskModKey) and _same_value(self.mask_mod, other.mask_mod)

    def __hash__(self) -> int:
        code = getattr(self.mask_mod, "__code__", None)
        return hash(type(self.mask_mod) if code is None else code)


def _same_value(a: Any, b: Any) -> bool:
    """Compare callables by parts, tensors by identity, everything else by ==."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, Tensor):
        return False
    if isinstance(a, functools.partial):
        return _same_values(
            (a.func, *a.args, *sorted(a.keywords), *(a.keywords[k] for k in sorted(a.keywords))),
            (b.func, *b.args, *sorted(b.keywords), *(b.keywords[k] for k in sorted(b.keywords))),
        )
    if inspect.isfunction(a):
        return a.__code__ == b.__code__ and _same_values(_captured(a), _captured(b))
    if isinstance(a, (tuple, list)):
        return _same_values(tuple(a), tuple(b))
    if callable(a) and (held := getattr(a, "__dict__", None)) is not None:
        return _same_values((*held, *held.values()), (*vars(b), *vars(b).values()))
    return bool(a == b)


def _same_values(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(map(_same_value, a, b))


def _captured(function: Callable[..., Any]) -> tuple[Any, ...]:
    """The values that a function captured."""
    closure = inspect.getclosurevars(function).nonlocals
    defaults = getattr(function, "__defaults__", None) or ()
    return (*closure.keys(), *closure.values(), *defaults)
