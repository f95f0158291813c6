# Triton has no public way to extend its interpreter.
# pyright: reportPrivateUsage=false
"""Watch the memory accesses of interpreted kernels: out-of-bounds accesses, and uninitialised
values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorDescHandle, TensorHandle

from flexhop.errors import FlexhopError

__all__ = ["Memory", "OutOfBoundsError"]

# Operations that return a pointer into the argument of their first operand.
_KEEP_ARGUMENT = (
    "create_addptr",
    "create_bitcast",
    "create_broadcast",
    "create_expand_dims",
    "create_reshape",
    "create_trans",
)


class OutOfBoundsError(FlexhopError, IndexError):
    """An active lane accessed memory outside its argument's tensor.

    Facts: the kernel, the pointer argument of the address, the operation ("load", "store",
    "atomic"), the offset of one such lane in elements from the argument's first element, the
    argument's number of elements, and the program's indices in the grid.
    """

    message = (
        "{kernel}: {operation} of {argument} at element {offset}, but it has {elements} elements "
        "(program {program})."
    )


class Memory:
    """What to watch.

    Args:
        poison: fill new buffers, gaps between rows included, and lanes that a masked load without
            `other` leaves undefined, with NaN (integers in buffers: a value far out of range).
        check_bounds: raise OutOfBoundsError if an active lane leaves its argument.
    """

    def __init__(self, poison: bool = False, check_bounds: bool = False) -> None:
        self.poison = poison
        self.check_bounds = check_bounds
        self._kernel = ""
        self._ranges: dict[str, tuple[int, int]] = {}

    def allocate(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A new buffer, poisoned if requested, also between its elements."""
        buffer = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype)
        if self.poison and dtype != torch.bool:
            everything = buffer.new_empty(0).set_(buffer.untyped_storage())
            everything.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max // 2)
        return buffer

    def enter_kernel(self, name: str, arguments: dict[str, Any]) -> None:
        """Record which memory the next kernel may access."""
        tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
        self._kernel = name
        self._ranges = {argument: _extent(tensor) for argument, tensor in tensors.items()}

    @contextlib.contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Patch the interpreter's memory accesses."""
        builder = InterpreterBuilder
        patches: dict[str, Callable[..., Any]] = {}
        if self.poison or self.check_bounds:
            patches["create_masked_load"] = self._load(builder.create_masked_load)
        if self.check_bounds:
            patches["create_masked_store"] = self._store(builder.create_masked_store)
            patches["create_atomic_rmw"] = self._atomic(builder.create_atomic_rmw)
            for name in _KEEP_ARGUMENT:
                patches[name] = _keep_argument(getattr(builder, name), position=0)
            patches["create_splat"] = _keep_argument(builder.create_splat, position=1)
        with contextlib.ExitStack() as stack:
            for name, function in patches.items():
                stack.enter_context(mock.patch.object(builder, name, function))
            if self.check_bounds:
                original = TensorDescHandle.materialize_pointers
                stack.enter_context(
                    mock.patch.object(
                        TensorDescHandle, "materialize_pointers", _described(original)
                    )
                )
            yield

    def _load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any):
            on = _array(mask)
            if self.check_bounds:
                self._check("load", pointers, on)
            if self.poison and other is None and not on.all():
                other = _poisoned(pointers)
            return original(builder, pointers, mask, other, *rest, **named)

        return load

    def _store(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._check("store", pointers, _array(mask))
            return original(builder, pointers, value, mask, *rest)

        return store

    def _atomic(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def atomic(
            builder: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any
        ) -> Any:
            self._check("atomic", pointers, _array(mask))
            return original(builder, operation, pointers, value, mask, *rest)

        return atomic

    def _check(self, operation: str, pointers: TensorHandle, on: np.ndarray) -> None:
        addresses = pointers.data
        if not on.all():
            addresses = addresses[np.broadcast_to(on, addresses.shape)]
        if addresses.size == 0:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        lowest, highest = int(addresses.min()), int(addresses.max())
        argument = pointers.attr.get("argument") or self._owner(lowest)
        start, end = self._ranges.get(argument, (0, 0))
        if lowest >= start and highest + size <= end:
            return
        stray = lowest if lowest < start else highest
        # Addresses wrap around: one before the argument may appear far beyond it.
        offset = (stray - start + 2**63) % 2**64 - 2**63
        raise OutOfBoundsError(
            kernel=self._kernel,
            argument=argument,
            operation=operation,
            offset=offset // size,
            elements=(end - start) // size,
            program=interpreter.interpreter_builder.grid_idx,
        )

    def _owner(self, address: int) -> str:
        """The argument that contains an address, for a pointer whose origin was lost on the
        way."""
        for argument, (start, end) in self._ranges.items():
            if start <= address < end:
                return argument
        return "a pointer of unknown origin"


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of a tensor's first element, and the one after its last."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _array(mask: Any) -> np.ndarray:
    return np.asarray(mask.data if isinstance(mask, TensorHandle) else mask)


def _poisoned(pointers: TensorHandle) -> TensorHandle | None:
    element = pointers.get_element_ty()
    if element == tl.bfloat16:
        return TensorHandle(np.full(pointers.data.shape, 0x7FC0, np.uint16), element)
    if element not in (tl.float16, tl.float32, tl.float64):
        return None
    dtype = interpreter._get_np_dtype(element)
    return TensorHandle(np.full(pointers.data.shape, np.nan, dtype), element)


def _keep_argument(original: Callable[..., Any], position: int) -> Callable[..., Any]:
    def operate(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        argument = args[position].attr.get("argument")
        if argument is not None:
            result.attr["argument"] = argument
        return result

    return operate


def _described(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pointers from a tensor descriptor belong to the descriptor's base."""

    def materialize(self: Any, *args: Any) -> Any:
        pointers, mask = original(self, *args)
        pointers.attr.update(self.base.attr)
        return pointers, mask

    return materialize
