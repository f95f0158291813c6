"""Copies of the tensor memory accelerator: boxes of tensors to and from shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from flexhop.offline.ptx.memory import GlobalMemory, SharedMemory

__all__ = ["CHUNK", "Box", "Leaving", "TensorMap", "load_box", "swizzle"]

# By the element types of a tensor map.
_ELEMENTS: dict[int, Any] = {
    0: np.uint8, 1: np.uint16, 2: np.uint32, 3: np.int32, 4: np.uint64, 5: np.int64,
    6: np.uint16, 7: np.float32, 8: np.float32, 9: np.float64, 10: np.uint16,
}  # fmt: skip
CHUNK = 16  # bytes that a swizzle keeps together


@dataclasses.dataclass
class TensorMap:
    """A tensor map. Of each dimension, the innermost first: sizes, strides in bytes, and the box's
    sizes; the innermost has no stride."""

    address: int = 0
    rank: int = 0
    elements: int = 0
    swizzle: int = 0
    interleave: int = 0
    fill: int = 0
    sizes: dict[int, int] = dataclasses.field(default_factory=dict)
    strides: dict[int, int] = dataclasses.field(default_factory=dict)
    box: dict[int, int] = dataclasses.field(default_factory=dict)
    steps: dict[int, int] = dataclasses.field(default_factory=dict)

    def copy(self) -> TensorMap:
        """One that later changes leave alone."""
        return dataclasses.replace(
            self, sizes=dict(self.sizes), strides=dict(self.strides), box=dict(self.box),
            steps=dict(self.steps),
        )  # fmt: skip

    def put(self, field: str, place: int, value: int) -> None:
        """Replace a field, by its name in tensormap.replace."""
        several = {
            "box_dim": self.box, "global_dim": self.sizes, "global_stride": self.strides,
            "element_stride": self.steps,
        }  # fmt: skip
        if field in several:
            several[field][place] = value
            return
        names = {
            "global_address": "address", "rank": "rank", "elemtype": "elements",
            "swizzle_mode": "swizzle", "interleave_layout": "interleave", "fill_mode": "fill",
        }  # fmt: skip
        setattr(self, names[field], value + 1 if field == "rank" else value)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of elements, whose bits are copied."""
        return np.dtype(_ELEMENTS[self.elements])

    @property
    def bytes(self) -> int:
        """Of a box in shared memory."""
        return int(np.prod([self.box[d] for d in range(self.rank)])) * self.dtype.itemsize

    def check(self) -> None:
        """What the hardware asks for."""
        steps = [self.strides[d] for d in range(self.rank - 1)]
        inner = self.box[0] * self.dtype.itemsize
        spans = {0: inner, 1: 32, 2: 64, 3: 128}
        if self.address % 16 or any(step % 16 for step in steps) or inner % 16:
            raise ValueError(f"a tensor map is not aligned to 16 bytes: {self}")
        if inner > spans[self.swizzle] or max(self.box.values()) > 256 or self.interleave:
            raise ValueError(f"a tensor map has a box that does not fit: {self}")


def swizzle(addresses: np.ndarray, mode: int) -> np.ndarray:
    """Addresses in shared memory after a swizzle of 2**mode chunks; 0: none."""
    if mode == 0:
        return addresses
    return addresses ^ (((addresses >> 7) & ((1 << mode) - 1)) << 4)


class Box(NamedTuple):
    """A copy: a box of a tensor that begins at coordinates, the innermost first, and its place in
    shared memory."""

    tensor: TensorMap
    coordinates: list[int]
    memory: GlobalMemory
    shared: SharedMemory
    address: int

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Offsets in bytes of its rows in the tensor, and which of them exist."""
        tensor = self.tensor
        offsets, exists = np.zeros(1, np.int64), np.ones(1, bool)
        for d in range(tensor.rank - 1, 0, -1):
            places = self.coordinates[d] + np.arange(tensor.box[d])
            inside = (places >= 0) & (places < tensor.sizes[d])
            offsets = (offsets[:, None] + places * tensor.strides[d - 1]).reshape(-1)
            exists = (exists[:, None] & inside).reshape(-1)
        return offsets, exists

    def columns(self) -> slice:
        """Those that exist."""
        start = self.coordinates[0]
        first = max(0, -start)
        return slice(first, max(first, min(self.tensor.box[0], self.tensor.sizes[0] - start)))

    def outside(self, use: str) -> tuple[np.ndarray, np.ndarray]:
        """Global memory, and where the rows and columns that exist are in it."""
        tensor, columns = self.tensor, self.columns()
        size = tensor.dtype.itemsize
        offsets, exists = self.rows()
        starts = tensor.address + offsets[exists] + (self.coordinates[0] + columns.start) * size
        count = columns.stop - columns.start
        if len(starts) == 0 or count == 0:
            return np.empty(0, tensor.dtype), np.empty((len(starts), 0), np.int64)
        owner = self.memory.find(int(starts.min()), int(starts.max()) + count * size, use)
        places = (starts - owner.base) // size
        return owner.view(tensor.dtype), places[:, None] + np.arange(count)

    def chunks(self) -> np.ndarray:
        """Where its chunks are in shared memory."""
        tensor = self.tensor
        if self.address % (CHUNK if tensor.swizzle == 0 else 128):
            raise ValueError(f"a box at {self.address} of shared memory is not aligned")
        places = self.address + np.arange(0, tensor.bytes, CHUNK)
        return swizzle(places, tensor.swizzle) // CHUNK

    def read(self) -> np.ndarray:
        """Its rows and columns that exist, from shared memory."""
        chunks = self.shared.chunks[self.chunks()]
        whole = chunks.reshape(-1).view(self.tensor.dtype).reshape(-1, self.tensor.box[0])
        return whole[self.rows()[1], self.columns()]


def load_box(box: Box) -> None:
    """To shared memory; elements outside of the tensor are 0."""
    box.tensor.check()
    memory, places = box.outside("load")
    exists = box.rows()[1]
    values = np.zeros((len(exists), box.tensor.box[0]), box.tensor.dtype)
    if places.size:
        values[exists, box.columns()] = memory[places]
    box.shared.chunks[box.chunks()] = values.view(np.uint64).reshape(-1, 2)


class Leaving:
    """A box that leaves shared memory: first it is read, and at some time later it arrives.

    Args:
        box: the copy. Elements outside of the tensor are left out.
        adds: whether it is added to what is there.
    """

    def __init__(self, box: Box, *, adds: bool) -> None:
        box.tensor.check()
        if adds and box.tensor.dtype != np.float32:
            raise NotImplementedError("the emulator adds boxes of fp32 alone")
        self._box, self._adds = box, adds
        self._values: np.ndarray | None = None

    def read(self) -> None:
        """Read it, unless it was read."""
        if self._values is None:
            self._values = self._box.read()

    def arrive(self) -> None:
        """Write it to global memory, or add it."""
        memory, places = self._box.outside("atomic" if self._adds else "store")
        self.read()
        if places.size and self._adds:
            memory[places] += self._values
        elif places.size:
            memory[places] = self._values
