"""Inductor: the text of our own template holes.

`kernel` is a TemplateKernel of compat/kernels/inductor.py, whose names are the same in torch
2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import sympy

INDEX_NAMES = ("b", "h", "q_idx", "kv_idx")
DISTANCE = "distance"  # q_idx - kv_idx, for kernels that compute it by themselves
Expr = int | sympy.Expr


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
    inputs = {name: name for name in ("score", *INDEX_NAMES, "grad_score", *more)}
    lines = [kernel.modification(site.value, f"grad_{number}", **inputs)]
    index = "0"
    for axis, (subgraph, stride) in enumerate(zip(site.indices, site.strides, strict=True)):
        name = f"index_{number}_{axis}"
        lines.append(kernel.modification(subgraph, name, **inputs))
        wide = ".to(tl.int64)" if site.is_large else ""
        size = kernel.kexpr(kernel.rename_indexing(sympy.sympify(stride)))
        index += f" + {name}{wide} * {as_factor(size)}"
    if site.copies > 1:
        # The 32 lanes of a warp hold 8 queries and 4 pairs of keys; its neighbours, other queries.
        place = "(q_idx & 7) + (kv_idx >> 1 & 3) * 8 + (q_idx >> 3 & 3) * 32"
        index += f" + ({place} & {site.copies - 1})"
    lines.append(f"grad_{number} = tl.where(keep, grad_{number}, 0.0)")
    shape, mask = "keep", "keep"
    if not site.uses_kv_idx:
        # Every key of a query adds to one place: sum them first.
        lines.append(f"grad_{number} = tl.sum(grad_{number}, 1, keep_dims=True)")
        shape, mask = "q_idx", "None"
    if not site.uses_q_idx:
        lines.append(f"grad_{number} = tl.sum(grad_{number}, 0, keep_dims=True)")
        shape, mask = ("kv_idx" if site.uses_kv_idx else f"grad_{number}"), "None"
    zeros = f"tl.zeros_like({shape}).to(tl.int32)"
    pointer = kernel.args.input(site.buffer)
    if site.row is not None:
        row = kernel.kexpr(kernel.rename_indexing(sympy.sympify(site.row)))
        # Masked values are 0 by now and add nothing.
        lines.append(f"add_exactly({pointer}, {index} + {zeros}, grad_{number}, {row})")
        return "\n".join(lines)

    def write(mask: str) -> str:
        what = f"{pointer} + ({index} + {zeros}), grad_{number}.to({site.dtype}), mask={mask}"
        return f"tl.store({what})" if site.is_own else f"tl.atomic_add({what}, sem='relaxed')"

    # Zeros, too: of floats, four neighbours take one instruction.
    if site.is_own or (site.is_row and site.dtype == "tl.float32"):
        lines += ["if CHECKED:", f"    {write('in_range')}", "else:", f"    {write('None')}"]
    else:
        lines.append(write(mask))
    return "\n".join(lines)


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
        queries, keys = (
            kernel.kexpr(kernel.rename_indexing(sympy.sympify(n))) for n in dropout.groups
        )
        place = (
            f"b + tl.load({seed} + 2).to(tl.int32), h + tl.load({seed} + 3).to(tl.int32), "
            f"in_mask({seed} + 4, {q_idx}, {queries}), "
            f"in_mask({seed} + 4 + {queries}, {kv_idx}, {keys})"
        )
    return f"\nkept = draw_dropout({seed}, {place}, {rest})"
