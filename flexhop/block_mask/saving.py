"""A mask_mod as plain data: masks are saved and loaded without running code.

A function is saved by its module and name. A built-in mask is saved by the name of its formula and
its arguments. Files may be untrusted: loading looks up functions in modules that are already
imported, and imports nothing.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from torch import Tensor

from flexhop.block_mask.fields import MaskFields, MaskModKey
from flexhop.errors import UnsupportedFeatureError

_PLAIN = (Tensor, int, float, str, type(None))


class SavedMask(MaskFields):
    """Pickling of BlockMask, which torch.save and copies to other processes use."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The default, except for mask_mod.

        torch.save uses protocol 2. Loading with weights_only=True finds no functions, so mask_mod
        becomes plain data if it can.
        """
        mod = self.mask_mod
        if isinstance(mod, types.FunctionType) and not _is_found(mod):
            raise UnsupportedFeatureError(
                feature=f"Saving a BlockMask whose mask_mod is {mod.__qualname__!r}",
                reason=f"module {mod.__module__!r} has no such name",
                hint="Define it at module level and bind captured values with "
                "functools.partial, or save mask.state_dict() and pass mask_mod to "
                "BlockMask.from_state_dict",
            )
        data = to_data(mod) if protocol == 2 else None
        state = {n: v for n, v in self.__dict__.items() if not n.startswith("_")}
        state["mask_mod"] = mod if data is None else data
        new, arguments, *_ = super().__reduce_ex__(protocol)
        return new, arguments, state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(state["mask_mod"], list):
            self.mask_mod = from_data(state["mask_mod"])


def to_data(value: Any) -> list[Any] | None:
    """A mask_mod as nested lists of names, numbers and tensors; None for anything else."""
    if isinstance(value, types.FunctionType):
        return ["function", value.__module__, value.__qualname__] if _is_found(value) else None
    if not isinstance(value, functools.partial) or value.keywords:
        return None
    if not _is_formula(value.func):
        return None
    parts = [_part_to_data(part) for part in value.args]
    if None in [part[0] for part in parts]:
        return None
    return ["ready", value.func.__module__, value.func.__qualname__, *parts]


def from_data(data: list[Any]) -> Any:
    """Undo to_data.

    Raises:
        UnsupportedFeatureError: a function cannot be found.
    """
    kind, module, name, *parts = data
    found = _find(module, name)
    if not isinstance(found, types.FunctionType):
        raise UnsupportedFeatureError(
            feature=f"Loading a mask whose mask_mod {name!r} cannot be found",
            reason=f"module {module!r} is not imported or does not define it",
            hint=f"Import {module} before loading",
        )
    if kind == "function":
        return found
    if kind != "ready" or not _is_formula(found):
        raise UnsupportedFeatureError(
            feature=f"Loading a mask_mod of kind {kind!r} named {module}.{name}",
            reason="this version of flexhop has no such built-in mask",
            hint="Load it with the version that saved it",
        )
    return functools.partial(found, *(_part_from_data(*part) for part in parts))


def _part_to_data(part: Any) -> list[Any]:
    """[kind, data]; the kind is None if it cannot be saved."""
    if isinstance(part, _PLAIN):
        return ["value", part]
    if isinstance(part, tuple):
        parts = [_part_to_data(inner) for inner in part]
        return [None if None in [inner[0] for inner in parts] else "tuple", parts]
    data = to_data(part)
    return [None if data is None else "mod", data]


def _part_from_data(kind: str, data: Any) -> Any:
    if kind == "tuple":
        return tuple(_part_from_data(*part) for part in data)
    return from_data(data) if kind == "mod" else data


def _is_formula(function: Any) -> bool:
    """Whether it is flexhop's own. An untrusted file must not call other functions."""
    return isinstance(function, types.FunctionType) and (
        function.__module__.partition(".")[0] == __name__.partition(".")[0]
    )


def _is_found(function: types.FunctionType) -> bool:
    return _find(function.__module__, function.__qualname__) is function


def _find(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def dump_context(context: tuple[Any, ...]) -> list[Any]:
    """The data that torch.export saves for a mask besides its tensors.

    Raises:
        UnsupportedFeatureError: mask_mod is neither found by name nor made of plain values.
    """
    lengths, block_size, key, spt, absent = context
    data = to_data(key.mask_mod)
    if data is None or _holds_tensor(data):
        raise UnsupportedFeatureError(
            feature=f"Saving an exported program with the mask_mod {key.mask_mod!r}",
            reason="loading could not find it by name" if data is None else "it holds tensors",
            hint="Define it at module level, with captured tensors as globals",
        )
    return [list(lengths), list(block_size), data, spt, list(absent)]


def load_context(dumped: Any) -> tuple[Any, ...]:
    """Undo dump_context.

    Raises:
        UnsupportedFeatureError: see from_data.
    """
    lengths, block_size, data, spt, absent = dumped
    return tuple(lengths), tuple(block_size), MaskModKey(from_data(data)), spt, tuple(absent)


def _holds_tensor(data: Any) -> bool:
    if isinstance(data, list):
        return any(_holds_tensor(part) for part in data)
    return isinstance(data, Tensor)
