"""Generate the GPU kernels of a function on a machine without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch

from flexhop.compat.offline import fake_gpu
from flexhop.offline.kernel import Kernel, kernels_of

__all__ = [
    "Generated",
    "Graph",
    "compiled_by",
    "generate",
    "generate_code",
    "generate_codes",
    "trace",
]

Loss = Callable[[Any], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Generated:
    """Inductor's output for one function.

    Args:
        forward: the wrapper with the forward kernels, as Python source.
        backward: likewise for the backward pass; None if not requested.
        result: the function's result, computed on the CPU; zeros from `generate_code`.
    """

    forward: str
    backward: str | None
    result: Any

    @functools.cached_property
    def kernels(self) -> list[Kernel]:
        """Every kernel, forward first, in the order in which the wrappers define them."""
        return kernels_of(self.forward) + kernels_of(self.backward or "")

    @property
    def templates(self) -> list[Kernel]:
        """flexhop's kernels, which come from templates."""
        return [kernel for kernel in self.kernels if kernel.is_template]

    def kernel(self, contains: str) -> Kernel:
        """The one kernel whose name contains a text.

        Raises:
            LookupError: there is none, or there are several.
        """
        found = [kernel for kernel in self.kernels if contains in kernel.name]
        return self._only(found, f"{contains!r} in their names")

    def kernel_with(self, function: str) -> Kernel:
        """The one kernel that contains a device function, e.g. "grad_query_blocks".

        Inductor numbers kernels in order; their functions tell which template they are.

        Raises:
            LookupError: there is none, or there are several.
        """
        found = [kernel for kernel in self.kernels if function in kernel.functions]
        return self._only(found, f"a function {function!r}")

    def _only(self, found: list[Kernel], what: str) -> Kernel:
        if len(found) != 1:
            names = [kernel.name for kernel in self.kernels]
            raise LookupError(f"{len(found)} kernels have {what}, expected 1. Kernels: {names}.")
        return found[0]


@dataclasses.dataclass(frozen=True)
class Graph:
    """One graph that reached Inductor.

    Args:
        codes: Inductor's output for each GPU.
        module: the same graph on the CPU.
    """

    codes: Sequence[str]
    module: torch.fx.GraphModule


_compile: ContextVar[Callable[[Kernel], Any] | None] = ContextVar("compile", default=None)


@contextlib.contextmanager
def compiled_by(compile_kernel: Callable[[Kernel], Any]) -> Generator[None, None, None]:
    """Compile the kernels of templates that are generated in here, as a GPU's first call would.

    If `compile_kernel` raises, the graph counts as one that does not compile: what is generated is
    what serves instead.
    """
    token = _compile.set(compile_kernel)
    try:
        yield
    finally:
        _compile.reset(token)


def _compile_all(code: str) -> None:
    if compile_kernel := _compile.get():
        for kernel in kernels_of(code):
            if kernel.is_template:
                compile_kernel(kernel)


Runner = Callable[[Graph], Callable[[list[Any]], Sequence[Any]]]


def generate(
    function: Callable[..., Any],
    *args: Any,
    capability: tuple[int, int] = (9, 0),
    grad: bool | Loss = False,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Generated:
    """Compile a function for a GPU that may be absent, and run it on the CPU.

    Args:
        function: traced without graph breaks; may call `flexhop.flex_attention`.
        *args: its arguments, with tensors on the CPU.
        capability: compute capability of the GPU, e.g. (9, 0); see `GPUS` in
            `flexhop.compat.offline.fake_gpu`.
        grad: whether to run backward too, which fills `.grad` of the arguments. A function of the
            result returns the scalar to differentiate; True means the sum of its first tensor.
        options: Inductor configuration.
        dynamic: as in `torch.compile`.

    Returns:
        The generated code and the CPU's result.
    """
    how = _Generation([capability], grad, options, dynamic)
    (generated,) = how.run(function, args, lambda module: torch.fx.Interpreter(module).run)
    return generated


def generate_code(
    function: Callable[..., Any],
    *args: Any,
    capability: tuple[int, int] = (9, 0),
    grad: bool | Loss = False,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Generated:
    """Like `generate`, without computing anything: the result and gradients are zeros.

    With thousands of keys, attention on a CPU takes longer than compiling all of its kernels.
    """
    capabilities = [capability]
    (generated,) = generate_codes(
        function, *args, capabilities=capabilities, grad=grad, options=options, dynamic=dynamic
    )
    return generated


def generate_codes(
    function: Callable[..., Any],
    *args: Any,
    capabilities: Sequence[tuple[int, int]],
    grad: bool | Loss = False,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
) -> list[Generated]:
    """Like `generate_code`, for several GPUs: until Inductor, graphs are those of the first one.

    Two thirds of the time of a call are spent there.
    """
    how = _Generation(capabilities, grad, options, dynamic)
    return how.run(function, args, lambda module: partial(fake_gpu.zeros_for, module))


class _Generation(NamedTuple):
    """How to generate code; fields as the arguments of `generate_codes`."""

    capabilities: Sequence[tuple[int, int]]
    grad: bool | Loss
    options: dict[str, Any] | None
    dynamic: bool | None

    def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        load: Callable[[torch.fx.GraphModule], Callable[..., Sequence[Any]]],
    ) -> list[Generated]:
        """The code of a function, for each GPU; `load` turns its graphs into functions on the
        CPU."""
        graphs: list[Graph] = []

        def runner(graph: Graph) -> Callable[[list[Any]], Sequence[Any]]:
            graphs.append(graph)
            run = load(graph.module)
            return lambda values: run(*values)

        compiled = trace(
            function, runner, *self.capabilities, options=self.options, dynamic=self.dynamic
        )
        result = compiled(*args)
        if self.grad:
            differentiate(result, self.grad)
        if not graphs:
            raise ValueError("The function has no tensor operation: nothing was generated.")
        forward, *backward = [list(map(canonical, graph.codes)) for graph in graphs]
        backwards = backward[0] if backward else [None] * len(forward)
        return [Generated(*codes, result) for codes in zip(forward, backwards, strict=True)]


def trace(
    function: Callable[..., Any],
    runner: Runner,
    *capabilities: tuple[int, int],
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Any]:
    """`torch.compile` on CPU tensors with GPU code; `runner` runs the graphs."""

    def compile_graph(
        module: torch.fx.GraphModule, inputs: Sequence[Any], keywords: dict[str, Any]
    ) -> Callable[..., Any]:
        codes = [
            fake_gpu.gpu_code(module, inputs, gpu, keywords, _compile_all) for gpu in capabilities
        ]
        return fake_gpu.on_cpu(runner(Graph(codes, module)))

    return fake_gpu.compile_graphs(
        function, compile_graph, options or {}, dynamic, capabilities[0]
    )


def differentiate(result: Any, grad: bool | Loss) -> None:
    """Run backward from the sum of the first tensor of `result`, or from `grad(result)`."""
    if callable(grad):
        loss = grad(result)
    else:
        first = result if isinstance(result, torch.Tensor) else result[0]
        loss = first.sum()
    loss.backward()


def canonical(code: str) -> str:
    """The code without the parts that differ between runs: graph numbers, cache paths and
    hashes."""
    code = re.sub(r"(?m)^# AOT ID: .*\n", "", code)
    code = re.sub(r"(?m)^# kernel path: .*\n", "", code)
    return re.sub(r"'backend_hash': '[0-9A-F]*'", "'backend_hash': ''", code)
