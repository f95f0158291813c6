"""Record the operators that a function calls, to repeat them on other tensors.

Only operators that depend on its inputs are kept; the results of all others are constants. torch
2.11 to 2.15.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _TorchDispatchModeKey
from torch.utils import _device

from flexhop.compat.modes import DispatchMode
from flexhop.compat.mods.stand_in import is_plain
from flexhop.compat.mods.wrapped import is_transformed
from flexhop.compat.operators.autograd import wanted_dtype

__all__ = ["Program", "Recorder", "can_record", "copies", "surroundings"]

aten = torch.ops.aten
_MODES = (
    _TorchDispatchModeKey.PROXY,
    _TorchDispatchModeKey.FAKE,
    _TorchDispatchModeKey.FUNCTIONAL,
)
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_INDEXING = (aten.index.Tensor, aten._unsafe_index.Tensor)
_OF_SHAPE = frozenset([
    aten.full_like, aten.zeros_like, aten.ones_like, aten.empty_like, aten.new_full,
    aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_empty_strided,
])  # fmt: skip
_LIFTED = aten.lift_fresh.default


def can_record(device: torch.device, tensors: Sequence[Tensor]) -> bool:
    """Whether operators run now, on ordinary tensors, and outside of CUDA graphs."""
    if is_transformed() or not all(map(is_plain, tensors)):
        return False
    if any(torch._C._get_dispatch_mode(key) is not None for key in _MODES):
        return False
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return not torch.cuda.is_current_stream_capturing()


def surroundings(device: torch.device) -> tuple[Any, ...]:
    """Everything outside of a function that its operators depend on.

    The stream is part of it: constants may be read there without waiting for another one.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    place = None if stream is None else (stream.device_index, stream.stream_id)
    casts = tuple(map(wanted_dtype, (device.type, "cpu")))
    return place, torch.get_default_dtype(), _device.CURRENT_DEVICE, casts


def copies(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Integer tensors in memory of their own, by one kernel."""
    return tuple(torch._foreach_add(tensors, 0))


class _Slot(int):
    """The number of a value of a program, in place of a tensor among operands."""


class _Step(NamedTuple):
    """values[results] = operator(*args, **kwargs); values[last] are not needed afterwards.

    reads: the slots among its operands.
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    reads: tuple[int, ...]
    last: tuple[int, ...] = ()


class Program:
    """Operators in order, as a function of its inputs.

    Args:
        inputs: how many inputs it has.
        steps: its operators.
        results: slots, and tensors that do not depend on the inputs.
    """

    def __init__(self, inputs: int, steps: list[_Step], results: tuple[Any, ...]) -> None:
        self._count = 1 + max([inputs - 1, *(slot for step in steps for slot in step.results)])
        self.steps, self._results = steps, results
        self._constants: list[int] = []  # of results, those to copy

    def constant_bytes(self) -> int:
        """Memory that its constants keep alive."""
        held = [t for step in self.steps for t in _tensors((step.args, step.kwargs))]
        storages = {t.data_ptr(): t.untyped_storage().nbytes() for t in held if t.numel()}
        for tensor in _tensors(self._results):
            storages[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(storages.values())

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run it."""
        values: list[Any] = [*inputs, *[None] * (self._count - len(inputs))]
        for operator, args, kwargs, results, _, last in self.steps:
            found = operator(
                *[_filled(a, values) for a in args],
                **{name: _filled(a, values) for name, a in kwargs.items()},
            )
            if len(results) == 1 and isinstance(found, Tensor):
                values[results[0]] = found
            else:
                for slot, value in zip(results, found, strict=True):
                    values[slot] = value
            for slot in last:
                values[slot] = None
        return self._with_copies([_filled(result, values) for result in self._results])

    def keep(self, owned: int) -> None:
        """From now on, copy the constants among the first results, which callers may change."""
        self._constants = [
            n for n, result in enumerate(self._results[:owned]) if isinstance(result, Tensor)
        ]
        self._results = self._with_copies(list(self._results))

    def _with_copies(self, results: list[Any]) -> tuple[Any, ...]:
        made = copies([results[n] for n in self._constants]) if self._constants else ()
        for n, tensor in zip(self._constants, made, strict=True):
            results[n] = tensor
        return tuple(results)


class Recorder(DispatchMode):
    """While it is active, notes the operators that depend on `inputs`."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._inputs = len(inputs)
        self._known: dict[int, tuple[Any, _Slot | None]] = {}
        self._steps: list[_Step] = []
        self._made: dict[int, _Step] = {}  # by slot
        self._equal: dict[Any, _Step] = {}
        self._versions: list[tuple[Tensor, int]] = []  # of constants that a step reads
        self._count = len(inputs)  # slots
        self._is_valid = True
        for number, tensor in enumerate(inputs):
            self._note(tensor, _Slot(number))

    def program(self, results: Sequence[Tensor]) -> Program | None:
        """The program that computes `results`, if one can be repeated."""
        slots = tuple(self._place(result) for result in results)
        if not self._is_valid or any(t._version != version for t, version in self._versions):
            return None
        return Program(self._inputs, _needed(self._steps, slots), slots)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_valid:
            return func(*args, **kwargs)
        tensors = _tensors_of(args, kwargs)
        slots = {id(t): slot for t in tensors if (slot := self._place(t, func)) is not t}
        result = func(*args, **kwargs)
        traits = _TRAITS.get(id(func)) or _traits_of(func)
        if (not slots or traits.is_of_shape) and not traits.is_random:
            for tensor in (result,) if isinstance(result, Tensor) else _tensors(result):
                self._note(tensor, None)
        elif traits.is_pure and _can_repeat(func, args, result):
            self._versions += [(t, t._version) for t in tensors if id(t) not in slots]
            places = _mapped((tuple(args), kwargs), lambda value: slots.get(id(value), value))
            self._add(_Step(func, *places, (), tuple(slots.values())), _tensors(result))
        else:
            self._is_valid = False
        return result

    def _add(self, step: _Step, results: list[Tensor]) -> None:
        """Note an operator; one that equals an earlier one takes its results."""
        same = _copied(step, self._made)
        key = (id(step.operator), _key(step.args), _key(step.kwargs) if step.kwargs else None)
        if same is not None:
            known = (same,)
        elif key in self._equal:
            known = self._equal[key].results
        else:
            known = tuple(_Slot(self._count + n) for n in range(len(results)))
            step = self._equal[key] = step._replace(results=known)
            self._steps.append(step)
            self._made |= dict.fromkeys(known, step)
            self._count += len(known)
        for tensor, slot in zip(results, known, strict=True):
            self._note(tensor, slot)

    def _place(self, tensor: Tensor, user: Any = None) -> Any:
        """The slot of a tensor; a constant stays."""
        origin, slot = self._known.get(id(tensor), (None, None))
        if origin is None or origin() is not tensor:
            # A tensor from elsewhere, of unknown origin.
            self._is_valid = self._is_valid and user is _LIFTED
            return tensor
        return tensor if slot is None else slot

    def _note(self, tensor: Tensor, slot: Any) -> None:
        """Where a tensor comes from; slot None: it is a constant."""
        self._known[id(tensor)] = (weakref.ref(tensor), slot)


class _Traits(NamedTuple):
    """What an operator does.

    is_of_shape: its result depends on no value. is_pure: it draws no numbers, writes nothing and
    reads no value on the host.
    """

    operator: Any
    is_of_shape: bool
    is_random: bool
    is_pure: bool


_TRAITS: dict[int, _Traits] = {}  # by identity, because hashing an operator takes long


def _traits_of(operator: Any) -> _Traits:
    is_random = torch.Tag.nondeterministic_seeded in operator.tags
    # Indexing is tagged for bool indices.
    is_read = operator not in _INDEXING and any(tag in operator.tags for tag in _READS)
    is_pure = not (is_random or is_read or operator._schema.is_mutable)
    found = _Traits(operator, operator.overloadpacket in _OF_SHAPE, is_random, is_pure)
    _TRAITS[id(operator)] = found
    return found


def _can_repeat(operator: Any, args: Any, result: Any) -> bool:
    """Whether a pure operator gives tensors whose shapes are those of its operands' shapes."""
    if operator in _INDEXING:
        if any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1])):
            return False
    results = result if isinstance(result, (tuple, list)) else (result,)
    return all(isinstance(r, Tensor) for r in results)


