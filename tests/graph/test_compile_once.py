"""When kernels are compiled: each once, and the backward kernel of Hopper GPUs early."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch._inductor.codegen.triton import TritonScheduling

import flexhop
from flexhop.compat.graphs import ahead
from flexhop.compat.kernels import gluon_versions
from flexhop.errors import ModLoweringError
from flexhop.lowering.hopper import gradients as backward_hopper
from flexhop.masks import causal
from flexhop.offline import Generated, generate_code


def _generate(backend: Literal["triton", "hopper"]) -> Generated:
    inputs = [
        torch.randn(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    mask = flexhop.create_block_mask(causal, None, None, 256, 256, "cpu")
    options = flexhop.KernelOptions(backend=backend)
    return generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=mask, kernel_options=options),
        *inputs, grad=True,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_texts_of_a_kernel_are_equal(
    backend: Literal["triton", "hopper"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers take a text when it is generated and when its module is loaded: one job if equal."""
    if backend == "hopper" and (obstacle := gluon_versions.obstacle()):
        pytest.skip(obstacle)
    early: list[str] = []
    define = TritonScheduling.define_kernel

    def note(self: Any, source: str, *args: Any, **kwargs: Any) -> str:
        name = define(self, source, *args, **kwargs)
        named = source.replace("Placeholder.DESCRIPTIVE_NAME", name)
        early.append(_without_hash(named.replace("Placeholder.KERNEL_NAME", name)))
        return name

    monkeypatch.setattr(TritonScheduling, "define_kernel", note)
    templates = _generate(backend).templates
    assert len(templates) == (3 if backend == "triton" else 2)
    for kernel in templates:
        # The hash of the backend is of this machine, and generate leaves it out.
        assert _without_hash(kernel.source) in early, kernel.name


def _without_hash(source: str) -> str:
    return "\n".join(line for line in source.split("\n") if not line.startswith("inductor_meta="))


DOCUMENT = torch.arange(1024) // 100
OFFSETS = torch.tensor([0, 300, 1024], dtype=torch.int32)
SLOPES = torch.tensor([0.5, 0.25])
LEARNED = torch.tensor([0.5, 0.25], requires_grad=True)
BIAS = torch.randn(2, 2047)


