"""A fake NVIDIA GPU, for code generation only.

Inductor queries torch.cuda, Dynamo's device interface and Triton's driver about the GPU that it
generates code for. `fake_gpu()` answers instead, on CPU-only and CUDA builds alike.

AOTAutograd cannot trace on fake "cuda" tensors without a GPU: the C++ autograd engine asks the
device. So graphs are traced on CPU tensors, and `gpu_code()` moves the finished graph to the GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._dynamo.device_interface as device_interface
import torch._inductor.compile_fx as inductor
import torch._inductor.config as inductor_config
import torch._inductor.runtime.hints as inductor_hints
import torch._inductor.utils as inductor_utils
import torch._subclasses.fake_tensor as fake_tensor
import torch.utils._pytree as pytree
import torch.utils._triton as triton_utils
import triton
from torch._guards import TracingContext, detect_fake_mode
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from triton.backends.compiler import GPUTarget

from flexhop.compat.graphs import inline
from flexhop.compat.modes import assumed
from flexhop.compat.offline import fake_methods
from flexhop.compat.offline.moving import copied, move_graph, trace_on_cpu, values_of

__all__ = ["GPUS", "Gpu", "compile_graphs", "fake_gpu", "gpu_code", "on_cpu", "zeros_for"]

GraphModule = torch.fx.GraphModule
CompileGraph = Callable[[GraphModule, Sequence[Any], dict[str, Any]], Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that code generation needs.

    Args:
        name: product name.
        capability: compute capability, e.g. (9, 0).
        multiprocessors: number of SMs.
        shared_memory: most shared memory of a thread block after opting in, in bytes.
        threads: most threads resident on one SM.
        l2_cache: size of the L2 cache in bytes.
        memory: bytes of device memory.

    Source: NVIDIA's CUDA C++ programming guide, table of technical specifications.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    threads: int
    l2_cache: int
    memory: int

    @property
    def architecture(self) -> int:
        """80 for capability (8, 0), 120 for (12, 0)."""
        return self.capability[0] * 10 + self.capability[1]


GPUS: dict[tuple[int, int], Gpu] = {
    gpu.capability: gpu
    for gpu in (
        Gpu("NVIDIA A100", (8, 0), 108, 166912, 2048, 40 << 20, 80 << 30),
        Gpu("NVIDIA A10", (8, 6), 72, 101376, 1536, 6 << 20, 24 << 30),
        Gpu("NVIDIA L4", (8, 9), 58, 101376, 1536, 48 << 20, 24 << 30),
        Gpu("NVIDIA H100", (9, 0), 132, 232448, 2048, 50 << 20, 80 << 30),
        Gpu("NVIDIA B200", (10, 0), 148, 232448, 2048, 126 << 20, 180 << 30),
        Gpu("NVIDIA RTX 5090", (12, 0), 170, 101376, 1536, 96 << 20, 32 << 30),
    )
}


@contextlib.contextmanager
def fake_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[Gpu]:
    """Let Inductor generate code for a GPU that may be absent.

    Args:
        capability: one of the keys of `GPUS`.

    Yields:
        The properties that Inductor sees.

    Raises:
        ValueError: the properties of this capability are unknown.

    Do not launch anything inside. Not reentrant, not thread-safe.
    """
    if capability not in GPUS:
        raise ValueError(f"capability must be one of {sorted(GPUS)}, but is {capability}.")
    gpu = GPUS[capability]
    with contextlib.ExitStack() as stack:
        for patch in _patches(gpu):
            stack.enter_context(patch)
        stack.enter_context(_triton_driver(gpu))
        stack.enter_context(_fresh_device_answers())
        yield gpu


def _properties(gpu: Gpu) -> SimpleNamespace:
    """The result of `torch.cuda.get_device_properties`, with the fields of all versions."""
    major, minor = gpu.capability
    return SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        multi_processor_count=gpu.multiprocessors,
        total_memory=gpu.memory,
        warp_size=32,
        max_threads_per_multi_processor=gpu.threads,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=gpu.shared_memory,
        shared_memory_per_multiprocessor=gpu.shared_memory + 1024,
        L2_cache_size=gpu.l2_cache,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        uuid="0",
        memory_clock_rate=2_000_000,  # kHz; only roofline estimates use this and the next two
        memory_bus_width=5120,
        clock_rate=1_900_000,
    )


def _patches(gpu: Gpu) -> Iterator[Any]:
    properties = _properties(gpu)
    shared = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "synchronize": None,
    }
    cuda = shared | {
        "is_initialized": False,
        "get_device_capability": gpu.capability,
        "get_device_name": gpu.name,
        "is_tf32_supported": True,
        "is_bf16_supported": True,
        "_lazy_init": None,
        # Dynamo saves and restores the generator's state around every trace.
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    interface = shared | {
        "get_compute_capability": gpu.architecture,
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
    }
    yield from _answer(torch.cuda, cuda)
    yield from _answer(device_interface.CudaInterface, interface, static=True)
    yield from _answer(device_interface.CudaInterface.Worker, interface, static=True)
    yield from _answer(triton_helpers, {"set_driver_to_gpu": None})
    yield from _answer(torch._C, {"_cuda_cudaCachingAllocator_is_enabled": True}, create=True)
    yield mock.patch.object(torch.version, "cuda", torch.version.cuda or "13.0")
    yield mock.patch.object(FakeTensorMode, "avoid_device_init", True)
    # 2.11 initializes the device when a fake tensor is created on it; 2.13 and later do not.
    yield from _answer(fake_tensor, {"init_gpu_context": None})
    # These initialise CUDA before they check the kind of tensor.
    yield mock.patch.object(torch.Tensor, "copy_", fake_methods.copy)
    yield mock.patch.object(torch.Tensor, "__invert__", fake_methods.invert)
    yield fake_methods.Slices()
    # Nor can formulas that take derivatives be traced there.
    yield mock.patch.object(inline, "trace", trace_on_cpu(inline.trace))


def _answer(
    owner: Any, answers: dict[str, Any], static: bool = False, create: bool = False
) -> Iterator[Any]:
    """Patches that make functions of `owner` return constants, if this version has them."""
    for name, value in answers.items():
        if create or hasattr(owner, name):
            function = _constant(value)
            function = staticmethod(function) if static else function
            yield mock.patch.object(owner, name, function, create=not hasattr(owner, name))


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


class _Driver:
    """Triton's driver, as far as code generation uses it."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.gpu.architecture, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, *_: object) -> int:
        return 0

    def get_device_capability(self, *_: object) -> tuple[int, int]:
        return self.gpu.capability


