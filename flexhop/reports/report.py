"""The report of `flexhop.explain` on one call, as values and as text."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from flexhop.options import KernelOptions
from flexhop.reports.page import page


@dataclasses.dataclass(frozen=True, slots=True)
class Capture:
    """A value that a mod captured and that became an operand.

    Args:
        name: as in the mod's code: capture_0, capture_1 and so on.
        kind: e.g. "float32 [8, 128] on cpu", or the type of a number.
        requires_grad: whether the backward pass computes its gradient.
    """

    name: str
    kind: str
    requires_grad: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}{', needs a gradient' if self.requires_grad else ''}"


@dataclasses.dataclass(frozen=True, slots=True)
class Mod:
    """One of your functions, as the kernel gets it.

    Args:
        code: Python text of the traced graph.
        is_trivial: whether it has no effect: a score_mod that returns the score, a mask_mod that
            returns True. Kernels omit it.
        captures: the values that it captures.
    """

    code: str
    is_trivial: bool
    captures: tuple[Capture, ...]

    def __str__(self) -> str:
        if self.is_trivial:
            return "has no effect; kernels omit it"
        return "\n".join([self.code, *(f"    # {capture}" for capture in self.captures)])


@dataclasses.dataclass(frozen=True, slots=True)
class Mask:
    """Blocks of the mask, counted over its batches and heads.

    Args:
        block_size: (queries, keys) per block.
        shape: the mask's [B, H, M, N]; B and H may be 1, shared by all.
        partial: blocks to which mask_mod is applied; None if the lists have no data.
        full: blocks in which every pair is visible.
        total: blocks of the whole matrix.
        density: visited fraction of the matrix within the lengths, 0 to 1.
        unmasked: visible fraction of the matrix, 0 to 1; None if the mask is too large to
            evaluate. `density - unmasked` is the work spent on masked elements.
        picture: the blocks of the first batch and head as SVG; None if the lists have no data.
    """

    block_size: tuple[int, int]
    shape: tuple[int, ...]
    partial: int | None
    full: int | None
    total: int
    density: float | None
    unmasked: float | None
    picture: str | None = dataclasses.field(default=None, repr=False)

    def __str__(self) -> str:
        size = f"blocks of {self.block_size[0]} queries x {self.block_size[1]} keys"
        if self.partial is None or self.full is None or self.density is None:
            return f"{size}, {self.total} in total; not counted, because the lists have no data"
        text = (
            f"{size}: {self.partial} partial + {self.full} full of {self.total}, "
            f"{100 * self.density:.1f} % of the matrix visited"
        )
        unmasked = "" if self.unmasked is None else f", {100 * self.unmasked:.1f} % visible"
        return text + unmasked


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """One kernel.

    Args:
        kernel: its name, as in Report.passes.
        tile: the queries and keys of one step. A Tile for portable kernels, which you can pass in
            kernel_options; other dialects have tiles of their own type. `tile.words()` describes
            each.
        reason: why this kernel and this tile.
        shared_memory: bytes per program, an upper bound.
        available: bytes per program that the device has.
        programs: number of programs launched.
        flops: matrix product operations in visited blocks; None if the mask has no data.
        bytes: memory traffic if every operand is read once and every result written once.
    """

    kernel: str
    tile: Any
    reason: str
    shared_memory: int
    available: int
    programs: int
    flops: int | None
    bytes: int

    def __str__(self) -> str:
        flops = "unknown" if self.flops is None else f"{self.flops / 1e9:.3g} GFLOP"
        return "\n".join(
            [
                f"tile: {self.tile.words()}; {self.programs} programs",
                f"why: {self.reason}",
                f"shared memory: at most {self.shared_memory} of {self.available} bytes",
                f"work: {flops}, at least {self.bytes / 1e6:.4g} MB",
            ]
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What one flex_attention call would run.

    Args:
        device: name and compute capability of the GPU.
        call: shapes and dtype, in words.
        score_mod: your function as traced.
        mask_mod: your function as traced.
        score_mod_grad: Python text of the joint graph, which computes the gradients of the score
            and of captured tensors; None if no operand needs a gradient or score_mod is trivial.
        mask: None without a block_mask.
        passes: the kernels. The first is "forward", or "decode" for few queries. The backward pass
            is "backward" on Hopper GPUs; portable kernels are "grad_query" and "grad_key_value",
            "grad_key" and "grad_value" for wide heads, or "gradients" for few keys. Forward-mode
            derivatives have "jvp_forward", and second orders also "jvp_grad_query",
            "jvp_grad_key" and "jvp_grad_value". Empty for fp64, which has no kernels.
        options: the options in effect.
        unmasked_flops: operations of the forward pass on visible elements; None if unknown.
        notes: further remarks, such as which changes recompile.

    `print(report)` shows everything; in a notebook the report displays itself.
    """

    device: str
    call: str
    score_mod: Mod
    mask_mod: Mod
    score_mod_grad: str | None
    mask: Mask | None
    passes: tuple[Pass, ...]
    options: KernelOptions
    unmasked_flops: int | None
    notes: tuple[str, ...]

    def __str__(self) -> str:
        parts: list[tuple[str, Any]] = [
            ("call", self.call),
            ("device", self.device),
            ("score_mod", self.score_mod),
            ("mask_mod", self.mask_mod),
            ("gradient of score_mod", self.score_mod_grad),
            ("block mask", "none: every key is visited" if self.mask is None else self.mask),
            *((f"kernel {part.kernel}", part) for part in self.passes),
            ("options", _options(self.options)),
            ("notes", "\n".join(_wrapped(note) for note in self.notes)),
        ]
        return "\n".join(f"{title}\n{_indent(str(body))}" for title, body in parts if body)

    def to_html(self) -> str:
        """The report as HTML: the mask's picture, each kernel's minimum time, and the text.

        The times are lower bounds from the chip's data sheet, not measurements. For a chip that
        flexhop has no numbers for, operations are shown instead. Notebooks call this.
        """
        return page(self, None if self.mask is None else self.mask.picture)

    _repr_html_ = to_html

    @property
    def forward(self) -> Pass:
        """The forward kernel. IndexError if there is none, as for fp64."""
        return self.passes[0]

    @property
    def backward(self) -> tuple[Pass, ...]:
        """The kernels of the backward pass."""
        return self.passes[1:]


def _wrapped(note: str) -> str:
    return textwrap.fill(f"- {note}", width=96, subsequent_indent="  ")


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _options(options: KernelOptions) -> str:
    fields = ((f.name, getattr(options, f.name), f.default) for f in dataclasses.fields(options))
    chosen = [f"{name} = {value}" for name, value, default in fields if value != default]
    return "\n".join(chosen) or "defaults"