def _shifted(score: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
    return score + m


def _alibi(score: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
    return score + SLOPES[h] * (n - m)


def _capped(score: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
    return 20.0 * torch.tanh(score / 20.0)


def _biased(score: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
    return torch.nn.functional.softplus(score) * BIAS[h, m - n + 1023]


EARLY: dict[str, dict[str, Any]] = {
    "dense": {"mask": None},
    "causal": {},
    "documents": {"mask": lambda b, h, m, n: (m >= n) & (DOCUMENT[m] == DOCUMENT[n])},
    "quotients": {"mask": lambda b, h, m, n: m // 11 >= n // 11},
    "odd lengths": {"queries": 1000, "keys": 900},
    "grouped heads": {"kv_heads": 1},
    "columns 64": {"columns": 64},
    "columns 256": {"columns": 256},
    "narrow values": {"value_columns": 64},
    "heads inside": {"is_transposed": True},
    "shifted": {"score": _shifted},
    "alibi": {"score": _alibi},
    "capped, documents": {
        "score": _capped,
        "mask": lambda b, h, m, n: (m >= n) & (DOCUMENT[m] == DOCUMENT[n]),
    },
    "softplus and a table": {"score": _biased},
    "in a model": {"is_transposed": True, "is_projected": True},
    "in a model, other layout": {"is_projected": True},
}


def _operands(
    *, queries: int = 1024, keys: int = 1024, kv_heads: int = 2, columns: int = 128,
    value_columns: int = 0, is_transposed: bool = False, **_: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """query, key and value, in memory [B, H, L, D] or [B, L, H, D]."""
    sizes = [(2, queries, columns), (kv_heads, keys, columns)]
    sizes.append((kv_heads, keys, value_columns or columns))
    shapes = [(1, n, h, d) if is_transposed else (1, h, n, d) for h, n, d in sizes]
    operands = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    return [(x.transpose(1, 2) if is_transposed else x).requires_grad_() for x in operands]


@pytest.mark.parametrize("case", EARLY)
def test_backward_kernel_is_predicted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled with the forward kernel is the very text that the backward graph needs."""
    if obstacle := gluon_versions.obstacle():
        pytest.skip(obstacle)
    started, finished = _watch(monkeypatch)
    query, key, value = _operands(**EARLY[case])
    mod = EARLY[case].get("mask", causal)
    sizes, score = (query.size(2), key.size(2)), EARLY[case].get("score")
    mask = flexhop.create_block_mask(mod, None, None, *sizes, "cpu") if mod else None
    options = flexhop.KernelOptions(backend="hopper")
    weight = torch.randn(value.size(3) * 2, 64, dtype=torch.bfloat16)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flexhop.flex_attention(
            q, k, v, score, block_mask=mask, enable_gqa=True, kernel_options=options
        )
        if not EARLY[case].get("is_projected"):
            return out
        return out.transpose(1, 2).flatten(2) @ weight

    generate_code(attend, query, key, value, grad=True)
    assert len(started) == 1
    forward, backward = finished
    assert forward not in started
    assert backward == started[0]


def _packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    options = flexhop.KernelOptions(backend="hopper")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
    return flexhop.varlen_attention(
        q, k, v, OFFSETS, OFFSETS, max_seqlen_q=724, max_seqlen_k=724, kernel_options=options
    )


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    options = flexhop.KernelOptions(backend="hopper")
    return flexhop.flex_attention(q, k, v, kernel_options=options)


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("call", [_packed, _dense])
def test_packed_and_varying_lengths_are_predicted(
    call: Callable[..., torch.Tensor],
    is_transposed: bool,
    is_dynamic: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if obstacle := gluon_versions.obstacle():
        pytest.skip(obstacle)
    started, finished = _watch(monkeypatch)
    operands = _operands(is_transposed=is_transposed)
    for tensor in operands:
        if is_dynamic:
            torch._dynamo.mark_dynamic(tensor, 2)
    generate_code(call, *operands, grad=True)
    assert len(started) == 1
    assert finished[-1] == started[0]


def _learned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    options = flexhop.KernelOptions(backend="hopper")
    return flexhop.flex_attention(
        q, k, v, lambda s, b, h, m, n: s + LEARNED[h] * (n - m), kernel_options=options
    )


def test_what_cannot_be_predicted_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a captured tensor."""
    if obstacle := gluon_versions.obstacle():
        pytest.skip(obstacle)
    started, finished = _watch(monkeypatch)
    generate_code(_learned, *_operands(), grad=True)
    assert started == []
    assert finished


def test_gradient_without_kernel_is_left_to_the_backward_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward pass whose backward pass never runs must not fail for its sake."""
    if obstacle := gluon_versions.obstacle():
        pytest.skip(obstacle)

    def refuse(*_: Any) -> list[Any]:
        raise ModLoweringError(mod="a", operation="b", location="c", reason="d")

    started, finished = _watch(monkeypatch)
    monkeypatch.setattr(backward_hopper, "lower_joint", refuse)
    generate_code(_dense, *_operands(), grad=True)
    assert started == []
    assert len(finished) == 2


def _watch(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Functions of the kernels that were begun ahead, and that were asked for, in order."""
    started: list[str] = []
    finished: list[str] = []
    monkeypatch.setattr(ahead, "is_useful", lambda: True)
    monkeypatch.setattr(ahead, "start", lambda choice: started.append(_text(choice)))
    monkeypatch.setattr(ahead, "finish", lambda choice: finished.append(_text(choice)))
    return started, finished


def _text(choice: Any) -> str:
    return Path(choice.bmreq.module_path).read_text()


class _Filled:
    """As a layer of transformers' cache: the first key fills it."""

    def __init__(self) -> None:
        self.key: Any = None

    def update(self, key: torch.Tensor) -> torch.Tensor:
        if self.key is None:
            self.dtype, self.device = key.dtype, key.device
            self.key = torch.tensor([], dtype=self.dtype, device=self.device)
        self.key = torch.cat([self.key, key], -2)
        return self.key


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_objects_of_a_graph_keep_what_is_stored_after_a_call() -> None:
    def attend(query: torch.Tensor) -> tuple[torch.Tensor, list[_Filled]]:
        layers = [_Filled(), _Filled()]  # in a local list, as a cache that the model makes
        mask = flexhop.create_block_mask(causal, None, None, 40, 40, "cpu")
        for layer in layers:
            query = flexhop.flex_attention(query, *[layer.update(query)] * 2, block_mask=mask)
        return query, layers

    query = torch.randn(1, 2, 40, 8)
    found, layers = torch.compile(attend, backend="eager", fullgraph=True)(query)
    wanted, others = attend(query)
    torch.testing.assert_close(found, wanted)
    for layer, other in zip(layers, others, strict=True):
        torch.testing.assert_close(layer.key, other.key)
        assert layer.dtype == torch.float32