@contextlib.contextmanager
def _triton_driver(gpu: Gpu) -> Iterator[None]:
    config = triton.runtime.driver
    with mock.patch.object(config, "_active", _Driver(gpu)):
        yield


@contextlib.contextmanager
def _fresh_device_answers() -> Iterator[None]:
    """Clear cached answers about the device, before and after."""
    modules = (inductor_utils, triton_utils, inductor_hints, device_interface)
    cached = [
        function
        for module in modules
        for function in vars(module).values()
        if hasattr(function, "cache_clear")
    ]
    cached.append(inductor_hints.DeviceProperties.create)
    try:
        for function in cached:
            function.cache_clear()
        yield
    finally:
        for function in cached:
            function.cache_clear()


def compile_graphs(
    function: Callable[..., Any],
    compile_graph: CompileGraph,
    options: dict[str, Any],
    dynamic: bool | None,
    capability: tuple[int, int] = (9, 0),
) -> Callable[..., Any]:
    """`torch.compile(function)` whose forward and backward graphs go to `compile_graph`.

    Args:
        function: any function that Dynamo traces without a graph break.
        compile_graph: takes a graph, its example inputs and the keyword arguments of Inductor's
            `compile_fx_inner`; returns what runs in the graph's place (see `on_cpu`).
        options: Inductor configuration, `torch.compile(options=)`.
        dynamic: as in `torch.compile`.
        capability: of the GPU that graphs are traced for.

    Returns:
        The compiled function. All caches are off, and compilation stays in this process.
    """
    config = {"force_disable_caches": True, "compile_threads": 1, **options}

    # Inside the backend, not around the call: backward() may compile the backward graph.
    def inner(graph: GraphModule, inputs: Sequence[Any], **keywords: Any) -> Callable[..., Any]:
        with inductor_config.patch(config):
            return compile_graph(graph, inputs, keywords)

    def backend(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        with inductor_config.patch(config), fake_methods.claims_gpu(), assumed(capability):
            return inductor.compile_fx(graph, list(inputs), inner_compile=inner)

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)


