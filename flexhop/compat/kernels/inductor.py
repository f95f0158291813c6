"""Inductor: IR, lowering registry, template class, autotuning.

Absorbs differences of 2.13: `always_freeze_layout`, `input_dtypes` of modification, the result of
`autotune_select_algorithm`, a pair, and the warning of `fx_utils` about unknown operators.
"""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sympy
import torch
from torch._inductor import config, ir, select_algorithm
from torch._inductor.lowering import empty_strided, lowerings, register_lowering
from torch._inductor.select_algorithm import (
    SymbolicGridFn,
    TritonTemplate,
    TritonTemplateKernel,
    autotune_select_algorithm,
    realize_inputs,
)
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import FloorDiv

from flexhop.compat.graphs import views
from flexhop.compat.kernels import isolated, tanh
from flexhop.compat.sizes import hint_of
from flexhop.options import debug
from flexhop.templates.printers import row_sums
from flexhop.templates.printers.holes import (
    INTEGERS,
    CopiedPairs,
    Dropout,
    ScatterSite,
    as_factor,
    buffer_name,
    draw_kept,
    scatter,
    text_of_pairs,
)

__all__ = [
    "Dropout",
    "Expr",
    "ScatterSite",
    "SymbolicGridFn",
    "V",
    "config",
    "ir",
    "lowerings",
    "make_template",
    "ops",
    "register_lowering",
]

Expr = int | sympy.Expr
aten = torch.ops.aten

# FakeTensorUpdater (2.13) knows PyTorch's own operators; its default for others is right but
# warns.
warnings.filterwarnings(
    "ignore", message="Please add support for subgraph args to function flexhop"
)

_MODIFICATION_TAKES_DTYPES = (
    "input_dtypes" in inspect.signature(TritonTemplateKernel.modification).parameters
)


class Subgraphs(list[Any]):
    """The lowered user functions of one kernel, how captured gradients are stored, dropout, pairs.

    A list, because Inductor (2.15) iterates over it and expects buffers.
    """

    def __init__(
        self,
        buffers: Sequence[Any],
        sites: Sequence[ScatterSite] = (),
        dropout: Dropout | None = None,
        pairs: CopiedPairs | None = None,
    ) -> None:
        super().__init__(buffers)
        self.sites, self.dropout, self.pairs = tuple(sites), dropout, pairs


class TemplateKernel(isolated.Marked, TritonTemplateKernel):
    """Fills the holes of our templates."""

    overrides = tanh.Overrides

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra_template_env_fns += [
            self.scatter_sites, self.row_sums, self.draw_kept, self.dropped, self.copied_pairs,
        ]  # fmt: skip

    @classmethod
    def gen_common_triton_imports(cls) -> str:
        """The imports of a generated file."""
        return super().gen_common_triton_imports() + tanh.IMPORT

    def modification(self, subgraph_number: int, output_name: str | None, **inputs: Any) -> str:
        """Text of a user function; indices are int32 and scores fp32, which 2.13 requires."""
        keywords = {buffer_name(name): text for name, text in inputs.items()}
        if _MODIFICATION_TAKES_DTYPES:
            keywords["input_dtypes"] = {
                buffer_name(name): torch.int32 if name in INTEGERS else torch.float32
                for name in inputs
            }
        return super().modification(subgraph_number, output_name, **keywords)

    def indexing(self, index: Any, **options: Any) -> Any:
        """An index; Inductor forgets the mask of a store if the output has one element."""
        found = super().indexing(index, **options)
        is_store = options.get("dense_indexing", False)
        if not (is_store and isinstance(index, sympy.Integer)) or self.template_mask is None:
            return found
        return dataclasses.replace(found, mask_vars=found.mask_vars | {self.template_mask})

    def size(self, name: str | None, index: int) -> str:
        """Text of a size, to compute with."""
        return as_factor(super().size(name, index))

    def stride(self, name: str | None, index: int | None = None) -> str:
        """Text of a stride, to compute with; of all strides without an index."""
        found = super().stride(name, index)
        return found if index is None else as_factor(found)

    def scatter_sites(self, *more: str) -> str:
        """Text that adds the gradient of every site to its buffer; more: inputs of `scatter`."""
        texts = (scatter(self, n, site, more) for n, site in enumerate(self._sites))
        return "\n".join(filter(None, texts)) or "pass"

    @property
    def _sites(self) -> Sequence[ScatterSite]:
        return getattr(self.subgraphs, "sites", ())

    def row_sums(self, part: str, *args: str) -> str:
        """Text of a part of the sums in registers, by the name of its function."""
        return getattr(row_sums, part)(self, self._sites, *args)

    def draw_kept(self, q_idx: str, kv_idx: str) -> str:
        """Text that computes which weights of a tile are kept; empty without dropout."""
        dropout = getattr(self.subgraphs, "dropout", None)
        return "" if dropout is None else draw_kept(self, dropout, q_idx, kv_idx)

    def dropped(self, value: str) -> str:
        """Text of a weight, or its gradient, after dropout."""
        dropout = getattr(self.subgraphs, "dropout", None)
        if dropout is None:
            return value
        both = f"kept, {value} * {dropout.factor!r}"
        return f"keep_drawn({both})" if dropout.is_float32 else f"tl.where({both}, 0.0)"

    def copied_pairs(self, part: str) -> str:
        """Text of a field of the CopiedPairs, or of its pointer."""
        return text_of_pairs(self, self.subgraphs.pairs, part)


