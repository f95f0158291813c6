# Triton has no public way to extend its interpreter.
# pyright: reportPrivateUsage=false
"""Triton's interpreter, repaired, and usable without TRITON_INTERPRET.

When imported, Triton decides whether `@triton.jit` compiles or interprets. `interpreting()` swaps
its library's functions while it is active instead, so one process can do both.

Repairs (Triton 3.6 to 3.9): bfloat16 arithmetic, casts and products work on values, not on their
bits; maximum and minimum ignore NaN as the GPU does; library functions and single-instruction
inline assembly have numpy counterparts; TF32 products truncate; the language is patched once and
not per device call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import types
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.compiler import code_generator
from triton.experimental.gluon import language as gluon_language
from triton.language.extra.cuda import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

from flexhop.compat.kernels import triton_runtime
from flexhop.compat.offline.cpu_wrapper import triton_helpers
from flexhop.offline import kept_types
from flexhop.offline.memory import Memory
from flexhop.offline.numpy_functions import assembly_function, library_function
from flexhop.offline.packed_assembly import run_packed
from flexhop.offline.rewriting import rewrite_ast

__all__ = ["interpreting", "launch"]

_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)
_BYTES = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_MISSING = object()
# Imported here because they copy names of the language: not while those are replaced.
_COPIERS = (code_generator, gluon_language)
_LIBRARY = (tl, tl.core, tl.standard, tl.math, tl.random, triton_helpers, triton_runtime)


@contextlib.contextmanager
def interpreting(memory: Memory | None = None) -> Generator[None, None, None]:
    """Make `@triton.jit` functions run in numpy.

    Args:
        memory: watches loads and stores; None: no checks.

    Kernels must be defined inside (`Kernel.module()`), and launched with `launch`. Nothing can be
    compiled inside. Not reentrant, not thread-safe.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, TRITON_INTERPRET="1"))
        stack.enter_context(warnings.catch_warnings())
        # For example an all-NaN row under nanmax, which the GPU handles silently.
        warnings.simplefilter("ignore", RuntimeWarning)
        stack.enter_context(np.errstate(all="ignore"))
        for owner, name, value in _patches():
            stack.callback(_restore, owner, name, vars(owner).get(name, _MISSING))
            setattr(owner, name, value)
        if memory is not None:
            stack.enter_context(memory.watched())
        yield


def launch(function: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
    """Run an interpreted kernel on every program of a grid, one after the other.

    Args:
        function: a function decorated with `@triton.jit` inside `interpreting()`.
        grid: number of programs along up to three axes.
        arguments: by name, CPU tensors for pointers, constants included.
    """
    run = function.rewrite()
    constants = {name for name, note in function.fn.__annotations__.items() if _constexpr(note)}
    values = {
        name: value if name in constants else interpreter._implicit_cvt(value)
        for name, value in arguments.items()
    }
    for name, value in values.items():
        if hasattr(arguments[name], "data_ptr"):
            value.handle.set_attr("argument", name)
    builder = interpreter.interpreter_builder
    x, y, z = (*grid, 1, 1)[:3]
    builder.set_grid_dim(x, y, z)
    for program in np.ndindex(x, y, z):
        builder.set_grid_idx(*program)
        try:
            run(**values)
        except Exception as error:
            error.add_note(f"in program {program} of {function.__name__}, grid {(x, y, z)}")
            raise


def _constexpr(annotation: Any) -> bool:
    return annotation is tl.constexpr or "constexpr" in str(annotation)


@functools.cache
def _interpreted(function: JITFunction[Any]) -> InterpretedFunction[Any]:
    # One object per function: the interpreter recognises reductions by identity.
    return InterpretedFunction(function.fn)


@functools.cache
def _patches() -> tuple[tuple[Any, str, Any], ...]:
    """Everything that differs while kernels are interpreted; found once."""
    with contextlib.ExitStack() as stack:
        found: dict[tuple[int, str], Any] = {}
        for owner, name, value in (*_swapped_functions(), *_repairs(), *kept_types.repairs()):
            missing = not hasattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, value, create=missing))
            found[id(owner), name] = owner
        scope = _patch_language()
        stack.callback(scope.restore)
        found.update({(id(owner), name): owner for owner, name, _ in scope._changes})
        return tuple((owner, name, vars(owner)[name]) for (_, name), owner in found.items())


def _restore(owner: Any, name: str, original: Any) -> None:
    if original is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, original)


def _swapped_functions() -> Iterator[tuple[Any, str, Any]]:
    """The functions that Triton and Inductor wrote in Triton, as interpreted ones."""
    for module in _LIBRARY:
        for name, member in list(vars(module).items()):
            if isinstance(member, JITFunction):
                yield module, name, _interpreted(member)
    for name, member in list(vars(tl.tensor).items()):
        if isinstance(member, JITFunction):
            yield tl.tensor, name, _method(_interpreted(member))
    # Outside of compilation the generic libdevice is a list of empty functions.
    yield triton_helpers, "libdevice", libdevice
    yield InterpretedFunction, "__call__", _call_device_function
    yield interpreter.FunctionRewriter, "rewrite_ast", rewrite_ast


