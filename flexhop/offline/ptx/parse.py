"""PTX text as instructions, with labels resolved."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Address", "Instruction", "Program", "Register", "Symbol", "Vector", "parse"]


class Register(NamedTuple):
    """A register of every thread; kind: "p", or the number of its bits."""

    kind: str
    number: int


class Symbol(NamedTuple):
    """A special register such as %tid.x, a parameter, a label or an array."""

    name: str


class Vector(NamedTuple):
    """Operands in braces."""

    parts: tuple[Operand, ...]


class Address(NamedTuple):
    """What stands in brackets: a place, an offset in bytes, and the coordinates of a tensor."""

    base: Operand
    offset: int
    coordinates: Vector | None


# A number: as an int its bits, if the text gives a float.
Operand = Register | Symbol | Vector | Address | int
Scope = dict[str, Register]


@dataclasses.dataclass
class Instruction:
    """One instruction.

    Args:
        opcode: with all of its suffixes, e.g. "add.s32".
        operands: targets first.
        guard: the predicate, and whether it must be False; None: for all threads.
        text: as it stands in the file.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None
    text: str


@dataclasses.dataclass
class Program:
    """A kernel.

    Args:
        name: of the kernel.
        instructions: in the order of the text.
        labels: instruction that follows a label.
        tables: lists of labels, for indexed branches.
        parameters: names, in order.
        threads: of one program of the grid.
        registers: how many there are of each kind.
        arrays: bytes in global memory that the file holds, such as names in assertions.
        local: bytes of each thread's own memory, by the array's name.
    """

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]
    tables: dict[str, list[str]]
    parameters: list[str]
    threads: int
    registers: dict[str, int]
    arrays: dict[str, bytes]
    local: dict[str, int]


_KINDS = {
    "pred": "p", "b16": "16", "b32": "32", "b64": "64", "f32": "32", "f64": "64",
    **{f"{sign}{bits}": str(bits) for sign in "us" for bits in (16, 32, 64)},
    **dict.fromkeys(("b8", "u8", "s8"), "16"),  # the upper half of it is nobody's
}  # fmt: skip
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([%\w]+)(?:<(\d+)>)?")
_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")
_NUMBER = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|\d+)U?")
_ARRAY = re.compile(r"\.global .*?\.b8 (\S+)\[\d+\] = \{([^}]*)\}")
_LOCAL = re.compile(r"\.local .*?\.b8\s+(\w+)\[(\d+)\]")
_COMMENT = re.compile(r"//[^\n]*")
_DIRECTIVE = re.compile(r"(?m)^\s*\.(?:loc|file|section)\b.*$")
_MARK = re.compile(r"[;{}:]")
_LABEL = re.compile(r"[$\w]+")
_STATEMENT = re.compile(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)


def parse(text: str) -> Program:
    """Read the kernel of a PTX file that has one."""
    return _Parser(_COMMENT.sub("", text)).program()