_writes_only = contextvars.ContextVar("writes_only", default=False)


class _Files:
    """Inductor's cache of generated files, which does not execute those of our templates.

    Of the module, Inductor reads where its file is. Executing it takes 0.05 s, because Triton
    reads the source of every function. Whoever compiles the kernel executes it, usually a worker.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load(self, code: str, extra: str = "", **more: Any) -> Any:
        """The module of a generated file, or what stands for it."""
        if not _writes_only.get():
            return self._cache.load(code, extra, **more)
        key, path = self._cache.write(code, extra)
        return SimpleNamespace(key=key, __file__=path)


select_algorithm.PyCodeCache = _Files(select_algorithm.PyCodeCache)  # type: ignore[misc,assignment]


class Template(TritonTemplate):
    """A template whose kernels are TemplateKernels."""

    kernel_type = TemplateKernel

    def generate_and_load(self, *args: Any, **kwargs: Any) -> Any:
        """Every candidate passes through here, with these names, in 2.11 to 2.15."""
        token = _writes_only.set(True)
        try:
            result = super().generate_and_load(*args, **kwargs)
        finally:
            _writes_only.reset(token)
        if result is not None:
            debug.show("source", self.name, lambda: _kernel_source(result.mod.__file__))
        return result


def _kernel_source(path: str) -> str:
    """Our part of a generated file: from the kernel on."""
    text = Path(path).read_text()
    return text[min(text.find(mark) % len(text) for mark in ("@triton.jit", "@gluon.jit")) :]


def make_template(
    name: str, grid: Callable[..., Any], source: str, template: type[Any] = Template
) -> Any:
    """A template, whose kernels are compiled once.

    Compile workers get a kernel's text when it is generated, and again when the generated module
    is loaded, where every text ends with a newline. Two equal texts are one job, so the text must
    end with a newline already; Jinja strips one.

    2.11 freezes the layouts of template inputs itself; since 2.13 it must be requested.
    """
    source = source.rstrip("\n") + "\n\n"
    known = inspect.signature(TritonTemplate.__init__).parameters
    extra = {"always_freeze_layout": True} if "always_freeze_layout" in known else {}
    return template(name=name, grid=SymbolicGridFn(grid), source=source, **extra)


def select(
    name: str, choices: list[Any], inputs: Sequence[Any], layout: Any, generators: Any
) -> Any:
    """Benchmark the choices if there are several; 2.13 returns (node, choice)."""
    result = autotune_select_algorithm(
        name, choices, [x for x in inputs if is_ir(x)], layout, input_gen_fns=generators
    )
    return result[0] if isinstance(result, tuple) else result


def is_ir(value: object) -> bool:
    """Whether a lowering's operand is a tensor."""
    return isinstance(value, ir.IRNode) and not isinstance(value, sympy.Basic)


def is_symbolic_float(value: object) -> bool:
    """Whether a lowering's operand is a symbol for a floating-point number."""
    return isinstance(value, sympy.Expr) and value.is_integer is not True and not value.is_number


def realize(values: Sequence[Any]) -> list[Any]:
    """Give every tensor storage and a fixed layout; numbers pass through."""
    return [_realize(value) if is_ir(value) else value for value in values]


def _realize(value: Any) -> Any:
    value = realize_inputs(value)
    if not isinstance(value.maybe_get_layout(), ir.FixedLayout):
        value.freeze_layout()
    return views.without_inlining(views.with_dense_strides(value))


def alone(value: Any) -> Any:
    """`value` with its own storage, which its name denotes."""
    value = realize_inputs(value)
    # A view goes by the name of the buffer that it looks at.
    if isinstance(value.data, ir.BaseView):
        value = lowerings[aten.clone.default](value)
    return _realize(value)


