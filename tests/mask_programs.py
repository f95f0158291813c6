"""Random mask_mods: programs of integer, float and bool operators over indices and tables."""

import random
from typing import Any

import torch
from torch import Tensor

COMPARE = (torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne)
# What each operation of the programs does with values a and x, a number c and a choice n.
INTEGERS = {
    "add": lambda a, x, c, n: a + x,
    "sub": lambda a, x, c, n: a - x,
    "rsub": lambda a, x, c, n: c - a,
    "add_number": lambda a, x, c, n: a + c,
    "mul_number": lambda a, x, c, n: a * c,
    "mul": lambda a, x, c, n: a * x,
    "div": lambda a, x, c, n: a // (c or 1),
    "mod": lambda a, x, c, n: a % (c or 1),
    "min": lambda a, x, c, n: torch.minimum(a, x),
    "max": lambda a, x, c, n: torch.maximum(a, x),
    "clamp": lambda a, x, c, n: torch.clamp(a, -5, abs(c)),
    "clamp_min": lambda a, x, c, n: a.clamp(min=c),
    "abs": lambda a, x, c, n: a.abs(),
    "neg": lambda a, x, c, n: -a,
    "xor": lambda a, x, c, n: a ^ x,
    "and": lambda a, x, c, n: a & (abs(c) | 3),
    "not": lambda a, x, c, n: ~a,
    "shift_right": lambda a, x, c, n: a >> 3,
    "shift_left": lambda a, x, c, n: a << 2,
    "wide": lambda a, x, c, n: a.long(),
    "narrow": lambda a, x, c, n: a.short(),
    "square": lambda a, x, c, n: a * a,
    "sign": lambda a, x, c, n: torch.sign(a),
    "fmod": lambda a, x, c, n: torch.fmod(a, c or 1),
    "wrap": lambda a, x, c, n: a * 30000001,  # leaves int32 soon
    "trunc": lambda a, x, c, n: torch.div(a, c or 1, rounding_mode="trunc"),
}
FLOATS = {
    "add": lambda a, x, c, n: a + x,
    "mul": lambda a, x, c, n: a * x,
    "scale": lambda a, x, c, n: a * c,
    "sqrt": lambda a, x, c, n: a.sqrt(),
    "log": lambda a, x, c, n: torch.log(a.abs() + 0.1),
    "exp": lambda a, x, c, n: torch.exp(a * -0.1),
    "tanh": lambda a, x, c, n: torch.tanh(a),
    "sin": lambda a, x, c, n: torch.sin(a),
    "floor": lambda a, x, c, n: torch.floor(a),
    "div": lambda a, x, c, n: a / x,
    "reciprocal": lambda a, x, c, n: 1.0 / a,
    "abs": lambda a, x, c, n: a.abs(),
    "neg": lambda a, x, c, n: -a,
    "max": lambda a, x, c, n: torch.maximum(a, x),
    "bf16": lambda a, x, c, n: (a.to(torch.bfloat16) * c + 0.1).float(),
    "half": lambda a, x, c, n: (a.half() - 0.3) * c,
    "no_rule": lambda a, x, c, n: torch.erf(a),
}
BOOLS = {
    "and": lambda a, x, y: a & x,
    "and_not": lambda a, x, y: torch.logical_and(a, ~x),
    "or": lambda a, x, y: a | x,
    "xor": lambda a, x, y: a ^ x,
    "not": lambda a, x, y: ~a,
    "product": lambda a, x, y: a * x,
    "where": lambda a, x, y: torch.where(a, x, y),
    "where_false": lambda a, x, y: torch.where(a, x, False),
    "where_true": lambda a, x, y: torch.where(a, True, x),
}

# Also of programs with rows; the others are those of earlier seeds.
INTEGERS_OF_ROWS = {
    **INTEGERS,
    "or": lambda a, x, c, n: a | x,
    "and_negative": lambda a, x, c, n: a & -(abs(c) | 4),
    "most_of_row": lambda a, x, c, n: torch.stack([a, x]).amax(0),
    "sum_of_row": lambda a, x, c, n: torch.stack([a, x, a]).sum(0),
    "least_of_row": lambda a, x, c, n: (torch.cat([a.view(1), x[None]]) - c).min(),
}
BOOLS_OF_ROWS = {
    **BOOLS,
    "all": lambda a, x, y: torch.stack([a, x, y]).all(0),
    "none": lambda a, x, y: ~torch.stack([a, x]).any(),
    "all_not": lambda a, x, y: (~torch.stack([a, x])).all(-1),
}


def make_tables(seed: int, length: int, batch: int, heads: int) -> dict[str, list[Tensor]]:
    """Captured tensors by kind: sorted, shuffled, short, by batch, full of large numbers, NaN."""
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(length, generator=g)
    odd = torch.rand(length, generator=g) < 0.01
    return {
        "int": [
            torch.sort(torch.randint(0, 9, (length,), generator=g)).values.to(torch.int32),
            torch.randint(-5, 50, (length,), generator=g),
            torch.randint(0, 9, (7,), generator=g, dtype=torch.int32),
            torch.randint(-3, 9, (batch, length), generator=g, dtype=torch.int16),
            torch.randint(-(2**31), 2**31 - 1, (length,), generator=g, dtype=torch.int32),
        ],
        "float": [
            torch.rand(length, generator=g),
            torch.randn(heads, length, generator=g),
            torch.where(odd, float("nan"), normal),
        ],
        "bool": [
            torch.rand(length, generator=g) < 0.05,
            torch.rand(9, 9, generator=g) < 0.6,
            torch.rand(batch, length, generator=g) < 0.9,
        ],
    }


