"""Inductor: IR, lowering registry, template class, autotuning.

Differences between versions are absorbed here: `always_freeze_layout` (2.13), `input_dtypes` of
modification (2.13), the result of `autotune_select_algorithm` (a pair from 2.13), and the warning
of `fx_utils` about operators that it does not know (2.13).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sympy
import torch
from torch._inductor import config, ir
from torch._inductor.exc import SubgraphLoweringException
from torch._inductor.lowering import empty_strided, lowerings, register_lowering
from torch._inductor.select_algorithm import (
    SymbolicGridFn,
    TritonTemplate,
    TritonTemplateKernel,
    autotune_select_algorithm,
    realize_inputs,
)
from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering
from torch._inductor.virtualized import V, ops

from flexhop import debug
from flexhop.compat.location import users_line
from flexhop.errors import ModLoweringError

__all__ = [
    "Expr",
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
# talks.
warnings.filterwarnings(
    "ignore", message="Please add support for subgraph args to function flexhop"
)

_MODIFICATION_TAKES_DTYPES = (
    "input_dtypes" in inspect.signature(TritonTemplateKernel.modification).parameters
)
_UNROLLED = 16  # elements of a reduction; the longest row of which gradients are kept
_INDEX_NAMES = ("b", "h", "q_idx", "kv_idx")


class ScatterSite(NamedTuple):
    """How one site's gradient is added to its buffer, as the template kernel needs it."""

    buffer: str  # name of the zero-filled buffer
    strides: tuple[Expr, ...]
    value: int  # number of the subgraph that computes the gradient per element
    indices: tuple[int, ...]  # numbers of the subgraphs that compute the indices
    uses_q_idx: bool  # whether any index depends on the query (the key) position
    uses_kv_idx: bool
    dtype: str  # of the buffer, as Triton writes it
    is_large: bool  # whether offsets can exceed int32


class Subgraphs(list[Any]):
    """The lowered user functions of one kernel, and how captured gradients leave it.

    A list, because Inductor (2.15) walks through it and expects buffers.
    """

    def __init__(self, buffers: Sequence[Any], sites: Sequence[ScatterSite] = ()) -> None:
        super().__init__(buffers)
        self.sites = tuple(sites)


class TemplateKernel(TritonTemplateKernel):
    """Fills the holes of our templates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra_template_env_fns.append(self.scatter_sites)

    def modification(self, subgraph_number: int, output_name: str | None, **inputs: Any) -> str:
        """Text of a user function; indices are int32 and scores fp32, which 2.13 wants to know."""
        keywords: dict[str, Any] = {}
        if _MODIFICATION_TAKES_DTYPES:
            keywords["input_dtypes"] = {
                name: torch.int32 if name in _INDEX_NAMES else torch.float32 for name in inputs
            }
        return super().modification(subgraph_number, output_name, **keywords, **inputs)

    def scatter_sites(self) -> str:
        """Text that adds the gradient of every site of the joint graph to its buffer."""
        sites = getattr(self.subgraphs, "sites", ())
        return "\n".join(self._scatter(n, site) for n, site in enumerate(sites)) or "pass"

    def _scatter(self, number: int, site: ScatterSite) -> str:
        inputs = {name: name for name in ("score", *_INDEX_NAMES, "grad_score")}
        lines = [self.modification(site.value, f"grad_{number}", **inputs)]
        index = "0"
        for axis, (subgraph, stride) in enumerate(zip(site.indices, site.strides, strict=True)):
            name = f"index_{number}_{axis}"
            lines.append(self.modification(subgraph, name, **inputs))
            wide = ".to(tl.int64)" if site.is_large else ""
            size = self.kexpr(self.rename_indexing(sympy.sympify(stride)))
            index += f" + {name}{wide} * {size}"
        lines.append(f"grad_{number} = tl.where(keep, grad_{number}, 0.0)")
        shape, mask = "keep", "keep"
        if not site.uses_kv_idx:
            # Every key of a query adds to one place: add them up first.
            lines.append(f"grad_{number} = tl.sum(grad_{number}, 1, keep_dims=True)")
            shape, mask = "q_idx", "None"
        if not site.uses_q_idx:
            lines.append(f"grad_{number} = tl.sum(grad_{number}, 0, keep_dims=True)")
            shape, mask = ("kv_idx" if site.uses_kv_idx else f"grad_{number}"), "None"
        zeros = f"tl.zeros_like({shape}).to(tl.int32)"
        pointer = self.args.input(site.buffer)
        lines.append(
            f"tl.atomic_add({pointer} + ({index} + {zeros}), grad_{number}.to({site.dtype}), "
            f"mask={mask}, sem='relaxed')"
        )
        return "\n".join(lines)


class Template(TritonTemplate):
    """A template whose kernels are TemplateKernels."""

    kernel_type = TemplateKernel

    def generate_and_load(self, *args: Any, **kwargs: Any) -> Any:
        """Every candidate comes through here, with these names, in 2.11 to 2.15."""
        result = super().generate_and_load(*args, **kwargs)
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
    """2.11 freezes layouts of template inputs by itself; since 2.13 it must be asked."""
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


def realize(values: Sequence[Any]) -> list[Any]:
    """Give every tensor storage and a fixed layout; numbers pass."""
    return [_realize(value) if is_ir(value) else value for value in values]


def _realize(value: Any) -> Any:
    value = realize_inputs(value)
    if not isinstance(value.maybe_get_layout(), ir.FixedLayout):
        value.freeze_layout()
    return value


def contiguous(value: Any) -> Any:
    """`value` with contiguous storage."""
    return _realize(ir.ExternKernel.require_contiguous(value))


def graph_module(subgraph: Any) -> torch.fx.GraphModule:
    """The FX graph behind a subgraph operand."""
    return subgraph.graph_module if hasattr(subgraph, "graph_module") else subgraph


def placeholder(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A scalar input of a user function, named like the template's variable."""
    layout = ir.FixedLayout(device, dtype, [], [])
    return ir.TensorBox.create(ir.InputBuffer(name=name, layout=layout))


