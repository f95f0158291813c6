"""The slot in which a context of flexhop.distributed stands while it is entered.

The front door looks here; the room that fills the slot lies above it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from flexhop.ops.args import AttentionArgs
from flexhop.ops.call import Call

VIEW = "flexhop_view"  # attribute of masks and offsets for which an entered context has a view


class Context(Protocol):
    """What the front doors ask of a context."""

    def run(
        self, args: AttentionArgs, call: Call, block_mask: Any, wants_lse: bool
    ) -> tuple[Tensor, Any, Tensor]:
        """Results of one rank's queries against all keys; lse only if it is wanted."""
        ...

    def packed(self, packing: Any, mask_mod: Any) -> tuple[Any, Any]:
        """Row tables and a mask for packed sequences of the whole batch."""
        ...

    def sum_gradient(self, tensor: Tensor) -> Tensor:
        """The tensor, whose gradient is summed over the mesh."""
        ...

    def seed(self, dropout: Any, query: Tensor) -> tuple[Tensor, ...]:
        """The operand of dropout, the same on all ranks; () if nothing is dropped."""
        ...


class Slot:
    """Holds the context that is entered now, if there is one.

    attend_dtensors: what a front door does with DTensors; the plugin says.
    """

    current: Context | None = None
    attend_dtensors: Callable[..., Any]


SLOT = Slot()


def view_of(block_mask: Any) -> Any:
    """The view that an entered context has of a mask, or None.

    FSDP rebuilds the arguments of a layer, masks too, and keeps their tensors: so the view also
    lies on one of them.
    """
    found = getattr(block_mask, VIEW, None)
    return (
        found
        if found is not None
        else getattr(getattr(block_mask, "kv_num_blocks", None), VIEW, None)
    )
