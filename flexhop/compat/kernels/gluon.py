"""Inductor: templates in Gluon, Triton's dialect for one architecture.

They take the path of Triton templates: the same code renders, caches, compiles and launches them.
Two things differ: the text around a kernel, and how operations of the user's functions are
printed, because a Gluon tensor has a layout and Inductor writes none. Names are the same in torch
2.11 to 2.15.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._inductor.codegen.triton import triton_type
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.functions import FloorDiv

from flexhop.compat.graphs import views
from flexhop.compat.kernels import inductor, tanh
from flexhop.compat.kernels.functions import import_from
from flexhop.templates.printers import gluon_sums
from flexhop.templates.printers.holes import ScatterSite

__all__ = ["fill_up", "keep_apart", "make_template", "suits_bulk_copies"]

_READS = "KEEPS_READS"  # constant of a template that defines `read_captured`
_MASK = 1  # number of mask_mod among a kernel's subgraphs
_BULK_BYTES = 16  # alignment of the tensor memory accelerator's addresses and strides
_RUNTIME = "flexhop.compat.kernels.gluon_runtime"

_EQUALITY = r"compared\((\w+)\) ([=!]=) compared\((\w+)\)"

_IMPORTS = f"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
{import_from(_RUNTIME)}from {_RUNTIME} import (
    compared, compared_by_mask, equated_by_mask, read_kept,
)
"""


def _comparison(sign: str) -> Any:
    return staticmethod(lambda a, b: f"compared({a}) {sign} compared({b})")


class GluonOverrides(tanh.Functions):
    """Operations whose Triton text Gluon does not accept; all others stay."""

    @classmethod
    def constant(cls, value: Any, dtype: torch.dtype) -> str:
        """A scalar, which adopts the layout of the other operand; `tl.full` would create a tensor
        without one."""
        return cls._shaped_constant(value, dtype)

    @classmethod
    def _shaped_constant(cls, value: Any, dtype: torch.dtype, shape: Any = None) -> str:
        number = torch._prims_common.dtype_to_type(dtype)(value)
        text = repr(number)
        if isinstance(number, float) and text.strip("-") in ("inf", "nan"):
            text = f'float("{text}")'
        return f"gl.to_tensor({text}).to({triton_type(dtype)})"

    # Comparisons see operands through a function, in mask_mod through `compared_by_mask` and
    # `equated_by_mask`, of which a template may have its own; see gluon_runtime.py.

    lt, le = _comparison("<"), _comparison("<=")
    gt, ge = _comparison(">"), _comparison(">=")
    eq, ne = _comparison("=="), _comparison("!=")


def _without_constants(text: str) -> str:
    """Text of a function in which equality with a constant sees its operand as it is.

    LLVM multiplies in place of dividing for `x % 3 == 0`, if it sees the remainder.
    """
    constants = "|".join(re.findall(r"(\w+) = gl\.to_tensor\(", text))
    if not constants:
        return text
    return re.sub(rf"compared\((\w+)\) ([=!]=) compared\(({constants})\)", r"\1 \2 \3", text)


