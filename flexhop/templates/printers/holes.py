"""Inductor: the text of our own template holes.

`kernel` is a TemplateKernel of compat/kernels/inductor.py, whose names are the same in torch
2.11 to 2.15.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy

INDEX_NAMES = ("b", "h", "q_idx", "kv_idx")
DISTANCE = "distance"  # q_idx - kv_idx, for kernels that compute it by themselves
ELEMENT = "element"  # of a row, in a loop over its elements
PAIRS = "pairs"  # what score_mod reads of a bias of pairs, for kernels that copy it
INTEGERS = (*INDEX_NAMES, DISTANCE, ELEMENT)
Expr = int | sympy.Expr
# The 32 lanes of a warp hold 8 queries and 4 pairs of keys; its neighbours, other queries.
_COPY_OF_SCORE = "(q_idx & 7) + (kv_idx >> 1 & 3) * 8 + (q_idx >> 3 & 3) * 32"
# A program's neighbours work on other rows, or on the same rows of another head.
COPY_OF_PROGRAM = "tl.program_id(0)"


class ElementLoop(NamedTuple):
    """The functions of all sites of a row: of the number of the element, too.

    sites: how many, at the first of them; 0 at the others, which the loop contains.
    """

    sites: int
    value: int  # as in ScatterSite
    indices: tuple[int, ...]


class ScatterSite(NamedTuple):
    """How to add one site's gradient to its buffer."""

    buffer: str  # name of the zero-filled buffer
    strides: tuple[Expr, ...]
    value: int  # number of the subgraph that computes the gradient per element
    indices: tuple[int, ...]  # numbers of the subgraphs that compute the indices
    uses_q_idx: bool  # whether any index depends on the query (the key) position
    uses_kv_idx: bool
    dtype: str  # of the buffer, as Triton writes it
    is_large: bool  # whether offsets can exceed int32
    by_distance: bool = False  # whether indices depend on positions by q_idx - kv_idx alone
    repeats: bool = False  # and whether different distances, or queries, may have the same indices
    row: Expr | None = (
        None  # stride of the rows of lowering/emission/exact_sums.py, if it holds such sums
    )
    is_own: bool = False  # whether no other score adds to its entry, so that it is stored
    is_row: bool = False  # whether neighbouring keys have neighbouring entries
    copies: int = 1  # of each entry, a power of two; neighbouring scores add to different ones
    kept: str | None = (
        None  # dtype of a row's sum in registers, which is added after the last tile
    )
    shared_axis: int | None = None  # along it, scores of a tile have one entry (1: of a query) ..
    shared_indices: tuple[int, ...] = ()  # .. if these indices are the same in all of the tile
    groups: tuple[int, int] | None = None  # of queries and keys whose scores may have one entry
    sides: tuple[int | None, ...] = ()  # axis of a tile along which each index moves
    loop: ElementLoop | None = None  # which portable kernels run in place of the site
    is_transposed: bool = False  # whether tiles are keys by queries; axes here are of the others

    def axis(self, axis: int) -> int:
        """The axis of the kernel's tiles; 0: along queries, 1: along keys."""
        return 1 - axis if self.is_transposed else axis


def buffer_name(name: str) -> str:
    """The name of the buffer of an input of user functions. No tensor has it.

    AOTInductor names buffers after the parameters of a module, and one may be called b.
    """
    return f"input {name}"


def size_text(kernel: Any, size: Expr) -> str:
    """Text of a size or stride, which may have symbols."""
    return kernel.kexpr(kernel.rename_indexing(sympy.sympify(size)))


