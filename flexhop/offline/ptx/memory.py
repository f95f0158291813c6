"""Memory of a GPU: global memory is that of tensors on the CPU, whose bounds are checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from flexhop.offline.memory import OutOfBoundsError
from flexhop.offline.ptx.state import DTYPES

__all__ = ["GlobalMemory", "SharedMemory", "bytes_of", "combine"]


@dataclasses.dataclass
class _Range:
    """Bytes of one argument. base: address of data[0]; start, end: what may be accessed."""

    name: str
    base: int
    start: int
    end: int
    data: np.ndarray
    element: int

    def view(self, dtype: np.dtype[Any]) -> np.ndarray:
        size = dtype.itemsize
        return self.data[: len(self.data) // size * size].view(dtype)


class GlobalMemory:
    """Arguments of a kernel by address.

    Args:
        kernel: its name, for errors.
        tensors: by name.
    """

    def __init__(self, kernel: str, tensors: dict[str, torch.Tensor]) -> None:
        self._kernel = kernel
        self._ranges = [_range(name, tensor) for name, tensor in tensors.items()]
        self._last = self._ranges[:1]
        self.program: tuple[int, ...] = ()

    def find(self, low: int, high: int, operation: str = "load") -> _Range:
        """The argument that holds the bytes from low to high - 1."""
        for one in (*self._last, *self._ranges):
            if one.start <= low and high <= one.end:
                self._last = [one]
                return one
        near = min(self._ranges, key=lambda one: min(abs(low - one.start), abs(high - one.end)))
        stray = low if low < near.start else high
        raise OutOfBoundsError(
            kernel=self._kernel, argument=near.name, operation=operation,
            offset=(stray - near.start) // near.element,
            elements=(near.end - near.start) // near.element, program=self.program,
        )  # fmt: skip

    def load(self, addresses: np.ndarray, kind: str, operation: str = "load") -> np.ndarray:
        """Numbers at addresses [threads]."""
        view, places = self._places(addresses, np.dtype(DTYPES[kind]), operation)
        return view[places]

    def store(self, addresses: np.ndarray, kind: str, values: Any) -> None:
        """If threads store at one address, the last one's number stays."""
        view, places = self._places(addresses, np.dtype(DTYPES[kind]), "store")
        _put(view, places, values)

    def _places(
        self, addresses: np.ndarray, dtype: np.dtype[Any], operation: str
    ) -> tuple[np.ndarray, np.ndarray]:
        addresses = np.atleast_1d(addresses).astype(np.int64)
        low, high = int(addresses.min()), int(addresses.max()) + dtype.itemsize
        owner = self.find(low, high, operation)
        places = addresses - owner.base
        if (places % dtype.itemsize).any():
            raise ValueError(f"{self._kernel}: a misaligned {operation} of {owner.name}")
        return owner.view(dtype), places // dtype.itemsize


def _range(name: str, tensor: torch.Tensor) -> _Range:
    storage = tensor.untyped_storage()
    data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    start = tensor.data_ptr()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = start + (last + 1) * tensor.element_size() if tensor.numel() else start
    return _Range(name, storage.data_ptr(), start, end, data, tensor.element_size())


class SharedMemory:
    """Shared memory of one program.

    Args:
        size: in bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.data = np.empty(-(-size // 1024) * 1024, np.uint8)
        self._views: dict[np.dtype[Any], np.ndarray] = {
            np.dtype(dtype): self.data.view(dtype)
            for dtype in (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.float32,
                          np.uint64, np.int64, np.float64, np.float16)
        }  # fmt: skip
        self.chunks = self.data.view(np.uint64).reshape(-1, 2)
        self.clear()

    def clear(self) -> None:
        """Fill it with NaN of 16 and of 32 bits."""
        self.data[:] = 255

    def view(self, kind: str) -> np.ndarray:
        """All of it as numbers of a type."""
        return self._views[np.dtype(DTYPES[kind])]

    def load(self, addresses: np.ndarray, kind: str) -> np.ndarray:
        """Numbers at addresses [threads]."""
        return self.view(kind)[self._places(addresses, kind)]

    def store(self, addresses: np.ndarray, kind: str, values: Any) -> None:
        """If threads store at one address, the last one's number stays."""
        _put(self.view(kind), self._places(addresses, kind), values)

    def _places(self, addresses: np.ndarray, kind: str) -> np.ndarray:
        size = np.dtype(DTYPES[kind]).itemsize
        places = np.atleast_1d(addresses).astype(np.int64)
        if places.max() + size > self.size or (places % size).any():
            raise IndexError(f"shared memory has {self.size} bytes; accessed: {places.max()}")
        return places // size


def _put(view: np.ndarray, places: np.ndarray, values: Any) -> None:
    """Store numbers at places; one place may be that of all."""
    view[np.broadcast_to(places, np.broadcast_shapes(places.shape, np.shape(values)))] = values


def bytes_of(addresses: np.ndarray, size: int) -> np.ndarray:
    """Addresses of all bytes of what begins at addresses."""
    return (addresses.reshape(-1, 1).astype(np.int64) + np.arange(size)).reshape(-1)


_ATOMICS: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "exch": lambda old, new: new,
    "cas": lambda old, expected, new: new if old == expected else old,
}  # fmt: skip


def combine(old: Any, operation: str, values: Sequence[Any]) -> Any:
    """What an atomic operation leaves."""
    return _ATOMICS[operation](old, *values)
