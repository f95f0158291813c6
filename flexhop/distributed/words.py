"""Plans as text and pictures."""

from __future__ import annotations

import torch

from flexhop.distributed.cost import Cost, imbalance
from flexhop.distributed.plan import Plan

_OWN, _NEEDED, _NOTHING = "█", "▒", "·"
_METHODS = {
    "gather": "all keys to all ranks",
    "blocks": "needed units only, one call of attention",
    "stages": "needed units only, own keys first, results merged by lse",
}


def explain(plan: Plan, width: int = 64) -> str:
    """Describe a plan: who owns what, what is sent, and the cost model's estimate.

    Args:
        plan: from `make_plan`.
        width: most cells per line of the picture.

    Returns:
        A text. In its pictures, a line is a rank (or a group that splits its tokens by heads), and
        a cell some units of the sequence: █ owned, ▒ received, · neither.
    """
    lines = _layout_lines(plan)
    for name in plan.masks:
        lines += ["", *_mask_lines(plan, name)]
        lines += picture(plan, name, width).splitlines()
    return "\n".join(lines)


def picture(plan: Plan, name: str = "", width: int = 64) -> str:
    """One line per rank (or group) of a mask: what it owns and what it receives."""
    units = -(-plan.length // plan.unit)
    cells = min(width, units)
    cell = torch.arange(units) * cells // units
    gathers = plan.masks[name].cost.method == "gather" and plan.groups > 1
    lines = []
    for group, own in enumerate(plan.own):
        owned, needed = torch.zeros(cells), torch.zeros(cells)
        owned[cell[own[own < units]]] = 1
        needed[cell if gathers else cell[plan.masks[name].need[group]]] = 1
        text = "".join(
            _OWN if o else _NEEDED if n else _NOTHING
            for o, n in zip(owned.tolist(), needed.tolist(), strict=True)
        )
        lines.append(f"  {_who(plan, group):>11} {text}")
    return "\n".join(lines)


def _who(plan: Plan, group: int) -> str:
    if plan.heads == 1:
        return f"rank {group}"
    return f"ranks {group * plan.heads}-{(group + 1) * plan.heads - 1}"


def _layout_lines(plan: Plan) -> list[str]:
    padding = plan.tokens * plan.ranks - plan.length
    chunks = len(plan.own[0]) // plan.chunk
    lines = [
        f"{plan.length} tokens on {plan.ranks} ranks: {plan.tokens} each, {padding} of padding "
        "in total",
        f"layout: {plan.layout}, {chunks} chunk{'s' if chunks > 1 else ''} of "
        f"{plan.chunk * plan.unit} tokens per {'rank' if plan.heads == 1 else 'group'}; units of "
        f"{plan.unit} tokens",
    ]
    if plan.heads > 1:
        lines.append(f"heads: {plan.heads} neighbouring ranks split their tokens by heads")
    return lines


def _mask_lines(plan: Plan, name: str) -> list[str]:
    cost = plan.masks[name].cost
    title = f"mask {name!r}" if name else "mask"
    lines = [f"{title}: the slowest rank has {imbalance(cost):.2f} times the mean work"]
    if plan.groups > 1:
        lines.append(f"  exchange: {cost.method}, {_METHODS[cost.method]}{_in_groups(cost)}")
        tokens = max(cost.received) * plan.unit
        lines.append(
            f"  the busiest rank receives {tokens} tokens, {_bytes(cost.bytes)} forward; all keys "
            f"would be {(plan.groups - 1) * plan.group_tokens} tokens"
        )
    lines.append(f"  estimate: {1e3 * cost.seconds:.3g} ms per layer, forward and backward")
    return lines


def _in_groups(cost: Cost) -> str:
    return f", in {cost.groups} groups of heads" if cost.groups > 1 else ""


def _bytes(count: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