def as_factor(text: str) -> str:
    """A size or stride as a factor: a symbolic one may be a sum, 2 * length - 1."""
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def scatter(kernel: Any, number: int, site: ScatterSite, more: tuple[str, ...] = ()) -> str:
    """The text that adds the gradient of one site to its buffer.

    Args:
        kernel: the template's kernel.
        number: of the site.
        site: how it is added.
        more: further inputs of its functions.
    """
    if site.loop is not None:
        return _in_loop(kernel, number, site, site.loop, more)
    inputs = {name: name for name in ("score", *INDEX_NAMES, "grad_score", *more)}
    grad = f"grad_{number}"
    lines = [kernel.modification(site.value, grad, **inputs)]
    names = [f"index_{number}_{axis}" for axis in range(len(site.indices))]
    lines += map(lambda n, name: kernel.modification(n, name, **inputs), site.indices, names)
    lines.append(f"{grad} = tl.where(keep, {grad}, 0.0)")
    if site.kept is not None:
        return "\n".join(
            [*lines, f"{grad}_sum = tl.sum({grad}, 1, keep_dims=True).to({site.kept})"]
        )
    if site.groups is not None:
        return "\n".join([*lines, *_add_groups(kernel, site, names, grad, site.groups)])
    if site.shared_axis is None:
        lines += _add(kernel, site, names, grad, _summed(site))
        return "\n".join(lines)
    shared = [names[i] for i in site.shared_indices]
    same = " & ".join(f"(tl.min({name}) == tl.max({name}))" for name in shared)
    first = [f"tl.min({name})" if name in shared else name for name in names]
    together = _add(kernel, site, first, grad, (site.shared_axis,))
    alone = _add(kernel, site, names, grad, ())
    lines += _either(same, together, alone)
    return "\n".join(lines)


def _in_loop(
    kernel: Any, number: int, site: ScatterSite, loop: ElementLoop, more: tuple[str, ...]
) -> str:
    """The text that adds the gradients of a row; empty at all of its sites but the first."""
    if not loop.sites:
        return ""
    of_one = site._replace(value=loop.value, indices=loop.indices, loop=None)
    text = scatter(kernel, number, of_one, (*more, ELEMENT))
    return f"for {ELEMENT} in tl.range(0, {loop.sites}):\n{textwrap.indent(text, '    ')}"


def _add_groups(
    kernel: Any, site: ScatterSite, names: Sequence[str], grad: str, groups: tuple[int, int]
) -> list[str]:
    """Lines that add the sums of groups of scores if each group of this tile has one entry."""
    lines, first, same = [], [], []
    for name, side in zip(names, site.sides, strict=True):
        if side is None:
            first.append(name)
            continue
        first.append(f"{name}_first")
        same.append(f"{name}_same")
        # Ids of one position, or expanded ones, are a number without the shape of the tile.
        shaped = f"{name} + tl.zeros_like({INDEX_NAMES[2 + side]})"
        lines.append(
            f"{first[-1]}, {same[-1]} = of_groups({shaped}, {site.axis(side)}, {groups[side]})"
        )
    total = f"{grad}_sum"
    place = (
        f"{place_of(kernel, site, first, by_program=True)} + tl.zeros_like({total}).to(tl.int32)"
    )
    sizes = [groups[site.axis(side)] for side in (0, 1)]
    together = [
        f"{total} = sum_groups({grad}, {sizes[0]}, {sizes[1]})",
        *add_at(kernel, site, place, total, "None"),
    ]
    alone = _add(kernel, site, names, grad, ())
    return [*lines, *_either(" & ".join(same), together, alone)]


def _summed(site: ScatterSite) -> tuple[int, ...]:
    """Axes of a tile along which all scores add to one place: they are summed first."""
    return (() if site.uses_kv_idx else (1,)) + (() if site.uses_q_idx else (0,))


def place_of(
    kernel: Any, site: ScatterSite, names: Sequence[str], *, by_program: bool = False
) -> str:
    """The offset of entries with such indices; by_program: in which copy, or by the score."""
    place = "0"
    for name, stride in zip(names, site.strides, strict=False):
        wide = ".to(tl.int64)" if site.is_large else ""
        size = size_text(kernel, stride)
        place += f" + {name}{wide} * {as_factor(size)}"
    if site.copies > 1:
        copy = COPY_OF_PROGRAM if by_program else copy_of(site)
        place += f" + ({copy} & {site.copies - 1})"
    return place


def copy_of(site: ScatterSite) -> str:
    """The copy, modulo their number, to which a score adds, or a sum of scores."""
    if site.uses_q_idx and site.uses_kv_idx:
        return _COPY_OF_SCORE
    row = {(True, False): "q_idx + ", (False, True): "kv_idx + "}
    return row.get((site.uses_q_idx, site.uses_kv_idx), "") + COPY_OF_PROGRAM


