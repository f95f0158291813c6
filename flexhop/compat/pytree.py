"""Register our classes with PyTorch's pytrees.

`torch.utils._pytree` is private, but Dynamo, export, checkpointing and vmap look up containers in
it, and there is no public interface. 2.11 to 2.15: `register_pytree_node` and `GetAttrKey` as used
here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils import _pytree

Leaves = tuple[Any, ...]
Context = tuple[Any, ...]


class Serializer(NamedTuple):
    """How torch.export saves and loads a container's context."""

    name: str
    dump: Callable[[Context], Any]  # context -> JSON-serialisable data
    load: Callable[[Any], Context]


def attribute_key(name: str) -> Any:
    """The path element that names attribute `name` of a container, as in error messages."""
    return _pytree.GetAttrKey(name)


def register_container(
    cls: type[Any],
    flatten: Callable[[Any], tuple[Leaves, Context]],
    unflatten: Callable[[Any, Context], Any],
    flatten_with_keys: Callable[[Any], tuple[tuple[tuple[Any, Any], ...], Context]],
    serializer: Serializer,
) -> None:
    """Register `cls` as a pytree node; call once per class."""
    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=serializer.name,
        to_dumpable_context=serializer.dump,
        from_dumpable_context=serializer.load,
        flatten_with_keys_fn=flatten_with_keys,
    )