def _method(function: InterpretedFunction[Any]) -> Callable[..., Any]:
    return lambda *args, **keywords: function(*args, **keywords)


def _call_device_function(self: InterpretedFunction[Any], *args: Any, **keywords: Any) -> Any:
    """The original patches the language for every call, and does not take it back."""
    return self.rewrite()(*args, **keywords)


def _patch_language() -> Any:
    """What the interpreter does to `triton.language` for one kernel, done for all of them."""
    visible = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    with mock.patch.object(interpreter, "_patch_attr", _patch_attr):
        scope = interpreter._patch_lang(visible)
        interpreter._patch_builtin(libdevice, interpreter.interpreter_builder, scope)
    # Triton 3.6 converts arrays of one element in a way that numpy 2.5 refuses.
    scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
    scope.set_attr(tl.tensor, "__bool__", _truth)
    return scope


def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    scope.set_attr(owner, name, kept_types.bind(member))


def _truth(tensor: Any) -> bool:
    data = tensor.handle.data
    return bool(data.item()) if data.size == 1 else True


def _repairs() -> Iterator[tuple[Any, str, Any]]:
    # Kernels are compiled without these checks, and each costs more than its operation.
    unchecked = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    yield interpreter.interpreter_builder, "options", unchecked
    yield interpreter, "_get_np_dtype", _numpy_type(interpreter._get_np_dtype)
    builder = InterpreterBuilder
    yield builder, "cast_impl", _cast
    # Missing before Triton 3.9.
    yield builder, "get_bf16", lambda self, value: _narrow(np.array([value], np.float32))
    yield builder, "create_fp_to_fp", _convert_float(builder.create_fp_to_fp)
    yield builder, "create_dot", _dot(builder.create_dot)
    yield builder, "create_splat", _splat
    yield builder, "get_all_ones_value", _all_ones
    for name in ("binary_op", "unary_op", "ternary_op"):
        yield builder, name, _on_values(getattr(builder, name))
    for name in ("create_fma", "create_rsqrt"):
        yield builder, name, _fixed_on_values(getattr(builder, name))
    yield builder, "create_maxnumf", lambda self, a, b: self.binary_op(a, b, np.fmax)
    yield builder, "create_minnumf", lambda self, a, b: self.binary_op(a, b, np.fmin)
    yield builder, "create_atomic_rmw", _atomic(builder.create_atomic_rmw)
    yield builder, "create_extern_elementwise", _call_library
    yield builder, "create_inline_asm", _run_assembly


