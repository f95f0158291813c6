"""Kernels as Inductor choices: fill a template, then select a choice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flexhop.compat.graphs import ahead
from flexhop.compat.kernels import inductor
from flexhop.lowering import fallback
from flexhop.lowering.mods.loops import Loop
from flexhop.lowering.mods.lower import ModBuffers
from flexhop.lowering.problem import Problem
from flexhop.options import KernelOptions, debug
from flexhop.templates.printers.holes import ElementLoop


class Output(NamedTuple):
    """The output of a kernel.

    layout: layout of the result. sizes: the sizes that determine the grid. written: further
    tensors that the kernel writes.
    """

    layout: Any
    sizes: Sequence[Any]
    written: Sequence[Any] = ()


class Captured(NamedTuple):
    """Zero-filled gradients of captured tensors, and what kernels add to them."""

    sums: Sequence[Any]
    sites: Sequence[inductor.ScatterSite]

    def in_loops(self, loops: Sequence[Loop], first: int) -> Captured:
        """The same, with the sites of rows in loops; first: number of the joint graph's first
        output among the functions of a kernel."""
        sites = list(self.sites)
        for loop in loops:
            numbers = (first + loop.value, tuple(first + i for i in loop.indices))
            for n in range(loop.first, loop.first + loop.sites):
                count = loop.sites if n == loop.first else 0
                sites[n] = sites[n]._replace(loop=ElementLoop(count, *numbers))
        return self._replace(sites=sites)


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCall:
    """Data that the kernels of one call share.

    captures: lowered captures of all mods. readers: the subgraphs of portable/cache/keys.py.jinja
    and mods/key_mods.py.jinja, for a cache. seed: the dropout seed, if there is dropout. passed:
    why no preferred dialect was chosen.
    """

    problem: Problem
    options: KernelOptions
    mods: ModBuffers
    captures: Sequence[Any]
    readers: tuple[Any, ...] = ()
    seed: Sequence[Any] = ()
    passed: str = ""


def fill(
    template: Any,
    inputs: Sequence[Any],
    output: Output,
    variants: Iterable[Mapping[str, Any]],
    subgraphs: inductor.Subgraphs | None = None,
    problem: Problem | None = None,
) -> list[Any]:
    """The choices of a template, one per entry of `variants`.

    In careful mode, only the first one that compiles (lowering/fallback.py).

    Args:
        template: from inductor.make_template.
        inputs: inputs of the template.
        output: what it stores.
        variants: the constants of each choice, num_warps and num_stages.
        subgraphs: the user's functions, if the template calls any.
        problem: of the call; None for small kernels that have no user functions.
    """
    choices: list[Any] = []
    for constants in variants:
        make = functools.partial(_append, template, choices, inputs, output, constants, subgraphs)
        if problem is None or not fallback.is_careful():
            make()
            continue
        check = functools.partial(_check, make, problem)
        if fallback.attempt(_words(template, constants), check, problem):
            return choices[-1:]
    # In careful mode, this line is reached only if no variant compiled.
    if not choices or (problem is not None and fallback.is_careful()):
        raise fallback.NoCandidate
    return choices


def _append(
    template: Any, choices: list[Any], inputs: Sequence[Any], output: Output,
    constants: Mapping[str, Any], subgraphs: inductor.Subgraphs | None,
) -> Any:  # fmt: skip
    """Append a choice."""
    error = template.maybe_append_choice(
        choices, input_nodes=inputs, layout=output.layout, subgraphs=subgraphs,
        mutated_inputs=list(output.written), call_sizes=output.sizes, **constants,
    )  # fmt: skip
    # Inductor returns the error of a choice instead of raising it.
    if error is not None:
        raise error
    return choices[-1]


def _check(make: Callable[[], Any], problem: Problem) -> bool:
    fallback.check_compiles(make(), problem)
    return True


def _words(template: Any, constants: Mapping[str, Any]) -> str:
    sizes = [str(constants[name]) for name in ("BLOCK_M", "BLOCK_N") if name in constants]
    tile = f" with tiles of {' x '.join(sizes)}" if sizes else ""
    return f"{template.name}{tile}"


def select(
    name: str,
    choices: list[Any],
    operands: Sequence[Any],
    output: Output,
    subgraphs: inductor.Subgraphs | None = None,
    captures: Sequence[Any] = (),
    generators: Mapping[int, Any] | None = None,
) -> Any:
    """The result of one of the choices, the fastest if there are several.

    Args:
        name: the name in Inductor's timing reports.
        choices: from `fill`.
        operands: inputs of the template, captures, and everything else that the kernel reads.
        output: what it stores.
        subgraphs: as in `fill`.
        captures: captures of the user's functions.
        generators: contents of operands while choices are timed, by position.
    """
    result = inductor.select(name, choices, operands, output.layout, generators or {})
    if subgraphs is not None:
        inductor.note_subgraphs(result, captures, subgraphs)
    return result


def emit_one(
    template: Any, inputs: Sequence[Any], output: Output, constants: Mapping[str, Any],
    call: KernelCall | None = None,
) -> Any:  # fmt: skip
    """Emit the kernel of a template with a single choice.

    Args:
        template: from inductor.make_template.
        inputs: inputs of the template.
        output: what it stores.
        constants: of the template, and num_warps.
        call: the call whose user functions it calls, if it calls any.
    """
    subgraphs, captures = None, ()
    if call is not None:
        subgraphs = inductor.Subgraphs([call.mods.score, call.mods.mask])
        captures = tuple(call.captures)
    choices = fill(template, inputs, output, [{"num_stages": 1, **constants}], subgraphs)
    return select(template.name, choices, [*inputs, *captures], output, subgraphs, captures)


def output_like(tensor: Any, position: int, written: Sequence[Any] = ()) -> Output:
    """An output with the sizes of `tensor` and the strides of result `position` of the node."""
    strides = inductor.as_expressions(inductor.output_meta()[position].stride())
    layout = inductor.fixed_layout(
        tensor.get_device(), tensor.get_dtype(), tensor.get_size(), strides
    )
    return Output(layout, tensor.get_size(), written)


def empty_like(tensor: Any, position: int) -> Any:
    """Memory for what `output_like` describes, for a kernel that writes it beside its output."""
    layout = output_like(tensor, position).layout
    return inductor.empty(layout.size, layout.stride, layout.dtype, layout.device)


def spills(name: str, choice: Any, most: int) -> bool:
    """Whether a kernel's threads need more than `most` bytes of local memory; compiles it.

    False if kernels are not compiled now. FLEXHOP_DEBUG=kernel shows it.
    """
    needed = ahead.local_memory(choice)
    if needed is None or needed <= most:
        return False
    words = f"spills {needed} bytes per thread (limit {most}); using the next kernel"
    debug.show("kernel", name, lambda: words)
    return True
