"""A user's function lowered by Inductor to scalars that a kernel computes per score; products."""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import sympy
import torch
from torch._inductor import config, ir
from torch._inductor.exc import SubgraphLoweringException
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import make_pointwise, to_dtype
from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering
from torch._inductor.virtualized import V, ops
from torch._subclasses.fake_tensor import FakeTensorMode

from flexhop.compat.kernels.inductor import call_lowering, hint
from flexhop.compat.kernels.integers import INTEGER_POWERS, lower_quotient
from flexhop.compat.kernels.row_parts import ROW_PARTS
from flexhop.compat.kernels.short_rows import PRODUCTS, SHORT_ROWS, unrolled
from flexhop.compat.mods.location import line_of
from flexhop.compat.sizes import LONGEST_SUM
from flexhop.errors import ModLoweringError
from flexhop.templates.printers.holes import buffer_name

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default


def placeholder(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A scalar input of user functions, by the name of the template's variable."""
    layout = ir.FixedLayout(device, dtype, [], [])
    return ir.TensorBox.create(ir.InputBuffer(name=buffer_name(name), layout=layout))


class _ModLowering(PointwiseSubgraphLowering):
    """Records which node is being lowered, for the error; makes lengths of rows static."""

    current: torch.fx.Node | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        """Lower one node."""
        self.current = n
        if (quotient := lower_quotient(n, self.env.get(next(iter(n.args), None)))) is not None:
            return remembered(quotient)
        if torch.Tag.reduction in getattr(n.target, "tags", ()):
            _settle(self.env[n.args[0]].get_size())
        elif n.target in PRODUCTS:
            _settle(self.env[n.args[-1]].get_size()[-2:-1])
        return remembered(super().run_node(n))


def _settle(sizes: Sequence[Any]) -> None:
    """Make the symbolic lengths of a short row static: its sum has as many terms."""
    if math.prod(hint(size) for size in sizes) <= LONGEST_SUM:
        V.graph.sizevars.guard_int_seq(sizes)


def is_constant(value: Any) -> bool:
    """Whether Inductor would compute an element of a tensor again instead of reading it."""
    buffer = value.data if isinstance(value, (ir.TensorBox, ir.StorageBox)) else value
    buffer = buffer.data if isinstance(buffer, ir.StorageBox) else buffer
    return isinstance(buffer, ir.ComputedBuffer) and buffer.num_reads() == 0


def lower(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], mod: str, *, reads_constants: bool = False
) -> list[Any]:
    """Lower a traced user function; one scalar buffer per output.

    Args:
        graph: the function.
        inputs: its inputs, lowered.
        mod: its name in an error.
        reads_constants: whether elements of inputs that are constants are read from memory.

    Raises:
        ModLoweringError: it needs an operation that a kernel cannot compute per score.
    """
    _deepen_stack(len(graph.graph.nodes))
    # Inductor's own rule for sizes reads the node of the whole graph being lowered: ours.
    lowering = _ModLowering(
        graph,
        root_graph_lowering=V.graph,
        additional_lowerings={
            aten.sym_size.int: lambda tensor, axis: tensor.get_size()[axis],
            **INTEGER_POWERS,
            **ROW_PARTS,
            **SHORT_ROWS,
        },
    )
    # 2.11, 2.13: else a captured buffer is read as it was before the graph wrote to it, if its
    # first values were arithmetic, as those of `torch.zeros(n).scatter(...)` are.
    lowering.mutated_buffers.update(V.graph.mutated_buffers)
    try:
        # Short reductions, such as over a position in space, become sums of terms.
        with (
            config.patch(unroll_reductions_threshold=LONGEST_SUM + 1),
            # A broadcast of a long expression would ask for a buffer of its own.
            mock.patch.object(ir.StorageBox, "should_realize_on_reuse", lambda *a, **k: False),
            ir.ComputedBuffer.force_realize() if reads_constants else contextlib.nullcontext(),
            V.set_graph_handler(lowering),
        ):
            lowering.run(*map(boxed, inputs))
    except SubgraphLoweringException as error:
        node = lowering.current
        raise ModLoweringError(
            mod=mod,
            operation=str(node.target) if node is not None else "an operation",
            location=line_of(node),
            reason="it is no pointwise operation, or Inductor has no code for it",
        ) from error
    # A mod has one output, a joint graph several.
    outputs = lowering.graph_outputs
    outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    return [_scalar_buffer(_single(output)) for output in outputs]


