"""The tracker of the operator that reads a cache; see dynamo.py."""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables import higher_order_ops as hops
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.lists import TupleVariable
from torch.fx import Proxy

from flexhop.compat.dynamo import AttentionVariable, example_of, fake_of, placed, python_value

__all__ = ["register"]


class CachedVariable(AttentionVariable):
    """Tracker of the operator that reads a cache: two mods and a page table more."""

    _HOP_NAME = "flexhop_cached_attention"
    _DOOR = (
        "query", "key", "value", "score_mod", "mask_mod", "key_mod", "value_mod", "blocks",
        "pages", "scale", "call",
    )  # fmt: skip

    def _write_node(self, tx: Any, *args: VariableTracker) -> VariableTracker:
        tensors, mods, (blocks, pages), call = args[:3], args[3:7], args[7:9], args[10]
        tuples = [TupleVariable(list(group.realize().items)) for group in (blocks, pages)]
        (*qkv, lists, table), _ = hops.proxy_args_kwargs([*tensors, *tuples], {})
        fakes = [fake_of(proxy) for proxy in qkv]
        groups = [tuple(map(fake_of, group)) for group in (lists, table)]
        scale, options = self.rules.prepare_cached(*fakes, *groups, python_value(tx, call))
        kinds = ("score_mod", "mask_mod", "k_mod", "v_mod")
        functions: list[Proxy] = []
        captures: list[tuple[Any, ...]] = []
        for kind, mod in zip(kinds, mods, strict=True):
            function, lifted = self.trace_mod(tx, args[0], mod, kind)
            self.rules.check_captures(fakes[0], kind, tuple(map(example_of, lifted)))
            functions.append(function)
            captures.append(tuple(placed(tx, c, fakes[0].device) for c in lifted))
        wire = (*qkv, *functions, lists, table, scale, options, *captures)
        proxy = tx.output.create_proxy("call_function", self.value, args=wire, kwargs={})
        return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None)


def register(name: str) -> None:
    """Tell Dynamo the tracker; the rules are those of `dynamo.register`."""
    hops._hop_name_to_variable_class[name] = CachedVariable