class _ModLowering(PointwiseSubgraphLowering):
    """Remembers which node is being lowered, for the error."""

    current: torch.fx.Node | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        """Lower one node."""
        self.current = n
        return super().run_node(n)


def lower_pointwise(graph: torch.fx.GraphModule, inputs: Sequence[Any], mod: str) -> list[Any]:
    """Lower a traced user function; one scalar buffer per output.

    Args:
        graph: the function.
        inputs: its inputs, lowered.
        mod: what to call it in an error.

    Raises:
        ModLoweringError: it needs an operation that a kernel cannot do for one score.
    """
    # Inductor's own rule for sizes looks at the node of the whole graph that is lowered now: ours.
    lowering = _ModLowering(
        graph,
        root_graph_lowering=V.graph,
        additional_lowerings={aten.sym_size.int: lambda tensor, axis: tensor.get_size()[axis]},
    )
    try:
        # Short reductions, such as over a position in space, become sums of terms.
        with (
            config.patch(unroll_reductions_threshold=_UNROLLED + 1),
            V.set_graph_handler(lowering),
        ):
            lowering.run(*(ir.TensorBox(x) if isinstance(x, ir.StorageBox) else x for x in inputs))
    except SubgraphLoweringException as error:
        node = lowering.current
        raise ModLoweringError(
            mod=mod,
            operation=str(node.target) if node is not None else "an operation",
            location=_location(node),
            reason="it is no pointwise operation",
        ) from error
    outputs = lowering.graph_outputs
    outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    return [_scalar_buffer(output) for output in outputs]


def _location(node: torch.fx.Node | None) -> str:
    """The user's line in the stack that the tracer recorded for a node, if it recorded one."""
    return users_line((node.meta.get("stack_trace") if node is not None else None) or "")


def _scalar_buffer(output: Any) -> Any:
    if isinstance(output, ir.ComputedBuffer):
        return output
    box = output.data
    if isinstance(box, ir.BaseView):
        # An element of a short row, of which the kernel shall compute no more.
        box = ir.Pointwise.create(
            device=box.get_device(), dtype=box.get_dtype(), inner_fn=box.make_loader(),
            ranges=box.get_size(),
        ).data  # fmt: skip
    layout = ir.FlexibleLayout(device=box.get_device(), dtype=box.get_dtype(), size=box.get_size())
    return ir.ComputedBuffer(name=None, data=box.data, layout=layout)


