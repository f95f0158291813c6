"""The tracker of the operator that lists a mask's blocks; see dynamo.py."""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables.base import VariableTracker

from flexhop.compat.compilation import source_fingerprint
from flexhop.compat.dynamo.calls import (
    AttentionVariable,
    example_of,
    fake_of,
    placed,
    static_value,
)

__all__ = ["BlockListsVariable"]


class BlockListsVariable(AttentionVariable):
    """Tracker of the operator that lists blocks: traces the mask into a subgraph."""

    _HOP_NAME = "flexhop_block_lists"

    def _write_node(self, tx: Any, door: Any) -> VariableTracker:
        probe = door.probe.as_proxy()
        device = fake_of(probe).device
        mask, lifted = self.trace_mod(tx, door.probe, door.mask_mod, "mask_mod")
        self.rules.check_captures(fake_of(probe), "mask_mod", tuple(map(example_of, lifted)))
        args = self.value.args_type(
            probe=probe,
            mask_mod=mask,
            sizes=door.sizes.as_proxy(),
            block=static_value(tx, door.block),
            sides=static_value(tx, door.sides),
            sources=source_fingerprint(),
            captures=tuple(placed(tx, capture, device) for capture in lifted),
        )
        return self.write(tx, args)
