"""The guard: kernels whose machine code spills in earnest are not chosen."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.codecache import _load_triton_kernel_from_source

import flexhop
from flexhop.compat.graphs import ahead
from flexhop.compat.kernels import machine_code
from flexhop.lowering.hopper import backward as hopper_grad
from flexhop.lowering.hopper import forward as hopper
from flexhop.offline import Generated, Kernel, generate_code
from flexhop.options import KernelOptions, Tile, debug
from tests.needs import needs_hopper
from tests.problems import problem
from tests.processes import new_processes

pytestmark = needs_hopper
SIDES = ("BLOCK_M", "BLOCK_N")


def nested(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Its derivative needs more registers than there are."""
    return torch.nn.functional.gelu(2 * torch.erf(score), approximate="tanh")


def swell(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Long enough for the forward kernel's machine code to be looked at, not for a refusal."""
    return score * torch.sigmoid(score) / (1 + score.abs())


def cap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 30 * torch.tanh(score / 30)


def made(score_mod: Callable[..., Any], backend: str, width: int = 128, **tiles: Any) -> Generated:
    """The kernels of a call that the Hopper kernels are fast enough for."""
    inputs = [
        torch.zeros(2, 16, 1024, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    options = KernelOptions(backend=backend, **tiles)
    return generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, score_mod, kernel_options=options),
        *inputs, grad=True,
    )  # fmt: skip


def is_hopper(found: Generated) -> list[bool]:
    """Of the forward kernel, and the backward kernels."""
    templates = [kernel.is_gluon for kernel in found.templates]
    return [templates[0], all(templates[1:])]


@pytest.mark.parametrize(
    ("needed", "backend", "expected"),
    [
        (10_000, "auto", [False, False]),
        (270, "auto", [False, True]),
        (0, "auto", [True, True]),
        (None, "auto", [True, True]),  # it cannot be compiled here
        (10_000, "hopper", [True, True]),
    ],
)
def test_a_kernel_that_spills_in_earnest_is_refused(
    needed: int | None, backend: str, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "local_memory", lambda choice: needed)
    assert is_hopper(made(swell, backend)) == expected


@pytest.mark.parametrize(
    ("needed", "backend", "shares"),
    [(160, "auto", False), (161, "auto", True), (161, "hopper", True)],
)
def test_consumers_share_keys_if_their_own_do_not_fit_in_registers(
    needed: int, backend: str, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "local_memory", lambda choice: needed)
    (kernel,) = (k for k in made(swell, backend).templates if "def differentiate" in k.source)
    assert ("SHARES_KEYS = gl.constexpr(True)" in kernel.source) == shares


@pytest.mark.parametrize(
    ("needed", "is_given", "expected"),
    [
        (16, False, [(64, 64), (64, 64)]),
        (64, False, [(64, 32), (64, 64)]),
        (65, False, [(64, 32), (32, 64)]),
        (None, False, [(64, 64), (64, 64)]),  # it cannot be compiled here
        (65, True, [(32, 32), (64, 64)]),
    ],
)
def test_portable_kernels_that_spill_have_shorter_steps(
    needed: int | None, is_given: bool, expected: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Those of the gradient of query, and of key and value."""
    monkeypatch.setattr(ahead, "local_memory", lambda choice: needed)
    tiles: dict[str, Any] = {"grad_query": Tile(32, 32), "grad_key_value": Tile(64, 64)}
    found = made(swell, "triton", **(tiles if is_given else {}), width=64)
    gradients = [k.source for k in found.templates if "def pull_back" in k.source]
    assert [
        tuple(int(re.findall(rf"{side} : tl.constexpr = (\d+)", text)[0]) for side in SIDES)
        for text in gradients
    ] == expected


@pytest.mark.parametrize(
    ("needed", "function"), [(0, "add_captured_grads"), (400, "tl.atomic_add")]
)
def test_captured_tensors_get_their_gradients_either_way(
    needed: int, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "local_memory", lambda choice: needed)
    slopes = torch.zeros(16, requires_grad=True)
    found = made(lambda score, b, h, q_idx, kv_idx: score + slopes[h] * kv_idx, "auto")
    backward = [k for k in found.templates[1:] if function in k.source]
    assert [k.is_gluon for k in backward] == [needed == 0]
    # The sums, in fp64 because many scores read one entry.
    assert "*fp64" in backward[0].meta["signature"].values()


def test_a_refusal_is_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ahead, "local_memory", lambda choice: 1000)
    monkeypatch.setattr(debug, "wanted", lambda: frozenset({"kernel"}))
    made(swell, "auto")
    printed = "".join(capfd.readouterr())
    for name, most in (("hopper_forward", 256), ("hopper_backward", 368)):
        assert re.search(
            rf"{name}[^\n]*\n?[^\n]*spills 1000 bytes per thread .limit {most}", printed
        )


def test_functions_of_a_few_instructions_are_not_waited_for() -> None:
    options, forced = KernelOptions(), KernelOptions(backend="hopper")
    wide = problem(head_dim=256, value_head_dim=256, has_score_mod=True, has_score_grad=True)
    short = problem(has_score_mod=True, score_cost=3.0)
    long = problem(has_score_mod=True, score_cost=14.0, has_score_grad=True)
    learned = problem(has_score_mod=True, captured_reads=("head",))
    assert hopper.local_memory_limit(short, options) is None
    assert hopper.local_memory_limit(long, options) == 256
    assert hopper.local_memory_limit(long, forced) is None
    for call, given, most in (
        (short, options, None), (wide, options, None), (learned, options, 368),
        (long, options, 368), (long, forced, None),
    ):  # fmt: skip
        (found,) = hopper_grad.attempts(call, given)
        assert found == (hopper_grad.table_tile(call), most)


def test_tiles_of_the_backward_kernel_at_128_columns() -> None:
    long = {"head_dim": 128, "value_head_dim": 96, "has_score_mod": True, "has_score_grad": True}
    by_distance = problem(**long, captured_reads=("distance",))
    options, forced = KernelOptions(), KernelOptions(backend="hopper")
    for call, given, shared, most in (
        (problem(**long), options, [False, True], [160, 368]),
        (problem(**long), forced, [False, True], [160, None]),
        (by_distance, options, [True], [368]),
        (problem(**long, is_deterministic=True), options, [False], [368]),
    ):
        tiles, limits = zip(*hopper_grad.attempts(call, given), strict=True)
        assert [tile.shares_keys for tile in tiles] == shared
        assert list(limits) == most


def _measure(kernel: Kernel, cache: str, by_worker: bool) -> int:
    """Compile for a GPU that is not there."""
    from torch._inductor.runtime import triton_helpers

    triton_helpers.set_driver_to_gpu = lambda: None
    load = partial(_load_triton_kernel_from_source, kernel.name, kernel.source)
    if by_worker:
        return machine_code.compile_by_worker(load, {"TRITON_CACHE_DIR": cache})
    return machine_code.compile_here(load)


@pytest.mark.slow
@pytest.mark.parametrize("by_worker", [False, True])
def test_local_memory_is_read_from_machine_code(by_worker: bool, tmp_path: Path) -> None:
    kernels = [made(mod, "hopper").kernel_with("differentiate") for mod in (nested, cap)]
    found = []
    for kernel in kernels:
        with ProcessPoolExecutor(1, new_processes()) as worker:
            found.append(worker.submit(_measure, kernel, str(tmp_path), by_worker).result())
    assert found[0] > 368 > found[1] > 0