def note_subgraphs(result: Any, captures: Sequence[Any], buffers: Sequence[Any]) -> None:
    """Tell the template's buffer about captured SymInts, which reach the kernel by this alone."""
    template_buffer = result.data.data
    template_buffer.subgraph_inps = list(captures)
    template_buffer.subgraph_outs = list(buffers)


def empty(
    size: Sequence[Expr], stride: Sequence[Expr] | None, dtype: torch.dtype, device: Any
) -> Any:
    """Uninitialised tensor with storage."""
    return empty_strided(
        list(size), None if stride is None else list(stride), dtype=dtype, device=device
    )


def zeros(size: Sequence[Expr], dtype: torch.dtype, device: torch.device) -> Any:
    """Zero-filled tensor with storage, to be added to."""
    zero = 0.0 if dtype.is_floating_point else 0
    result = lowerings[aten.full.default](list(size), zero, dtype=dtype, device=device)
    result.realize()
    return _realize(result)


def device_of(tensor: Any) -> torch.device:
    """Where a lowered tensor will be."""
    return tensor.get_device()


def fixed_layout(device: torch.device, dtype: torch.dtype, size: Any, stride: Any) -> Any:
    """Layout of a template's output."""
    return ir.FixedLayout(device, dtype, list(size), stride=list(stride))


def contiguous_layout(device: torch.device, dtype: torch.dtype, size: Sequence[Expr]) -> Any:
    """Layout of a template's output that only we read."""
    return fixed_layout(device, dtype, size, ir.FlexibleLayout.contiguous_strides(list(size)))


def as_expressions(values: Sequence[Any]) -> list[Any]:
    """SymInts and ints as sympy expressions."""
    return [v.node.expr if isinstance(v, torch.SymInt) else sympy.Integer(v) for v in values]


def as_expression(value: Any) -> Any:
    """A SymInt or int as a sympy expression."""
    return as_expressions([value])[0]


def is_known(condition: Any) -> bool:
    """Whether a relation of sizes holds for certain, without adding a guard."""
    return condition is True or V.graph.sizevars.statically_known_true(condition)


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
    """The value of a size at this compile, without a guard; 8192 if it depends on data."""
    if not isinstance(value, sympy.Basic) or value.is_number:
        return int(value)
    sizevars = V.graph.sizevars
    if hasattr(sizevars, "optimization_hint"):
        return int(sizevars.optimization_hint(value, fallback=8192))
    return int(sizevars.size_hint(value, fallback=8192))


def is_multiple(value: Any, factor: int) -> bool:
    """Whether a size is known to be a multiple, without adding a guard."""
    return V.graph.sizevars.statically_known_true(
        sympy.Eq(sympy.Mod(sympy.sympify(value), factor), 0)
    )


def fits_int32(value: Any) -> bool:
    """Whether a number stays below 2**31; unknown sizes are judged by their hint."""
    return hint(value) < 2**31


def call_lowering(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an operator inside a lowering."""
    return lowerings[op](*args, **kwargs)


def output_meta() -> Any:
    """Fake results of the node that is being lowered."""
    return V.graph.current_node.meta["val"]


def register_tanh_approx(op: Any) -> None:
    """Lower an approximate tanh to one PTX instruction on the GPU, and to tanh elsewhere."""

    def lower(x: Any) -> Any:
        dtype = torch.float64 if x.get_dtype() == torch.float64 else torch.float32
        exact = x.get_device().type != "cuda" or dtype == torch.float64
        loader = x.make_loader()

        def inner(index: Any) -> Any:
            value = ops.to_dtype(loader(index), dtype)
            if exact:
                return ops.tanh(value)
            return ops.inline_asm_elementwise(
                value, asm="tanh.approx.f32 $0, $1;", constraints="=f,f", dtype=torch.float32
            )

        return ir.Pointwise.create(
            device=x.get_device(), dtype=dtype, inner_fn=inner, ranges=x.get_size()
        )

    register_lowering(op, type_promotion_kind=None)(lower)


def is_autotuning() -> bool:
    """Whether the user asked to search among configurations."""
    return bool(config.max_autotune or config.max_autotune_gemm)