def on_cpu(run: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], list[Any]]:
    """Give `run` the calling convention of a compiled graph: one list, emptied by the callee."""

    def boxed(args: list[Any]) -> list[Any]:
        values = list(args)
        args.clear()
        with torch.no_grad():
            return list(run(values))

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def zeros_for(graph: GraphModule, *values: Any) -> list[Any]:
    """Zeros in place of a graph's results for `values`: only the sizes are computed."""
    # Offsets of nested tensors have their own symbol.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fakes = [mode.from_tensor(v, static_shapes=True) if torch.is_tensor(v) else v for v in values]
    with mode:
        found = torch.fx.Interpreter(graph).run(*fakes)
    return pytree.tree_map_only(FakeTensor, _zeros_like, list(found))


def _zeros_like(fake: FakeTensor) -> torch.Tensor:
    """A tensor of the same sizes and strides."""
    return torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype).zero_()


def gpu_code(
    graph: GraphModule,
    inputs: Sequence[Any],
    capability: tuple[int, int],
    keywords: dict[str, Any],
    check: Callable[[str], None] = lambda text: None,
) -> str:
    """Inductor's output code for a CPU graph, as if it were on a GPU.

    Args:
        graph: an AOTAutograd graph with CPU fake tensors in its metadata; not changed.
        inputs: its example inputs.
        capability: compute capability of the GPU.
        keywords: keyword arguments of `compile_fx_inner`.
        check: called with the code; if it raises, the graph does not compile.

    Returns:
        The source of the Python wrapper with its Triton kernels.
    """
    texts: list[str] = []

    def stop_at_text(lowering: GraphLowering) -> Any:
        wrapper, _ = lowering.codegen()
        check(wrapper.value)
        texts.append(wrapper.value)
        return SimpleNamespace(call=lambda args: None)

    mode = detect_fake_mode(inputs) or detect_fake_mode(values_of(graph))
    with _disable_current_modes():  # constants of the graph are real tensors
        moved = copied(graph)
    with (
        _disable_current_modes(),
        fake_gpu(capability),
        mock.patch.object(GraphLowering, "compile_to_module", stop_at_text),
    ):
        fakes = move_graph(moved, mode, torch.device("cuda", 0))
        examples = [
            _strided_like(fake, given) if isinstance(given, torch.Tensor) else given
            for fake, given in zip(fakes, inputs, strict=True)
        ]
        _forget_output_strides()
        inductor.compile_fx_inner(moved, examples, **keywords)
    (text,) = texts
    return text


def _forget_output_strides() -> None:
    """Those of the same graph for another GPU: Inductor reports them once."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides:
        context.output_strides.clear()


def _strided_like(fake: Any, given: torch.Tensor) -> Any:
    """A tensor on the GPU with the strides and the alignment that it will have.

    The graph has the trace's strides; Inductor may pad rows that the forward graph saves.
    """
    if not isinstance(fake, FakeTensor) or fake.device.type != "cuda":
        return fake
    size, stride, offset = given.size(), given.stride(), given.storage_offset()
    with fake.fake_mode:
        if isinstance(offset, int) and offset == 0:
            return torch.empty_strided(size, stride, dtype=fake.dtype, device=fake.device)
        end = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        base = torch.empty(end, dtype=fake.dtype, device=fake.device)
        return base.as_strided(size, stride, offset)