def _numpy_type(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The original makes its table for every question, of which an operation has several."""
    of_number = functools.cache(original)

    def numpy_type(dtype: Any) -> Any:
        element = dtype.scalar
        return original(element) if isinstance(element, tl.pointer_type) else of_number(element)

    return numpy_type


def _is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _widen(handle: TensorHandle) -> TensorHandle:
    """bfloat16, which the interpreter keeps as 16-bit integers, to float32."""
    if not _is_bf16(handle):
        return handle
    bits = np.asarray(handle.data).astype(np.uint32) << np.uint32(16)
    return TensorHandle(bits.view(np.float32), tl.float32)


def _narrow(data: np.ndarray) -> TensorHandle:
    """Any float to bfloat16, to nearest even as the GPU rounds."""
    values = np.ascontiguousarray(data, dtype=np.float32)
    bits = values.view(np.uint32)
    to_even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + to_even) >> np.uint32(16)).astype(np.uint16)
    rounded = np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(data.shape)
    return TensorHandle(rounded, tl.bfloat16)


def _cast(self: Any, source: TensorHandle, target: Any) -> TensorHandle:
    data = _widen(source).data
    if target.scalar == tl.bfloat16:
        return source if _is_bf16(source) else _narrow(data)
    return TensorHandle(data.astype(interpreter._get_np_dtype(target)), target.scalar)


def _atomic(original: Callable[..., Any]) -> Callable[..., Any]:
    """An atomic operation on values of any strides; the interpreter takes them for contiguous."""

    def atomic(
        builder: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        shape = pointers.data.shape
        plain = (
            TensorHandle(np.ascontiguousarray(np.broadcast_to(given.data, shape)), given.dtype)
            for given in (value, mask)
        )
        return original(builder, operation, pointers, *plain, *rest)

    return atomic


def _convert_float(original: Callable[..., Any]) -> Callable[..., Any]:
    def convert(self: Any, source: TensorHandle, target: Any, rounding: Any) -> TensorHandle:
        if source.dtype.scalar in _BYTES and target.scalar.primitive_bitwidth >= 16:
            # The original flushes what is subnormal.
            bits = torch.from_numpy(np.ascontiguousarray(source.data)).view(torch.uint8)
            numbers = bits.view(_BYTES[source.dtype.scalar]).float().numpy()
            return _cast(self, TensorHandle(numbers, tl.float32), target)
        wide = source.dtype.scalar.primitive_bitwidth >= 16
        towards_zero = rounding == interpreter._ir.ROUNDING_MODE.RTZ
        if wide and target.scalar.primitive_bitwidth >= 16 and not towards_zero:
            return _cast(self, source, target)
        return original(self, source, target, rounding)

    return convert


def _dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def dot(
        self: Any, a: TensorHandle, b: TensorHandle, c: TensorHandle, precision: Any, *rest: Any
    ) -> Any:
        if a.dtype.scalar.primitive_bitwidth == 8 and a.dtype.scalar.is_floating():
            return original(self, a, b, c, precision, *rest)
        # A GPU adds exact fp32 products in the order of the columns, in every tile alike: backward
        # finds the scores of forward. BLAS has an order per shape; fp64 makes it immaterial.
        dtype = np.float64 if a.dtype.scalar == tl.float32 else c.data.dtype
        # Casting first lets numpy use BLAS.
        left, right = (_widen(x).data for x in (a, b))
        if a.dtype.scalar == tl.float32 and precision == interpreter._ir.INPUT_PRECISION.TF32:
            left, right = _truncate(left), _truncate(right)
        left, right = left.astype(dtype, copy=False), right.astype(dtype, copy=False)
        return TensorHandle(
            (left @ right + c.data).astype(c.data.dtype, copy=False), c.dtype.scalar
        )

    return dot


def _all_ones(self: Any, type: Any) -> TensorHandle:
    """A number of ones. Triton asks NumPy for -1, which unsigned types refuse."""
    zero: Any = np.zeros(1, interpreter._get_np_dtype(type))
    return TensorHandle(~zero, type.scalar)


def _splat(self: Any, result: Any, number: TensorHandle) -> TensorHandle:
    """A block of one number. Triton takes the truth of a comparison of floats for a float."""
    value = number.data.reshape(-1)[0]
    return TensorHandle(np.full(result.shape, value, number.data.dtype), number.dtype.scalar)


def _truncate(data: np.ndarray) -> np.ndarray:
    """What tensor cores read of fp32 operands: TF32, with the bits that it lacks cut off."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def _on_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """`binary_op(self, *handles, function)` and its kin on the values of bfloat16 operands."""

    def operate(self: Any, *args: Any) -> TensorHandle:
        *handles, function = args
        if function in _BITWISE or function is np.where or not any(map(_is_bf16, handles)):
            return original(self, *args)
        result = original(self, *map(_widen, handles), function)
        if result.data.dtype == np.bool_:
            return result
        return _narrow(result.data)

    return operate


def _fixed_on_values(original: Callable[..., Any]) -> Callable[..., Any]:
    def operate(self: Any, *handles: TensorHandle) -> TensorHandle:
        if not any(map(_is_bf16, handles)):
            return original(self, *handles)
        return _narrow(original(self, *map(_widen, handles)).data)

    return operate


def _call_library(self: Any, *call: Any) -> TensorHandle:
    _library, _path, symbol, args, result, *_ = call
    return _as_handle(library_function(symbol)(*(a.data for a in args)), result)


class _Outputs:
    """What the compiler's builder returns for inline assembly."""

    def __init__(self, handles: list[TensorHandle]) -> None:
        self.handles = handles

    def get_result(self, index: int) -> TensorHandle:
        return self.handles[index]


def _run_assembly(self: Any, *call: Any) -> _Outputs:
    text, _constraints, args, results, _is_pure, pack = call
    if "ld.global" in text:
        return _Outputs([_read_memory(self, args[0], results[0])])
    if pack > 1 or text.count(";") > 1:
        types = [np.dtype(interpreter._get_np_dtype(result)) for result in results]
        found = run_packed(text, pack, [a.data for a in args], types)
        return _Outputs([_as_handle(v, r) for v, r in zip(found, results, strict=True)])
    value = assembly_function(text)(*(_widen(a).data for a in args))
    return _Outputs([_as_handle(value, result) for result in results])


def _read_memory(builder: Any, pointers: TensorHandle, result: Any) -> TensorHandle:
    """Numbers in memory; those of 16 bits as the integers of a register."""
    found = builder.create_load(pointers, None, None, False).data
    if found.dtype.itemsize == 2:
        found = found.view(np.uint16)
    return TensorHandle(found.astype(interpreter._get_np_dtype(result.scalar)), result.scalar)


def _as_handle(value: np.ndarray, result: Any) -> TensorHandle:
    scalar = result.scalar
    if scalar == tl.bfloat16:
        return _narrow(value)
    return TensorHandle(np.asarray(value).astype(interpreter._get_np_dtype(scalar)), scalar)
