"""Kernel tiles, and checks of option values."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from flexhop.errors import OptionValueError

__all__ = ["Rule", "Tile", "TileRequest", "check"]


class Rule(NamedTuple):
    """The allowed values of an option, and the same in words for the error."""

    values: tuple[object, ...]
    allowed: str


# A tensor core instruction is 16 wide, and no kernel has a tile of more than 1024 rows. A program
# has at most 16 warps on any architecture; 8 stages fill shared memory at every head size.
_BLOCK = Rule((16, 32, 64, 128, 256, 512, 1024), "a power of two from 16 to 1024")
TILE_RULES = {
    "block_m": _BLOCK,
    "block_n": _BLOCK,
    "num_warps": Rule((1, 2, 4, 8, 16), "1, 2, 4, 8 or 16"),
    "num_stages": Rule(tuple(range(1, 9)), "an integer from 1 to 8"),
}


def check(name: str, value: object, rule: Rule) -> None:
    """Check a value against its rule."""
    # Types are compared too: True == 1, but one warp is not a flag.
    if not any(type(value) is type(v) and value == v for v in rule.values):
        raise OptionValueError(name=name, value=value, allowed=rule.allowed)


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """The queries and keys that one program of a kernel computes in one step.

    Args:
        block_m: queries per tile, a power of two from 16.
        block_n: keys per tile, a power of two from 16. Both must divide the mask's blocks.
        num_warps: groups of 32 threads that share a tile: 1, 2, 4, 8 or 16.
        num_stages: tiles loaded ahead of the arithmetic, 1 to 8. Each takes shared memory.

    Raises:
        OptionValueError: a value outside these ranges.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        for name, rule in TILE_RULES.items():
            check(name, getattr(self, name), rule)

    def words(self) -> str:
        """For reports: 64 queries x 128 keys, 4 warps, 1 stage."""
        parts = ((self.num_warps, "warp"), (self.num_stages, "stage"))
        counts = (f"{n} {name}{'s' if n > 1 else ''}" for n, name in parts)
        return ", ".join([f"{self.block_m} queries x {self.block_n} keys", *counts])

    def fill(self, default: Tile) -> Tile:
        """This tile. A TileRequest takes its unset fields from `default`."""
        del default
        return self


@dataclasses.dataclass(frozen=True, slots=True)
class TileRequest:
    """Some fields of a Tile. flexhop's table for the device fills in fields that are None.

    Args and errors: see Tile.
    """

    block_m: int | None = None
    block_n: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.chosen().items():
            check(name, value, TILE_RULES[name])

    def chosen(self) -> dict[str, int]:
        """The fields that are not None."""
        values = {name: getattr(self, name) for name in TILE_RULES}
        return {name: value for name, value in values.items() if value is not None}

    def fill(self, default: Tile) -> Tile:
        """This request's fields, completed from `default`."""
        return dataclasses.replace(default, **self.chosen())
