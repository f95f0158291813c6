"""Trackers of the operators that read a cache and that list a mask's blocks."""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables import higher_order_ops as hops
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lists import TupleVariable
from torch.fx import Proxy

from flexhop.compat.compilation import source_fingerprint
from flexhop.compat.dynamo.calls import (
    AttentionVariable,
    example_of,
    fake_of,
    placed,
    python_value,
    static_value,
)

__all__ = ["BlockListsVariable", "CachedVariable"]


class CachedVariable(AttentionVariable):
    """Tracker of the operator that reads a cache: two more mods and a page table."""

    _HOP_NAME = "flexhop_cached_attention"

    def _write_node(self, tx: Any, door: Any) -> VariableTracker:
        plain, has_mods = door.call.realize().items
        score_mod, plain = self.scaled(tx, door.score_mod, plain)
        call = TupleVariable([plain, has_mods])
        mods = (score_mod, door.mask_mod, door.key_mod, door.value_mod)
        groups = (door.blocks, door.pages)
        tuples = [TupleVariable(list(group.realize().items)) for group in groups]
        operands = [door.query, door.key, door.value, *tuples]
        (*qkv, lists, table), _ = hops.proxy_args_kwargs(operands, {})
        fakes = [fake_of(proxy) for proxy in qkv]
        tensors = [tuple(map(fake_of, group)) for group in (lists, table)]
        scale, options = self.rules.prepare_cached(*fakes, *tensors, python_value(tx, call))
        kinds = ("score_mod", "mask_mod", "k_mod", "v_mod")
        functions: list[Proxy] = []
        captures: list[tuple[Any, ...]] = []
        for kind, mod in zip(kinds, mods, strict=True):
            derives = kind == "score_mod" and door.query.realize().requires_grad
            function, lifted = self.trace_mod(tx, door.query, mod, kind, derives=derives)
            self.rules.check_captures(fakes[0], kind, tuple(map(example_of, lifted)))
            functions.append(function)
            captures.append(tuple(placed(tx, c, fakes[0].device) for c in lifted))
        score, mask, key, value = functions
        args = self.value.args_type(
            query=qkv[0], key=qkv[1], value=qkv[2], score_mod=score, mask_mod=mask, key_mod=key,
            value_mod=value, blocks=lists, pages=table, scale=scale, options=options,
            score_captures=captures[0], mask_captures=captures[1], key_captures=captures[2],
            value_captures=captures[3],
        )  # fmt: skip
        return self.write(tx, args)


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
