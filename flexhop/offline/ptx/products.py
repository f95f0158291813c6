"""Matrices in registers: products of a warpgroup, and loads and stores of 8 x 8 matrices."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from flexhop.offline.ptx.copies import CHUNK, swizzle
from flexhop.offline.ptx.memory import SharedMemory

__all__ = [
    "Shape", "gather_factor", "gather_sum", "gather_warps", "load_matrices", "matrices_of",
    "multiply_warps", "operand", "places", "read_shape", "scatter_sum", "store_matrices",
]  # fmt: skip


class Shape(NamedTuple):
    """Of a product: rows are 64. dtype: of the factors."""

    columns: int
    terms: int
    dtype: str

    @property
    def width(self) -> int:
        """Bytes of a factor's elements."""
        return 4 if self.dtype == "tf32" else 2


_SHAPE = re.compile(r"\.m(?:64|16)n(\d+)k(\d+)(?:\.row\.col)?\.f32\.(\w+)\.(\w+)")


def read_shape(opcode: str) -> Shape:
    """From an opcode such as wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16."""
    match = _SHAPE.search(opcode)
    if match is None or match[3] != match[4] or match[3] not in ("bf16", "f16", "tf32"):
        raise NotImplementedError(f"the emulator has no {opcode}")
    return Shape(int(match[1]), int(match[2]), match[3])