def contiguous(value: Any) -> Any:
    """`value` with contiguous storage."""
    return _realize(ir.ExternKernel.require_contiguous(value))


def graph_module(subgraph: Any) -> torch.fx.GraphModule:
    """The FX graph of a subgraph operand."""
    return subgraph.graph_module if hasattr(subgraph, "graph_module") else subgraph


def note_subgraphs(result: Any, captures: Sequence[Any], buffers: Sequence[Any]) -> None:
    """Register captured SymInts with the template's buffer, their only way to the kernel.

    One whose value is known by now is a Python number, which Inductor does not expect.
    """
    template_buffer = result.data.data
    template_buffer.subgraph_inps = [x if is_ir(x) else sympy.sympify(x) for x in captures]
    template_buffer.subgraph_outs = list(buffers)


def empty(
    size: Sequence[Expr], stride: Sequence[Expr] | None, dtype: torch.dtype, device: Any
) -> Any:
    """Uninitialised tensor with storage."""
    return empty_strided(
        list(size), None if stride is None else list(stride), dtype=dtype, device=device
    )


def zeros(size: Sequence[Expr], dtype: torch.dtype, device: torch.device) -> Any:
    """Zero-filled contiguous tensor with storage, to be added to."""
    zero = 0.0 if dtype.is_floating_point else 0
    result = lowerings[aten.full.default](list(size), zero, dtype=dtype, device=device)
    result.realize()
    # Inductor pads strides that it may choose (1200 to 1216, say).
    return contiguous(result)


def empty_contiguous(size: Sequence[Expr], dtype: torch.dtype, device: torch.device) -> Any:
    """Uninitialised contiguous tensor with storage."""
    return contiguous(empty(size, None, dtype, device))


def device_of(tensor: Any) -> torch.device:
    """The device of a lowered tensor."""
    return tensor.get_device()


def fixed_layout(device: torch.device, dtype: torch.dtype, size: Any, stride: Any) -> Any:
    """Layout of a template's output."""
    return ir.FixedLayout(device, dtype, list(size), stride=list(stride))


def contiguous_layout(device: torch.device, dtype: torch.dtype, size: Sequence[Expr]) -> Any:
    """Layout of a template's output that only flexhop reads."""
    return fixed_layout(device, dtype, size, ir.FlexibleLayout.contiguous_strides(list(size)))


def as_expressions(values: Sequence[Any]) -> list[Any]:
    """SymInts and ints as sympy expressions."""
    return [v.node.expr if isinstance(v, torch.SymInt) else sympy.Integer(v) for v in values]


def as_expression(value: Any) -> Any:
    """A SymInt or int as a sympy expression."""
    return as_expressions([value])[0]


def quotient(size: Any, divisor: int) -> Any:
    """A size divided by a number and rounded down."""
    return FloorDiv(size, divisor)


def is_known(condition: Any) -> bool:
    """Whether a relation of sizes holds for certain, without adding a guard."""
    if condition in (True, False):
        return bool(condition)
    return V.graph.sizevars.statically_known_true(condition)


def operand_meta(position: int) -> Any:
    """Fake tensor of one operand of the node that is being lowered."""
    return V.graph.current_node.args[position].meta["val"]


def static(value: Any) -> int:
    """The value of a size, with a guard if it is symbolic."""
    return V.graph.sizevars.guard_int(value)


def is_constant(value: Any) -> bool:
    """Whether a size is the same in every call of the compiled graph."""
    return not isinstance(value, sympy.Basic) or bool(value.is_number)


def hint(value: Any) -> int:
    """The value of a size at this compilation, without a guard; 8192 if it depends on data."""
    return int(value) if is_constant(value) else hint_of(value, V.graph.sizevars)


def is_multiple(value: Any, factor: int) -> bool:
    """Whether a size is known to be a multiple, without adding a guard."""
    return V.graph.sizevars.statically_known_true(
        sympy.Eq(sympy.Mod(sympy.sympify(value), factor), 0)
    )


def fits_int32(value: Any) -> bool:
    """Whether a number is below 2**31; unknown sizes are judged by their hint."""
    return hint(value) < 2**31


def call_lowering(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an operator inside a lowering."""
    return lowerings[op](*args, **kwargs)


def output_meta() -> Any:
    """Fake results of the node that is being lowered."""
    return V.graph.current_node.meta["val"]


def is_autotuning() -> bool:
    """Whether the user requested a search over configurations."""
    return bool(config.max_autotune or config.max_autotune_gemm)