class _Parser:
    """What is known while the statements of a body are read."""

    def __init__(self, text: str) -> None:
        head, _, body = text.partition("\n{\n")
        entry = re.search(r"\.entry\s+(\S+?)\(", head)
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", head)
        assert entry is not None and threads is not None, head
        self._head, self._body = head, body
        self._name, self._threads = entry[1], int(threads[1])
        self._counts = {"p": 0, "16": 0, "32": 0, "64": 0}
        # Names of registers, of each block in braces; and labels likewise, made unique.
        self._scopes: list[Scope] = [{}]
        self._blocks: list[int] = [0]
        self._num_blocks = 0
        self._families: dict[str, tuple[str, int]] = {}
        self._instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}
        self._tables: dict[str, list[str]] = {}
        self._local: dict[str, int] = {}

    def program(self) -> Program:
        for statement in self._statements():
            self._read(statement)
        parameters = re.findall(r"\.param\s+.*?(\S+_param_\d+)", self._head)
        arrays = {
            name: bytes(int(part) & 255 for part in values.split(","))
            for name, values in _ARRAY.findall(self._head)
        }
        return Program(
            self._name, self._instructions, self._labels, self._tables, parameters,
            self._threads, self._counts, arrays, self._local,
        )  # fmt: skip

    def _statements(self) -> Iterator[str]:
        """Statements, labels with their colons, and braces of blocks, one by one."""
        text, start = _DIRECTIVE.sub("", self._body), 0
        for match in _MARK.finditer(text):
            mark, here = match[0], text[start : match.start()].strip()
            # Braces inside of a statement are those of operands.
            if mark in "{}" and here:
                continue
            if mark == ":" and not _LABEL.fullmatch(here):
                continue
            if mark != ";":
                here += mark
            start = match.end()
            if here:
                yield here

    def _read(self, statement: str) -> None:
        if statement == "{":
            self._num_blocks += 1
            self._scopes.append({})
            self._blocks.append(self._num_blocks)
        elif statement == "}":
            if len(self._scopes) > 1:
                self._scopes.pop()
                self._blocks.pop()
        elif statement.startswith(".reg"):
            self._declare(statement)
        elif (local := _LOCAL.match(statement)) is not None:
            self._local[local[1]] = int(local[2])
        elif statement.endswith(":"):
            self._labels[self._label(statement[:-1])] = len(self._instructions)
        elif ".branchtargets" in statement:
            names = statement.split(".branchtargets")[1].replace(",", " ").split()
            table = next(reversed(self._labels))
            self._tables[table] = [self._label(name) for name in names]
        elif not statement.startswith("."):
            self._instruct(statement)

    def _label(self, name: str) -> str:
        """A label of inline assembly belongs to its block."""
        return name if name.startswith("$") else f"{name}@{self._blocks[-1]}"

    def _declare(self, statement: str) -> None:
        match = _REGISTERS.match(statement)
        assert match is not None, statement
        kind, name = _KINDS[match[1]], match[2]
        names = re.findall(r"[%\w]+", statement.split(f".{match[1]}", 1)[1])
        if match[3] is None:
            for name in names:
                self._scopes[-1][name] = self._new(kind, 1)
            return
        self._families[name] = kind, self._new(kind, int(match[3])).number

    def _new(self, kind: str, count: int) -> Register:
        first = self._counts[kind]
        self._counts[kind] += count
        return Register(kind, first)

    def _instruct(self, statement: str) -> None:
        match = _STATEMENT.fullmatch(statement)
        assert match is not None, statement
        negated, guard, opcode, rest = match.groups()
        predicate = None
        if guard is not None:
            register = self._operand(guard)
            assert isinstance(register, Register), statement
            predicate = register, bool(negated)
        parts = _split(rest)
        if opcode.split(".")[0] in ("bra", "brx"):
            parts[-1] = self._label(parts[-1])
        operands = tuple(self._operand(part) for part in parts)
        self._instructions.append(Instruction(opcode, operands, predicate, statement))

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(self._operand(part) for part in _split(text[1:-1])))
        if text.startswith("["):
            return self._address(text[1:-1].strip())
        for scope in reversed(self._scopes):
            if text in scope:
                return scope[text]
        if (number := _FLOAT.fullmatch(text)) is not None:
            return int(number[1] or number[2], 16)
        if _NUMBER.fullmatch(text):
            return int(text.rstrip("U"), 0)
        register = re.fullmatch(r"(%?[a-z]+)(\d+)", text)
        if register is not None and register[1] in self._families:
            kind, first = self._families[register[1]]
            return Register(kind, first + int(register[2]))
        return Symbol(text)

    def _address(self, text: str) -> Address:
        parts = _split(text)
        coordinates = None
        if len(parts) > 1:
            coordinates = self._operand(parts[1])
            assert isinstance(coordinates, Vector), text
        base, _, offset = parts[0].partition("+")
        return Address(self._operand(base.strip()), int(offset.strip() or "0", 0), coordinates)


def _split(text: str) -> list[str]:
    """Operands: separated by commas, but not those inside of braces, brackets or parentheses."""
    parts: list[str] = []
    depth, current = 0, ""
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    if current.strip():
        parts.append(current.strip())
    # A second result stands behind a bar: elect.sync d|p.
    return [one for part in parts for one in (part.split("|") if "|" in part else [part])]
