"""Inductor: a C++ kernel of ours in a graph, and user functions as loops inside of it.

The names below are the same in torch 2.11 to 2.15, but for KernelGroup's loops (unchanged).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import sympy
import torch
from torch._inductor import ir
from torch._inductor.codegen.cpp import CppKernelProxy, KernelGroup, ParallelDepth
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP, cexpr_index
from torch._inductor.loop_body import LoopBody
from torch._inductor.utils import Placeholder, parallel_num_threads, sympy_index_symbol_with_prefix
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.symbol import SymT

from flexhop.compat.kernels.inductor import Expr, is_ir
from flexhop.templates.printers.holes import buffer_name

__all__ = ["Printer", "Stored", "emit", "threads"]


class Stored(NamedTuple):
    """A result of a user function that loops store.

    value: makes it. name: C++ name of the pointer that it goes to. dtype: of what is stored.
    rows, columns: whether it differs between them.
    """

    value: Callable[[], Any]
    name: str
    dtype: torch.dtype
    rows: bool = True
    columns: bool = True


def integer(name: str) -> sympy.Symbol:
    """A number that C++ code of ours knows by this name."""
    return sympy.Symbol(name, integer=True, nonnegative=True)


class _Substitution(V.WrapperHandler):  # type: ignore[name-defined, misc]
    """Gives a user function its inputs; reads of tensors were made safe before (indices.py)."""

    def __init__(self, inputs: Mapping[str, Callable[[], Any]]) -> None:
        super().__init__(V.ops)
        self._inputs = {buffer_name(name): make for name, make in inputs.items()}

    def load(self, name: str, index: Any) -> Any:
        """A number: an input, or an element of a captured tensor."""
        given = self._inputs.get(name)
        return self._inner.load(name, index) if given is None else given().value

    def indirect_indexing(self, index: Any, size: Any, *_: Any, **__: Any) -> Any:
        """An index that is inside."""
        return self._inner.indirect_indexing(index, size, check=False, wrap_neg=False)


class Printer:
    """Text of operands, for a kernel that is being written."""

    def __init__(self, kernel: Any, names: Mapping[str, str]) -> None:
        self._kernel = kernel
        self._names = names

    def dtype(self, dtype: torch.dtype) -> str:
        """The C++ type."""
        return DTYPE_TO_CPP[dtype]

    def number(self, value: Expr) -> str:
        """A size, or a number made of sizes."""
        return cexpr_index(self._kernel.rename_indexing(sympy.sympify(value)))

    def pointer(self, tensor: Any) -> str:
        """Where a tensor begins; one that the kernel writes to beside its result, too."""
        name, offset = self._names[tensor.get_name()], tensor.get_layout().offset
        dtype = DTYPE_TO_CPP[tensor.get_dtype()]
        return f"(const_cast<{dtype}*>({name}) + {self.number(offset)})"

    def loops(
        self, stored: Sequence[Stored], inputs: Mapping[str, Callable[[], Any]],
        dtypes: Mapping[str, torch.dtype], sizes: tuple[Any, Any], step: Any,
    ) -> str:  # fmt: skip
        """Loops over a rectangle of scores.

        Args:
            stored: what to store; all results with equal `rows` and `columns`.
            inputs: of the user function, by name: how to make their IR.
            dtypes: of the pointers that `inputs` read.
            sizes: rows and columns.
            step: from one row to the next of everything that is stored.
        """
        group = KernelGroup()
        args = group.args
        args.input_buffers.update(self._names | {name: name for name in dtypes})
        args.output_buffers.update({one.name: one.name for one in stored})
        args.sizevars = self._kernel.args.sizevars
        ranges = {
            sympy_index_symbol_with_prefix(SymT.INDEX, i): sympy.sympify(size)
            for i, size in enumerate(sizes)
        }
        variables = list(ranges)

        def body(index: Sequence[Any], _: Sequence[Any]) -> None:
            row, column = index
            with _at(row, column), V.set_ops_handler(_Substitution(inputs)):
                for one in stored:
                    ops.store(one.name, row * step + column, one.value())

        loops = LoopBody(body, (variables, ()), ranges, variables, ())
        proxy = CppKernelProxy(group)
        types = dict(dtypes) | {one.name: one.dtype for one in stored}
        # Pointers of ours are no buffers of the graph, which Inductor asks for their dtypes.
        with mock.patch.object(V.graph, "get_dtype", _with_types(types)):
            proxy.codegen_loop_bodies([loops], [(tuple(sizes), ())])
            with mock.patch.object(
                proxy.loop_nest, "max_parallel_depth", lambda: ParallelDepth(0, 0)
            ):
                group.finalize_kernel(proxy, [])
        # Our loops stand in lambdas with an `auto` argument. C++ does not know types there: `<`
        # would compare.
        return group.loops_code.getvalue().replace(".to<", ".template to<")


_places: list[tuple[Any, Any]] = []


@contextlib.contextmanager
def _at(row: Any, column: Any) -> Iterator[None]:
    _places.append((row, column))
    try:
        yield
    finally:
        _places.pop()


def here() -> tuple[Any, Any]:
    """Row and column of the score that is being printed."""
    return _places[-1]


def _with_types(known: Mapping[str, torch.dtype]) -> Callable[[str], torch.dtype]:
    real = V.graph.get_dtype
    return lambda name: known[name] if name in known else real(name)


class _Kernel(ir.CppTemplateBuffer):
    """A kernel in the graph; symbols of its user functions are known to the scheduler."""

    def __init__(
        self, layout: Any, inputs: Sequence[Any], written: Sequence[Any], symbols: Any, text: Any
    ) -> None:
        make = functools.partial(_make_render, self, [*inputs, *written], text)
        super().__init__(layout, [*inputs, *written], make, None, None)  # type: ignore[arg-type]
        self.symbols = symbols
        device = layout.device
        self.outputs = [
            self, *(ir.MutationOutput(ir.NoneLayout(device=device), one, self) for one in written)
        ]  # fmt: skip

    def get_outputs(self) -> list[Any]:
        """The result, then what is written beside it."""
        return list(self.outputs or ())

    def get_free_symbol_uses(self, unbacked_only: bool = False) -> Any:
        """Symbols that the wrapper must hand to the kernel."""
        found = super().get_free_symbol_uses(unbacked_only)
        for value in self.symbols:
            if is_ir(value):
                found |= value.get_free_symbol_uses(unbacked_only)
            elif isinstance(value, sympy.Basic):
                found |= ir.get_free_symbols(value, unbacked_only)
        return found


class _Text:
    """What CppTemplateKernel asks of a template."""

    def __init__(self, operands: Sequence[Any], text: Callable[[Printer], str]) -> None:
        self._operands = operands
        self._text = text

    def render(self, kernel: Any, node: Any) -> str:
        """The file of the kernel; its signature is filled in last, when all sizes are known."""
        tensors = {one.get_name(): one for one in self._operands}
        names = {name: f"arg{i}" for i, name in enumerate(tensors)}
        signature = kernel.def_kernel(
            inputs={names[name]: tensor for name, tensor in tensors.items()},
            outputs={"result": node},
        )
        body = self._text(Printer(kernel, names | {node.get_name(): "result"}))
        head = CppTemplate.header(None).getvalue()  # type: ignore[arg-type]
        before, inside = body.split("KERNEL_BODY")
        profile = kernel.maybe_codegen_profile()
        return f'{head}\n{before}\nextern "C"\n{signature}\n{{\n{profile}\n{inside}\n}}\n'


def _make_render(
    node: Any, operands: Sequence[Any], text: Callable[[Printer], str], *_: Any, **__: Any
) -> tuple[Any, Callable[[], str]]:
    # The kernel writes its result even if only what it writes beside it is used.
    V.graph.removed_buffers.discard(node.get_name())
    name = str(Placeholder.KERNEL_NAME)
    kernel = CppTemplateKernel(kernel_name=name, num_threads=parallel_num_threads())
    return kernel, functools.partial(kernel.render, _Text(operands, text), node=node)


def emit(
    layout: Any, inputs: Sequence[Any], written: Sequence[Any], symbols: Sequence[Any],
    text: Callable[[Any, Printer], str],
) -> Any:  # fmt: skip
    """Put a kernel into the graph; its result.

    Args:
        layout: of the result.
        inputs: tensors that it reads, with storage.
        written: tensors that it writes beside its result, with storage of their own.
        symbols: numbers and tensors whose symbols it may need beside those of its tensors.
        text: of (the result, printer), declarations and the body, with KERNEL_BODY between them.
    """
    unique = {one.get_name(): one for one in inputs}
    holder: list[Any] = []
    kernel = _Kernel(
        layout, list(unique.values()), written, symbols,
        lambda printer: text(holder[0], printer),
    )  # fmt: skip
    holder.append(kernel)
    # Our text has no place for operations that Inductor would fuse.
    V.graph.no_fuse_buffer_names.add(kernel.get_name())
    return ir.TensorBox.create(kernel)


def threads() -> int:
    """How many threads a kernel will have."""
    return parallel_num_threads()
