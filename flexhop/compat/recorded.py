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
from torch.utils._python_dispatch import TorchDispatchMode

from flexhop.compat.autocast import wanted_dtype
from flexhop.compat.stand_in import is_plain
from flexhop.compat.wrapped import is_transformed

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
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


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
    """values[results] = operator(*args, **kwargs); values[last] are not needed afterwards."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]
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
        self.steps, self._results = _with_last_uses(steps, results), results
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
        for operator, args, kwargs, results, last in self.steps:
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


class Recorder(TorchDispatchMode):
    """While it is active, notes the operators that depend on `inputs`."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._inputs = len(inputs)
        self._known: dict[int, tuple[Any, _Slot | None]] = {}
        self._steps: list[_Step] = []
        self._versions: list[tuple[Tensor, int]] = []  # of constants that a step reads
        self._count = 0
        self._is_valid = True
        for tensor in inputs:
            self._note(tensor, is_constant=False)

    def program(self, results: Sequence[Tensor]) -> Program | None:
        """The program that computes `results`, if one can be repeated."""
        slots = tuple(self._place(result) for result in results)
        if not self._is_valid or any(t._version != version for t, version in self._versions):
            return None
        steps, slots = _without_repeats(self._steps, slots)
        return Program(self._inputs, _needed(steps, slots), slots)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_valid:
            return func(*args, **kwargs)
        places = _mapped((tuple(args), kwargs), self._place_of(func))
        result = func(*args, **kwargs)
        is_constant = not any(isinstance(p, _Slot) for p in _flat(places))
        is_constant = is_constant or func.overloadpacket in _OF_SHAPE
        if is_constant and torch.Tag.nondeterministic_seeded not in func.tags:
            self._note_all(result, is_constant=True)
        elif self._can_repeat(func, args, result):
            versions = [(t, t._version) for t in _tensors(places)]
            self._versions += versions
            slots = self._note_all(result, is_constant=False)
            self._steps.append(_Step(func, *places, slots))
        else:
            self._is_valid = False
        return result

    def _can_repeat(self, func: Any, args: Any, result: Any) -> bool:
        """Whether an operator gives a tensor of the same shape and neither reads nor writes."""
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            return False
        if func in _INDEXING:  # tagged for bool indices
            if any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1])):
                return False
        elif any(tag in func.tags for tag in _READS):
            return False
        results = result if isinstance(result, (tuple, list)) else (result,)
        return all(isinstance(r, Tensor) for r in results)

    def _place_of(self, func: Any) -> Any:
        """A function that replaces a tensor by its slot; constants stay."""

        def place(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            known = self._find(value)
            if known is None:
                if func is not _LIFTED:  # a tensor from elsewhere, of unknown origin
                    self._is_valid = False
                return value
            return value if known[1] is None else known[1]

        return place

    def _place(self, tensor: Tensor) -> Any:
        known = self._find(tensor)
        if known is None:
            self._is_valid = False
        return tensor if known is None or known[1] is None else known[1]

    def _find(self, tensor: Tensor) -> tuple[Any, _Slot | None] | None:
        known = self._known.get(id(tensor))
        return known if known is not None and known[0]() is tensor else None

    def _note_all(self, result: Any, *, is_constant: bool) -> tuple[int, ...]:
        return tuple(self._note(t, is_constant=is_constant) for t in _tensors(result))

    def _note(self, tensor: Tensor, *, is_constant: bool) -> int:
        slot = None if is_constant else _Slot(self._count)
        self._known[id(tensor)] = (weakref.ref(tensor), slot)
        self._count += not is_constant
        return -1 if slot is None else slot


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


def _without_repeats(
    steps: list[_Step], results: tuple[Any, ...]
) -> tuple[list[_Step], tuple[Any, ...]]:
    """Steps that equal an earlier one take its results."""
    same: dict[int, _Slot] = {}
    known: dict[Any, _Step] = {}
    kept: list[_Step] = []

    def place(value: Any) -> Any:
        return same.get(value, value) if isinstance(value, _Slot) else value

    made: dict[int, _Step] = {}
    for step in steps:
        step = step._replace(args=_mapped(step.args, place), kwargs=_mapped(step.kwargs, place))
        equal = _equal(step, made)
        if equal is not None:
            same[step.results[0]] = equal
            continue
        made |= dict.fromkeys(step.results, step)
        key = (step.operator, _key(step.args), _key(step.kwargs))
        if key in known:
            pairs = zip(step.results, known[key].results, strict=True)
            same |= {old: _Slot(new) for old, new in pairs}
        else:
            known[key] = step
            kept.append(step)
    return kept, _mapped(results, place)


def _equal(step: _Step, made: dict[int, _Step]) -> _Slot | None:
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
    if isinstance(value, Tensor):
        return "tensor", id(value)
    if isinstance(value, (tuple, list)):
        return type(value), *map(_key, value)
    if isinstance(value, dict):
        return tuple((name, _key(v)) for name, v in value.items())
    return type(value), value.hex() if isinstance(value, float) else value


def _needed(steps: list[_Step], results: tuple[Any, ...]) -> list[_Step]:
    """The steps whose results are used."""
    used = {slot for slot in results if isinstance(slot, _Slot)}
    kept: list[_Step] = []
    for step in reversed(steps):
        if used & set(step.results):
            used |= {a for a in _flat((step.args, step.kwargs)) if isinstance(a, _Slot)}
            kept.insert(0, step)
    return kept


def _with_last_uses(steps: list[_Step], results: tuple[Any, ...]) -> list[_Step]:
    """Steps with the slots that no later one reads."""
    later = {slot for slot in results if isinstance(slot, _Slot)}
    found: list[_Step] = []
    for step in reversed(steps):
        read = {a for a in _flat((step.args, step.kwargs)) if isinstance(a, _Slot)}
        found.insert(0, step._replace(last=tuple((read | set(step.results)) - later)))
        later |= read | set(step.results)
    return found