def widen(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Factors as fp32, from their bits."""
    if dtype == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)  # TF32 is cut off


def operand(
    shared: SharedMemory, descriptor: int, size: int, shape: Shape, *, is_flipped: bool
) -> np.ndarray:
    """A factor in shared memory, [size, terms]."""
    addresses = places(descriptor, size, shape, is_flipped=is_flipped)
    if addresses.max() >= shared.size:
        raise IndexError(f"a factor lies behind the end of shared memory: {addresses.max()}")
    width = shape.width
    return widen(shared.view("u32" if width == 4 else "u16")[addresses // width], shape.dtype)


def places(descriptor: int, size: int, shape: Shape, *, is_flipped: bool) -> np.ndarray:
    """Addresses of a factor, [size, terms]; see the matrix descriptor of wgmma in PTX.

    is_flipped: its terms are not neighbours in memory, but its rows are.
    """
    start = (descriptor & 0x3FFF) << 4
    steps = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    mode = {0: 0, 1: 3, 2: 2, 3: 1}[descriptor >> 62 & 3]
    if descriptor >> 49 & 7:
        raise NotImplementedError("the emulator knows no base offset of a matrix")
    width = shape.width
    row, byte = np.arange(size), np.arange(shape.terms) * width
    if is_flipped:
        row, byte = row * width, np.arange(shape.terms)
    offsets = _flipped(row, byte, steps, mode) if is_flipped else _offsets(row, byte, steps, mode)
    return swizzle(start + offsets, mode)


def _offsets(row: np.ndarray, byte: np.ndarray, steps: tuple[int, int], mode: int) -> np.ndarray:
    """Bytes from the start of a factor to those of its rows, before the swizzle.

    Eight rows of 16 bytes are a core matrix. Without a swizzle, `steps` lead from one to the next:
    along a row, and to other rows. With one, 2**mode core matrices lie side by side.
    """
    span = CHUNK << mode
    rows = row // 8 * steps[1] + row % 8 * span
    return rows[:, None] + (byte if mode else byte // CHUNK * steps[0] + byte % CHUNK)


def _flipped(byte: np.ndarray, term: np.ndarray, steps: tuple[int, int], mode: int) -> np.ndarray:
    """Likewise, if rows are neighbours in memory: byte tells where a row is in a term."""
    span, (leading, stride) = CHUNK << mode, steps
    if mode == 0:
        leading, stride = stride, leading
    terms = term // 8 * stride + term % 8 * span
    return (byte // span * leading + byte % span)[:, None] + terms


def gather_sum(rows: np.ndarray) -> np.ndarray:
    """Registers of a sum, [columns / 2, 128 threads], as a matrix [64, columns]."""
    parts = rows.reshape(-1, 2, 2, 4, 8, 4)  # eight columns, half, neighbour; warp, row, pair
    return parts.transpose(3, 1, 4, 0, 5, 2).reshape(64, -1)


def scatter_sum(matrix: np.ndarray) -> np.ndarray:
    """The inverse of gather_sum."""
    parts = matrix.reshape(4, 2, 8, -1, 4, 2)
    return parts.transpose(3, 1, 5, 0, 2, 4).reshape(matrix.shape[1] // 2, 128)


def gather_factor(rows: np.ndarray, shape: Shape) -> np.ndarray:
    """Four registers of a factor, [4, 128 threads] of 32 bits, as a matrix [64, terms]."""
    rows = np.ascontiguousarray(rows)
    if shape.dtype == "tf32":
        parts = rows.reshape(2, 2, 4, 8, 4)  # half of terms, half of rows; warp, row, term
        return widen(parts.transpose(2, 1, 3, 0, 4).reshape(64, 8), "tf32")
    parts = rows.view(np.uint16).reshape(2, 2, 4, 8, 4, 2)
    return widen(parts.transpose(2, 1, 3, 0, 4, 5).reshape(64, 16), shape.dtype)


def gather_warps(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Registers of factors, [number, threads] of 32 bits, as matrices of each warp.

    Four registers are a factor [warps, 16, terms], two [warps, 8, terms].
    """
    width = 2 if dtype == "tf32" else 1
    bits = np.ascontiguousarray(rows).view(np.uint32 if width == 2 else np.uint16)
    # Half of terms, half of rows; warp, row, pair, neighbour.
    parts = bits.reshape(2, len(rows) // 2, -1, 8, 4, 2 // width)
    matrix = parts.transpose(2, 1, 3, 0, 4, 5)
    return widen(np.ascontiguousarray(matrix).reshape(matrix.shape[0], len(rows) * 4, -1), dtype)


def multiply_warps(left: np.ndarray, right: np.ndarray, total: np.ndarray) -> np.ndarray:
    """mma: factors as gather_warps gives them; registers of the sum, [4, threads], before and
    after."""
    # Half and neighbour; warp, row, pair: to warp, half, row, pair, neighbour.
    before = total.reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1)
    product = left @ right.swapaxes(1, 2)
    after = before + product.reshape(before.shape)
    return after.transpose(1, 4, 0, 2, 3).reshape(4, -1)


def load_matrices(
    shared: SharedMemory, addresses: np.ndarray, number: int, is_transposed: bool
) -> np.ndarray:
    """ldmatrix: addresses [threads] of rows; registers [number, threads]."""
    places = _rows_of(addresses, number)
    bits = shared.view("u16")[places // 2 + np.arange(8)]  # [warps, number, 8, 8]
    if is_transposed:
        bits = bits.swapaxes(2, 3)
    words = np.ascontiguousarray(bits).view(np.uint32)  # [warps, number, 8, 4]
    return words.transpose(1, 0, 2, 3).reshape(number, -1)


def matrices_of(registers: np.ndarray, is_transposed: bool) -> np.ndarray:
    """Registers [number, threads] as matrices [warps, number, 8, 8], as stmatrix stores them."""
    number = len(registers)
    words = np.ascontiguousarray(registers.reshape(number, -1, 8, 4).transpose(1, 0, 2, 3))
    bits = words.view(np.uint16)
    return np.ascontiguousarray(bits.swapaxes(2, 3)) if is_transposed else bits


def store_matrices(shared: SharedMemory, addresses: np.ndarray, matrices: np.ndarray) -> None:
    """stmatrix: addresses [threads] of rows; what matrices_of gives."""
    places = _rows_of(addresses, matrices.shape[1])
    shared.view("u16")[places // 2 + np.arange(8)] = matrices


def _rows_of(addresses: np.ndarray, number: int) -> np.ndarray:
    """Addresses of the rows of each warp's matrices, [warps, number, 8, 1]."""
    rows = addresses.reshape(-1, 32)[:, : 8 * number].reshape(-1, number, 8, 1).astype(np.int64)
    if (rows % 16).any():
        raise ValueError("a row of a matrix is not aligned to 16 bytes")
    return rows
