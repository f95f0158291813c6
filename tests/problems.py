"""Problems as plain values, for the pure functions of flexhop.lowering."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from flexhop.compat.offline.fake_gpu import GPUS
from flexhop.lowering.portable import kernels
from flexhop.lowering.portable.rules import Kernel, backward_kernels
from flexhop.lowering.problem import Device, GradFacts, ModFacts, Problem
from flexhop.options import KernelOptions

# Which kernels a backward pass may launch beside grad_query.
KERNELS: tuple[Kernel, ...] = Kernel.__args__  # type: ignore[attr-defined]
# Those with a tile for every call.
ALL_KERNELS = tuple(kernel for kernel in KERNELS if kernel != "gradients")


def device(architecture: int) -> Device:
    """The GPU of an architecture such as 90, with the shared memory that its programs may use."""
    gpu = GPUS[(architecture // 10, architecture % 10)]
    return Device(
        capability=gpu.capability,
        shared_memory=gpu.shared_memory,
        multiprocessors=gpu.multiprocessors,
        l2_bytes=gpu.l2_cache,
        name=gpu.name,
    )


@contextlib.contextmanager
def few_multiprocessors(architecture: int = 90) -> Iterator[None]:
    """An absent GPU has two, which small problems keep busy.

    Programs of the Hopper backward kernel then own heads.
    """
    capability = divmod(architecture, 10)
    gpu = dataclasses.replace(GPUS[capability], multiprocessors=2)
    with mock.patch.dict(GPUS, {capability: gpu}):
        yield


def problem(architecture: int = 90, head_dim: int = 64, **facts: Any) -> Problem:
    """A plain call of 2 x 8 heads and 1024 tokens; `facts` override its fields and theirs."""
    groups: tuple[Any, ...] = (ModFacts, GradFacts)
    asked = dict.fromkeys(("asked_cost", "asked_grad_cost"), facts.get("mask_cost", False))
    facts = asked | facts
    parts = {kind: dict.fromkeys(kind._fields, False) for kind in groups}
    none = {"mask_band": None, "key_bytes": frozenset(), "mask_key_bytes": frozenset()}
    parts[ModFacts] |= none | {"reads_score": True}
    parts[GradFacts] |= {"captured_reads": (), "own_entries": frozenset()}
    for values in parts.values():
        values |= {name: facts.pop(name) for name in tuple(facts) if name in values}
    usual: dict[str, Any] = dict.fromkeys((f.name for f in dataclasses.fields(Problem)), False)
    usual |= {
        "device": device(architecture),
        "dtype": torch.bfloat16,
        "batch": 2,
        "query_heads": 8,
        "kv_heads": 8,
        "query_len": 1024,
        "key_len": 1024,
        "head_dim": head_dim,
        "value_head_dim": head_dim,
        "scale": head_dim**-0.5,
        "blocks": None,
        "mods": ModFacts(**parts[ModFacts]),
        "grad": GradFacts(**parts[GradFacts]),
        "cache": None,
        "tangents": (),
        "is_query_multiple": lambda n: 1024 % n == 0,
        "is_key_multiple": lambda n: 1024 % n == 0,
    }
    unknown = set(facts) - set(usual)
    assert not unknown, f"Problem has no {sorted(unknown)}"
    return Problem(**usual | facts)


def launched_kernels(of: Problem) -> tuple[Kernel, ...]:
    """The kernels of a forward and backward pass of a problem."""
    first = kernels.forward_kernel(of, KernelOptions())
    return (first, *backward_kernels(of, KernelOptions()))


def usual_problem(kernel: Kernel, **facts: Any) -> Problem:
    """A problem whose passes launch `kernel`."""
    if kernel.startswith("jvp_"):
        return problem(tangents=("query", "key", "value"), **facts)
    short = {"query_len": 1} if kernel == "decode" else {}
    for head_dim in (64, 256):
        if kernel in launched_kernels(problem(head_dim=head_dim, **short)):
            return problem(head_dim=head_dim, **facts | short)
    raise LookupError(f"No problem launches {kernel}.")