def _add(
    kernel: Any, site: ScatterSite, names: Sequence[str], grad: str, summed: tuple[int, ...]
) -> list[str]:
    """Lines that add `grad`, summed over axes of the tile, to the entries with such indices."""
    lines = []
    for axis in summed:
        lines.append(f"{grad}_sum = tl.sum({grad}, {site.axis(axis)}, keep_dims=True)")
        grad = f"{grad}_sum"  # a name has one shape in both branches
    shapes: dict[tuple[int, ...], str] = {(): "keep", (1,): "q_idx", (0,): "kv_idx", (1, 0): grad}
    shape = shapes[summed]
    mask = "None" if summed else "keep"
    place = f"{place_of(kernel, site, names)} + tl.zeros_like({shape}).to(tl.int32)"
    return [*lines, *add_at(kernel, site, place, grad, mask)]


def add_at(kernel: Any, site: ScatterSite, place: str, grad: str, mask: str) -> list[str]:
    """Lines that add values at such offsets."""
    pointer = kernel.args.input(site.buffer)
    if site.row is not None:
        row = size_text(kernel, site.row)
        # Masked values are 0 by now and add nothing.
        return [f"add_exactly({pointer}, {place}, {grad}, {row})"]

    def write(mask: str) -> str:
        what = f"{pointer} + ({place}), {grad}.to({site.dtype}), mask={mask}"
        return f"tl.store({what})" if site.is_own else f"tl.atomic_add({what}, sem='relaxed')"

    # Zeros, too: of floats, four neighbours take one instruction.
    is_row = site.is_row and site.dtype == "tl.float32" and mask != "None"
    if site.is_own or is_row:
        return _either("CHECKED", [write("in_range")], [write("None")])
    return [write(mask)]


def _either(condition: str, lines: Sequence[str], otherwise: Sequence[str]) -> list[str]:
    return [f"if {condition}:", *_indented(lines), "else:", *_indented(otherwise)]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for text in lines for line in text.splitlines()]


class CopiedPairs(NamedTuple):
    """A bias of pairs as a matrix: a row for each query, of all heads and batches.

    buffer: its name. offset: of its first element in the buffer. stride: from row to row.
    """

    buffer: str
    offset: int
    rows: Expr
    columns: Expr
    stride: int


def text_of_pairs(kernel: Any, pairs: CopiedPairs, part: str) -> str:
    """Text of a field, or of the "pointer" to the first element."""
    if part == "pointer":
        return f"({kernel.args.input(pairs.buffer)} + {pairs.offset})"
    return as_factor(size_text(kernel, getattr(pairs, part)))


class Dropout(NamedTuple):
    """Which weights a kernel drops; see flexhop/ops/dropout.py.

    seed: name of its buffer. threshold: for the random words. factor: for the kept weights.
    in_groups: whether tiles start at multiples of 16 queries and keys. groups: of queries and of
    keys, in a placed seed; None if positions are the mask's. is_float32: whether the operands are.
    """

    seed: str
    threshold: int
    factor: float
    in_groups: bool
    groups: tuple[Expr, Expr] | None = None
    is_float32: bool = False


def draw_kept(kernel: Any, dropout: Dropout, q_idx: str, kv_idx: str) -> str:
    """A line to append: which weights of a tile are kept."""
    seed = kernel.args.input(dropout.seed)
    rest = f"{dropout.threshold}, {dropout.in_groups}, {dropout.is_float32}"
    place = f"b, h, {q_idx}, {kv_idx}"
    if dropout.groups is not None:
        queries, keys = (size_text(kernel, n) for n in dropout.groups)
        place = (
            f"b + tl.load({seed} + 2).to(tl.int32), h + tl.load({seed} + 3).to(tl.int32), "
            f"in_mask({seed} + 4, {q_idx}, {queries}), "
            f"in_mask({seed} + 4 + {queries}, {kv_idx}, {keys})"
        )
    return f"\nkept = draw_dropout({seed}, {place}, {rest})"
