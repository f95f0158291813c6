"""The slot that holds the active context of flexhop.distributed.

Entry points look here; the room that fills the slot is above this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from flexhop.ops.args import AttentionArgs
from flexhop.ops.call import Call

VIEW = "flexhop_view"  # attribute of masks and offsets for which an active context has a view


class Context(Protocol):
    """The interface of a context to the entry points."""

    def run(
        self, args: AttentionArgs, call: Call, block_mask: Any, wants_lse: bool
    ) -> tuple[Tensor, Any, Tensor]:
        """Attention of one rank's queries to all keys; lse only if it is used."""
        ...

    def packed(self, packing: Any, mask_mod: Any) -> tuple[Any, Any]:
        """Row tables and a mask for packed sequences of the whole batch."""
        ...

    def sum_gradient(self, tensor: Tensor) -> Tensor:
        """The tensor, with its gradient summed over the mesh."""
        ...

    def seed(self, dropout: Any, query: Tensor) -> tuple[Tensor, ...]:
        """The dropout operand, the same on all ranks; () without dropout."""
        ...


class Slot:
    """Holds the active context, if there is one.

    attend_dtensors: how entry points handle DTensors; set by the plugin.
    """

    current: Context | None = None
    attend_dtensors: Callable[..., Any]


SLOT = Slot()


def view_of(block_mask: Any) -> Any:
    """The active context's view of a mask, or None.

    FSDP rebuilds the arguments of a layer, including masks, but keeps their tensors. The view is
    therefore also stored on one of them.
    """
    found = getattr(block_mask, VIEW, None)
    return (
        found
        if found is not None
        else getattr(getattr(block_mask, "kv_num_blocks", None), VIEW, None)
    )