class GluonKernel(inductor.TemplateKernel):
    """Fills the holes of our Gluon templates."""

    overrides = GluonOverrides
    fixed_name = ""  # of the template
    imports = ""  # of its dialect

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Triton visits every line of a function, once for each kind of arguments. Constants in
        # each function were half of what it visited, so they are global.
        self._constants, self.defines = self.defines, ""
        self._functions = ""
        self.extra_template_env_fns += [
            self.output_pointer, self.constants, self.also_named, self.start_sums,
            self.add_captured, self.finish_captured, self.add_sites, self.finish_sites,
        ]  # fmt: skip

    def modification(self, subgraph_number: int, output_name: str | None, **inputs: Any) -> str:
        """Text of a user function; see inductor.TemplateKernel."""
        text = _without_constants(super().modification(subgraph_number, output_name, **inputs))
        if subgraph_number == _MASK:
            text = re.sub(_EQUALITY, r"equated_by_mask(\1) \2 equated_by_mask(\3)", text)
            return text.replace("compared(", "compared_by_mask(")
        return text.replace("tl.load(", "read_captured(") if _READS in self.meta else text

    def render(self, *args: Any, **kwargs: Any) -> Any:
        """The text with holes that are filled at the end."""
        rendered = super().render(*args, **kwargs)
        self._functions = rendered._code.partition("\n@gluon.jit")[2]  # behind the kernel
        return rendered

    def gen_argdefs(self) -> str:
        """Names of the kernel's arguments that device functions read, or of one if they read none.

        A function passes on what the functions that it calls read. Triton visits each name, once
        for each kind of arguments; most arguments are read by the kernel alone.
        """
        hole = super().gen_argdefs()
        every = self.render_hooks[hole]
        self.render_hooks[hole] = lambda: ", ".join(self._read_names(every().split(", ")))
        return hole

    def _read_names(self, names: list[str]) -> list[str]:
        read = set(re.findall(r"\w+", self._functions))
        return [name for name in names if name in read] or names[:1]

    @classmethod
    def gen_common_triton_imports(cls) -> str:
        """The imports of a generated file."""
        common = inductor.TemplateKernel.gen_common_triton_imports()
        return common + _IMPORTS + cls.imports

    def jit_lines(self) -> str:
        """The decorators of the kernel."""
        return super().jit_lines().replace("@triton.jit", "@gluon.jit")

    def def_kernel(self, *argnames: str) -> str:
        """The hole of the kernel's signature, with the name of `also_named`."""
        hole = super().def_kernel(*argnames)
        head = self.render_hooks[hole]
        new = f"def {self.fixed_name}("
        self.render_hooks[hole] = lambda: head().replace(f"def {self.kernel_name}(", new)
        return hole

    def constants(self) -> str:
        """The constants, as global names that all functions read."""
        pattern = r"(?m)^(\w+) : tl\.constexpr = (.*)$"
        return re.sub(pattern, r"\1 = gl.constexpr(\2)", self._constants).strip()

    def also_named(self) -> str:
        """Text that aliases the kernel to Inductor's name for it.

        Inductor's names number the kernels of a graph. Triton's cache is keyed by a function's
        text, so a function with its own name is found there regardless of the graph.
        """
        return f"{self.kernel_name} = {self.fixed_name}"

    @property
    def sites(self) -> Sequence[ScatterSite]:
        """The sites to which gradients of captured tensors are added."""
        return getattr(self.subgraphs, "sites", ())

    def start_sums(self) -> str:
        """The empty sums of captured gradients that a consumer keeps."""
        return gluon_sums.start(self.sites)

    def add_captured(self) -> str:
        """A line that accumulates gradients of captured tensors; empty if there are none."""
        return gluon_sums.add(self, self.sites)

    def finish_captured(self) -> str:
        """A line that adds a head's sums to memory; empty if none are kept."""
        return gluon_sums.finish(self, self.sites)

    def add_sites(self) -> str:
        """The body of add_captured_grads."""
        return gluon_sums.add_sites(self, self.sites)

    def finish_sites(self) -> str:
        """The body of finish_sums."""
        return gluon_sums.finish_sites(self, self.sites)

    def output_pointer(self) -> str:
        """Name of the pointer to the result, which the kernel stores itself."""
        return self.args.output(self.output_node.get_name())


class GluonTemplate(inductor.Template):
    """A template whose kernels are GluonKernels."""

    kernel_type = GluonKernel


def make_template(
    name: str, grid: Callable[..., Any], source: str, imports: str = ""
) -> GluonTemplate:
    """A Gluon template; see `inductor.make_template`.

    imports: import lines for names that the dialect's text uses besides Gluon itself.
    """
    source = source.rstrip("\n") + "\n\n\n{{constants()}}\n{{also_named()}}\n"
    template = inductor.make_template(name, grid, source, GluonTemplate)
    template.kernel_type = type(
        "GluonKernel", (GluonKernel,), {"fixed_name": name, "imports": imports}
    )
    return template


class _Removed(OrderedSet[str]):
    """Buffers that Inductor removes because nothing reads them, except those in `kept`."""

    kept: OrderedSet[str]

    def add(self, name: str) -> None:
        """Remove a buffer, if allowed."""
        if name not in self.kept:
            super().add(name)


def keep_apart(result: Any) -> None:
    """Forbid Inductor to fuse later operations, or to remove the result if nothing reads it.

    The kernel has no place for other code, and it stores its result in any case: another of its
    results may be the one that is read.
    """
    result.realize()
    graph = V.graph
    graph.no_fuse_buffer_names.add(result.get_name())
    if not isinstance(graph.removed_buffers, _Removed):
        removed = _Removed(graph.removed_buffers)
        removed.kept = OrderedSet()
        graph.removed_buffers = removed
    graph.removed_buffers.kept.add(result.get_name())


def suits_bulk_copies(value: Any) -> bool:
    """Whether the tensor memory accelerator can copy tiles of a realized tensor.

    The innermost dimension must be contiguous; the first element and all rows must be at multiples
    of 16 bytes.
    """
    unit = _BULK_BYTES // value.get_dtype().itemsize
    *strides, last = value.get_stride()
    return (
        inductor.is_known(last == 1)
        and views.starts_aligned(value, _BULK_BYTES)
        and all(inductor.is_multiple(stride, unit) and stride != 0 for stride in strides)
    )


def fill_up(length: Any, multiple: int) -> Any:
    """The padding of a length to the next multiple."""
    length = sympy.sympify(length)
    return count_blocks(length, multiple) * multiple - length


def count_blocks(length: Any, size: int) -> Any:
    """Blocks of `size` rows that hold `length` of them."""
    return FloorDiv(length + size - 1, size)