@contextlib.contextmanager
def rehearsal() -> Iterator[Callable[[Any], Any]]:
    """A region in which user functions are lowered although no graph is compiled.

    Yields:
        A function that turns fake tensors and numbers into lowered captures.
    """

    def lowered(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return sympy.sympify(value)
        layout = ir.FixedLayout(value.device, value.dtype, value.size(), value.stride())
        return ir.TensorBox.create(ir.InputBuffer(name="captured", layout=layout))

    empty = torch.fx.Graph()
    empty.output(())
    handler = GraphLowering(torch.fx.GraphModule({}, empty))
    with V.set_graph_handler(handler), V.set_fake_mode(FakeTensorMode()), unrolled():
        yield lowered


def _deepen_stack(steps: int) -> None:
    """Let Python recurse along a function of so many steps, up to 50,000 calls deep.

    Inductor's values call each other, and later passes call them, too: the limit stays. Such calls
    need no stack of C.
    """
    sys.setrecursionlimit(max(sys.getrecursionlimit(), min(1000 + 10 * steps, 50_000)))


def boxed(value: Any) -> Any:
    """A lowered input as Inductor's rules want it, or a view would not broadcast."""
    return ir.TensorBox(value) if isinstance(value, (ir.StorageBox, ir.BaseView)) else value


def _single(output: Any) -> Any:
    """A result as kernels go on with it: what a mod computes in fp64, they round to fp32."""
    return to_dtype(output, torch.float32) if output.get_dtype() == torch.float64 else output


def _scalar_buffer(output: Any) -> Any:
    if isinstance(output, ir.ComputedBuffer):
        return output
    box = output.data
    if isinstance(box, ir.BaseView):
        # An element of a short row; the kernel must not compute the others.
        box = ir.Pointwise.create(
            device=box.get_device(), dtype=box.get_dtype(), inner_fn=box.make_loader(),
            ranges=box.get_size(),
        ).data  # fmt: skip
    layout = ir.FlexibleLayout(device=box.get_device(), dtype=box.get_dtype(), size=box.get_size())
    return ir.ComputedBuffer(name=None, data=box.data, layout=layout)


def as_stored(value: Any) -> Any:
    """IR of the same value, rounded to its dtype if that has 16 bits.

    Inductor computes with such values in fp32, and a kernel that stores one goes on with what it
    had before it was rounded.
    """
    dtype = value.get_dtype()
    if dtype not in (torch.float16, torch.bfloat16):
        return value

    def through_bits(x: Any) -> Any:
        bits = ops.to_dtype_bitcast(x, torch.int16, dtype)
        return ops.to_dtype_bitcast(bits, dtype, torch.int16)

    return make_pointwise(through_bits)(value)


def product(left: Any, right: Any) -> Any:
    """The elementwise product of two IR values, fp32.

    delta = rowsum(out * grad_out) takes what our kernels read: without the rounding, a difference
    would remain where grad_weight - delta cancels.
    """
    factors = (call_lowering(convert, as_stored(t), torch.float32) for t in (left, right))
    return call_lowering(aten.mul.Tensor, *factors)


def beside(value: Any, other: Any) -> Any:
    """IR of `value`, computed by the kernel that computes `other`, if Inductor agrees.

    It fuses two computations if one reads what the other computes, or both the same memory. What
    is read without being used is dropped when Triton compiles the kernel.

    Args:
        value: IR with the sizes of `other`.
        other: the result of a reduction, or the elements that one reads.
    """
    load, load_other = value.make_loader(), other.make_loader()

    def inner(index: Any) -> Any:
        # A choice between equal values: Inductor keeps it, Triton does not.
        found, read = load(index), load_other(index)
        return ops.where(ops.lt(read, read), found, found)

    return ir.Pointwise.create(
        device=value.get_device(), dtype=value.get_dtype(), inner_fn=inner, ranges=value.get_size()
    )


def remembered(value: Any) -> Any:
    """A lowered value, or several, whose elements are computed once in each place of a kernel.

    Inductor's rules inline a value where it is read. A chain such as `x = f(x, x)`, or a search
    that halves a range twenty times, would grow with two or three to the power of its length.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(map(remembered, value))
    if not isinstance(value, ir.TensorBox) or not isinstance(value.data, ir.StorageBox):
        return value
    computed = value.data.data
    if not isinstance(computed, ir.Pointwise):
        return value
    return ir.Pointwise.create(
        device=computed.get_device(), dtype=computed.get_dtype(),
        inner_fn=_once(computed.inner_fn), ranges=computed.get_size(),
    )  # fmt: skip


def _once(load: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    # Every trace of a function and every body of a kernel has a handler of its own.
    known: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    def element(index: Sequence[Any]) -> Any:
        of_handler = known.setdefault(V.get_ops_handler(), {})
        key = (*_scope(), *index)
        if key not in of_handler:
            of_handler[key] = load(index)
        return of_handler[key]

    return element


def _scope() -> tuple[Any, Any]:
    """The part of a kernel that is being written: a value of one branch is not seen in another."""
    return getattr(V.kernel, "compute", None), getattr(V.kernel, "_load_mask", None)