class Program:
    """A mask_mod of about `size` operators; the same for the same seed.

    rows: whether it also makes and reduces rows of numbers.
    """

    def __init__(
        self,
        seed: int,
        length: int,
        size: int,
        batch: int = 2,
        heads: int = 2,
        *,
        rows: bool = False,
    ) -> None:
        self.integers = INTEGERS_OF_ROWS if rows else INTEGERS
        self.bools = BOOLS_OF_ROWS if rows else BOOLS
        self.tables = make_tables(seed, length, batch, heads)
        self.length = length
        self.rng = random.Random(seed)
        self.kinds = ["int"] * 4  # b, h, q, k
        self.steps: list[tuple[Any, ...]] = []
        for _ in range(size):
            self._add_step()
        self._add_bool()

    def _pick(self, kind: str) -> int:
        found = [i for i, other in enumerate(self.kinds) if other == kind]
        if kind == "int" and self.rng.random() < 0.5:
            return self.rng.choice([2, 3])
        return self.rng.choice(found[-4:] if self.rng.random() < 0.7 else found)

    def _emit(self, kind: str, *step: Any) -> None:
        self.steps.append(step)
        self.kinds.append(kind)

    def _number(self) -> int:
        far = self.rng.randrange(-self.length, self.length)
        return self.rng.choice([1, 2, 3, 4, 7, 16, 33, 64, 100, -1, -3, -16, far])

    def _add_step(self) -> None:
        choice = self.rng.random()
        if choice < 0.45:
            self._add_integer()
        elif choice < 0.55:
            self._add_float()
        else:
            self._add_bool()
        if "bool" in self.kinds and self.rng.random() < 0.08:
            self._emit("int", "choose", self._pick("bool"), self._pick("int"), self._pick("int"))

    def _add_integer(self) -> None:
        if self.rng.random() < 0.12:
            step = "read", self._pick("int"), self.rng.randrange(5), self.rng.random() < 0.5
        else:
            name = self.rng.choice(list(self.integers))
            step = self.integers[name], self._pick("int"), self._pick("int"), self._number()
        self._emit("int", *step)

    def _add_float(self) -> None:
        number = self.rng.choice([0.5, 3.7, -0.01, 100.0])
        if "float" not in self.kinds or self.rng.random() < 0.4:
            name = self.rng.choice(["scale", "read_float"])
            self._emit("float", name, self._pick("int"), self.rng.randrange(3), number)
        else:
            name = self.rng.choice(list(FLOATS))
            self._emit("float", FLOATS[name], self._pick("float"), self._pick("float"), number)

    def _add_bool(self) -> None:
        if self.kinds.count("bool") >= 2 and self.rng.random() < 0.55:
            name = self.rng.choice(list(self.bools))
            self._emit("bool", "logic", self.bools[name], *(self._pick("bool") for _ in range(3)))
        elif "float" in self.kinds and self.rng.random() < 0.35:
            operands = self._pick("float"), self._pick("float")
            self._emit("bool", "compare_floats", *operands, self.rng.randrange(8))
        elif self.rng.random() < 0.2:
            number = self.rng.randrange(3)
            self._emit("bool", "read_bool", self._pick("int"), self._pick("int"), number)
        else:
            operands = self._pick("int"), self._pick("int"), self._number()
            self._emit("bool", "compare", *operands, self.rng.randrange(12))

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        values = [b, h, q_idx, kv_idx]
        for step in self.steps:
            values.append(self._run(step, values))
        return values[-1]

    def _run(self, step: tuple[Any, ...], values: list[Tensor]) -> Tensor:
        operation, *rest = step
        if callable(operation):
            a, x, number = rest
            return operation(values[a], values[x], number, 0)
        return getattr(self, f"_{operation}")(values, *rest)

    def _choose(self, values, condition, a, x):
        return torch.where(values[condition], values[a], values[x])

    def _read(self, values, index, number, is_clamped):
        table, place = self.tables["int"][number], values[index]
        size = table.shape[-1]
        if index in (2, 3) and size == self.length:  # a position is in range as it is
            return table[values[0], place] if table.dim() == 2 else table[place]
        place = place.clamp(0, size - 1) if is_clamped else place % size
        return table[values[0], place] if table.dim() == 2 else table[place]

    def _read_float(self, values, index, number, _):
        table, place = self.tables["float"][number], values[index] % self.length
        return table[values[1], place] if table.dim() == 2 else table[place]

    def _read_bool(self, values, index, other, number):
        table, place = self.tables["bool"][number], values[index]
        if number == 1:
            return table[place % 9, values[other].clamp(0, 8)]
        if number == 2:
            return table[values[0]][place % self.length]
        return table[(place + 5) % self.length]

    def _scale(self, values, a, _, number):
        return values[a] * number

    def _logic(self, values, operation, a, x, y):
        return operation(values[a], values[x], values[y])

    def _compare(self, values, a, x, number, choice):
        return COMPARE[choice % 6](values[a], values[x] if choice < 6 else number)

    def _compare_floats(self, values, a, x, choice):
        return COMPARE[choice % 4](values[a], values[x] if choice < 4 else 0.5)