def _tensors_of(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The operands of an operator that are tensors, alone or in lists."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _filled(value: Any, values: list[Any]) -> Any:
    kind = type(value)
    if kind is _Slot:
        return values[value]
    return [_filled(v, values) for v in value] if kind is list else value


def _mapped(value: Any, place: Callable[[Any], Any]) -> Any:
    """Operands with `place` applied to each that is no collection."""
    if isinstance(value, (tuple, list)):
        found = [_mapped(v, place) for v in value]
        return tuple(found) if isinstance(value, tuple) else found
    if isinstance(value, dict):
        return {name: _mapped(v, place) for name, v in value.items()}
    return place(value)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(tuple(value.values()))
    else:
        yield value


def _tensors(value: Any) -> list[Tensor]:
    return [item for item in _flat(value) if isinstance(item, Tensor)]


def _copied(step: _Step, made: dict[int, _Step]) -> Any:
    """The slot that an operator only repeats: of an alias, or of a negation of a negation."""
    source = step.args[0] if step.args else None
    if not isinstance(source, _Slot):
        return None
    if step.operator is aten.alias.default:
        return source
    before = made.get(source)
    if step.operator is aten.bitwise_not.default and before is not None:
        return before.args[0] if before.operator is step.operator else None
    return None


def _key(value: Any) -> Any:
    kind = type(value)
    if kind in (int, _Slot):
        return kind, value
    if isinstance(value, Tensor):
        return "tensor", id(value)
    if kind in (tuple, list):
        return kind, *map(_key, value)
    if kind is dict:
        return tuple([(name, _key(v)) for name, v in value.items()])
    return kind, value.hex() if kind is float else value


def _needed(steps: list[_Step], results: tuple[Any, ...]) -> list[_Step]:
    """The steps whose results are used, each with the slots that no later one reads."""
    later = {slot for slot in results if isinstance(slot, _Slot)}
    kept: list[_Step] = []
    for step in reversed(steps):
        if not later.isdisjoint(step.results):
            kept.append(step._replace(last=tuple({*step.reads, *step.results} - later)))
            later.update(step.reads, step.results)
    return kept[::-1]
