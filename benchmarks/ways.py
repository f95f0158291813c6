"""The ways through a loop of machine code: what a step executes, without and with its branches."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Ways", "ways"]

_LABEL = re.compile(r"(\.L_x_\d+):$")
_JUMP = re.compile(r"\bBRA(?:\.\w+)*\s.*?\(?(\.L_x_\d+)\)?")
_CONDITION = re.compile(r"(?:\*/)?\s*@!?U?P\w+\s")


class Ways(NamedTuple):
    """Text of the instructions on the shortest and on the longest way."""

    shortest: str
    longest: str


class _Way(NamedTuple):
    products: int
    length: int
    following: int


def ways(loop: str) -> Ways:
    """The shortest and the longest way through a loop that contains no other.

    Both execute as many matrix products as any way does. If every way leaves the text, because
    ptxas placed a part of the loop elsewhere, both are the whole text.

    Args:
        loop: one of `Cubin.loops`.
    """
    lines = loop.splitlines()
    return Ways(_way(lines, shortest=True), _way(lines, shortest=False))


def _way(lines: list[str], *, shortest: bool) -> str:
    labels = {m[1]: n for n, line in enumerate(lines) if (m := _LABEL.match(line.strip()))}
    end = len(lines) - 1  # jumps to the loop's first instruction
    found: dict[int, _Way] = {}
    for n in range(end, -1, -1):
        known = [(found[m], m) for m in _following(lines, labels, n) if m in found]
        options = [_Way(way.products, way.length, m) for way, m in known]
        if n == end:
            options = [_Way(0, 0, -1)]
        if options:
            sign = -1 if shortest else 1
            best = max(options, key=lambda way: (way.products, sign * way.length))
            is_product, is_instruction = "MMA" in lines[n], ";" in lines[n]
            products, length = best.products + is_product, best.length + is_instruction
            found[n] = _Way(products, length, best.following)
    if 0 not in found:
        return "\n".join(lines)
    taken, n = [], 0
    while n >= 0:
        taken.append(lines[n])
        n = found[n].following
    return "\n".join(taken)


def _following(lines: list[str], labels: dict[str, int], n: int) -> list[int]:
    """Lines that may be executed after one, further down in the loop."""
    jump = _JUMP.search(lines[n])
    target = labels.get(jump[1], -1) if jump else -1
    following = [target] if target > n else []
    if jump is None or _CONDITION.search(lines[n].partition("BRA")[0]):
        following.append(n + 1)
    return following
