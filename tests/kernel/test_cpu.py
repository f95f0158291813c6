"""Compiled on the CPU: by the C++ kernels, and by the specification in chunks of queries."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import flexhop
from flexhop.lowering import chunked, cpu
from flexhop.options import KernelOptions
from tests.dropout_cases import placed_call

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
WANTED = flexhop.AuxRequest(lse=True, max_scores=True)


def operands(
    query: tuple[int, ...], key: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """query, key and value, the latter with 8 columns, that require gradients."""
    sizes = query, key, (*key[:3], 8)
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


def results(function: Callable[..., Any], inputs: list[Tensor], *captured: Tensor) -> list[Tensor]:
    """Results of `function` and the gradients of a scalar that depends on out and lse."""
    out, aux = function(*inputs)
    loss = out.sin().sum() + torch.where(aux.lse.isinf(), 0.0, aux.lse).square().sum()
    return [out, aux.lse, aux.max_scores, *torch.autograd.grad(loss, [*inputs, *captured])]


def assert_compiled_agrees(
    function: Callable[..., Any], inputs: list[Tensor], *captured: Tensor, tolerance: float = 2e-5
) -> None:
    expected = results(function, inputs, *captured)
    found = results(torch.compile(function, fullgraph=True), inputs, *captured)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=tolerance, rtol=tolerance)


@pytest.fixture(params=["kernel", "chunks"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels, or the specification in chunks of 16 queries."""
    if request.param == "chunks":
        monkeypatch.setattr(cpu, "DTYPES", ())
        monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", 1)
    return request.param


def test_products_of_flags(path: str):
    """Masks of vectors become integers by a template method; without a hint, C++ compared."""
    inputs = operands((2, 2, 37, 3), (2, 2, 37, 3))
    ancestors, begin = torch.rand(8, 8) < 0.5, torch.tensor(3)

    def tree(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        is_near = (j < 9) | ancestors[i % 8, j % 8]
        return (i + begin >= j).int() * is_near.int() == 1

    def mish(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * torch.nn.functional.softplus(s).tanh()

    mask = flexhop.create_block_mask(tree, None, None, 37, 37, "cpu")
    assert_compiled_agrees(
        lambda q, k, v: flexhop.flex_attention(q, k, v, mish, mask, return_aux=WANTED), inputs
    )


def test_mask_grouped_heads_and_captured_gradients(path: str):
    inputs = operands((2, 4, 67, 16), (2, 2, 90, 16))
    bias = torch.randn(4, 200, requires_grad=True)
    temperature = torch.randn((), requires_grad=True)
    documents = torch.randint(0, 3, (2, 90))

    def in_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx + 30 >= kv_idx) & (documents[b, q_idx] == documents[b, kv_idx])

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.tanh(score * temperature) + bias[h, q_idx - kv_idx + 100]

    mask = flexhop.create_block_mask(in_document, 2, None, 67, 90, device="cpu", BLOCK_SIZE=16)
    attend = functools.partial(
        flexhop.flex_attention,
        score_mod=biased,
        block_mask=mask,
        enable_gqa=True,
        return_aux=WANTED,
    )
    assert_compiled_agrees(attend, inputs, bias, temperature)


def test_only_listed_blocks_are_seen(path: str):
    """Lists decide, whatever mask_mod says: partial blocks keep it, full ones ignore it."""
    inputs = operands((1, 2, 60, 16), (1, 2, 60, 16))
    counts = torch.tensor([[[1, 1, 0, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 9], [1, 0], [0, 0], [3, -1]]]], dtype=torch.int32)
    full = torch.tensor([[[[2], [0], [0], [1]]]], dtype=torch.int32)
    mask = flexhop.BlockMask.from_kv_blocks(
        counts, indices, torch.tensor([[[0, 1, 0, 1]]], dtype=torch.int32), full,
        BLOCK_SIZE=16, mask_mod=lambda b, h, q, k: (q + k) % 3 == 0, seq_lengths=(60, 60),
    )  # fmt: skip
    attend = functools.partial(flexhop.flex_attention, block_mask=mask, return_aux=WANTED)
    assert_compiled_agrees(attend, inputs)


def test_fp64_and_a_shared_key():
    inputs = operands((2, 2, 21, 16), (1, 2, 33, 16), torch.float64)
    attend = functools.partial(flexhop.flex_attention, return_aux=WANTED)
    assert_compiled_agrees(attend, inputs, tolerance=1e-12)


def test_heads_of_latent_attention():
    """576 columns, of which value is a view of the first 512."""
    query, latent = torch.randn(1, 4, 3, 576), torch.randn(1, 1, 30, 576)

    def attend(query: Tensor, latent: Tensor) -> Tensor:
        return flexhop.flex_attention(query, latent, latent[..., :512], enable_gqa=True)

    expected = attend(query.double(), latent.double()).float()
    found = torch.compile(attend, fullgraph=True)(query, latent)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_bf16_in_permuted_order(path: str):
    inputs = [
        torch.randn(1, 40, 2, 16).bfloat16().transpose(1, 2).requires_grad_() for _ in range(3)
    ]
    attend = functools.partial(flexhop.flex_attention, return_aux=WANTED)
    assert_compiled_agrees(attend, inputs, tolerance=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("expanded", ["key", "value"])
def test_one_of_key_and_value_is_expanded_to_all_batches(expanded: str, dtype: torch.dtype):
    """Its stride is 0; the other one has rows of its own for each batch."""
    inputs = operands((2, 4, 37, 16), (2, 2, 40, 16), dtype)
    place = 1 if expanded == "key" else 2
    inputs[place] = inputs[place].detach()[:1].requires_grad_()

    def attend(*tensors: Tensor) -> Any:
        query, key, value = (x.expand(2, -1, -1, -1) for x in tensors)
        return flexhop.flex_attention(query, key, value, enable_gqa=True, return_aux=WANTED)

    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    assert_compiled_agrees(attend, inputs, tolerance=tolerance)


def test_gradients_of_every_kind_of_read_of_a_shared_cache():
    """Tables by head, key, query and score; one key for all batches; several parts of queries."""
    inputs = operands((3, 4, 150, 7), (1, 2, 70, 7))
    shapes = ((4,), (70,), (3, 150), (150, 70))
    tables = [torch.randn(shape, requires_grad=True) for shape in shapes]
    by_head, by_key, by_query, by_score = tables

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        added = by_head[h] + by_key[kv_idx] + by_query[b, q_idx] * by_score[q_idx, kv_idx]
        return score.sigmoid() * by_head[h] + added

    mask = flexhop.create_block_mask(
        lambda b, h, q_idx, kv_idx: (q_idx + h) % 3 < kv_idx % 5, None, 4, 150, 70, "cpu", 24
    )
    attend = functools.partial(
        flexhop.flex_attention, score_mod=mod, block_mask=mask, enable_gqa=True, return_aux=WANTED
    )
    assert_compiled_agrees(attend, inputs, *tables, tolerance=1e-4)


def test_results_that_nobody_wants():
    """Only lse, then only the gradient of a captured tensor."""
    inputs = [x.detach() for x in operands((1, 2, 40, 16), (1, 2, 40, 16))]
    table = torch.randn(2, requires_grad=True)

    def attend(table: Tensor) -> Tensor:
        mod = lambda s, b, h, q_idx, kv_idx: s * table[h]  # noqa: E731
        return flexhop.flex_attention(*inputs, mod, return_aux=WANTED)[1].lse

    compiled = torch.compile(attend, fullgraph=True)
    found, expected = (torch.autograd.grad(f(table).sum(), table) for f in (compiled, attend))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(compiled(table.detach()), attend(table.detach()))


def test_functions_that_are_not_pointwise_go_by_chunks():
    table = torch.randn(40, 40)
    attend = functools.partial(
        flexhop.flex_attention,
        score_mod=lambda s, b, h, q_idx, kv_idx: s + table[q_idx].sort().values[kv_idx],
        return_aux=WANTED,
    )
    assert_compiled_agrees(attend, operands((1, 2, 40, 16), (1, 2, 40, 16)))


def test_captured_numbers(path: str):
    inputs = operands((1, 2, 40, 16), (1, 2, 40, 16))

    def attend(query: Tensor, key: Tensor, value: Tensor, window: int, slope: float) -> Any:
        def near(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return torch.where((q_idx - kv_idx).abs() < window, score * slope, -math.inf)

        return flexhop.flex_attention(query, key, value, near, return_aux=WANTED)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for window, slope in ((5, 0.5), (9, 0.25)):
        function = functools.partial(attend, window=window, slope=slope)
        expected = results(function, inputs)
        found = results(functools.partial(compiled, window=window, slope=slope), inputs)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_lengths_share_one_compilation():
    slopes = torch.randn(2, requires_grad=True)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + slopes[h] * (kv_idx - q_idx)

        return flexhop.flex_attention(query, key, value, alibi, return_aux=WANTED)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for length in (45, 16, 80):
        inputs = operands((1, 2, length, 16), (1, 2, length + 7, 16))
        expected = results(attend, inputs, slopes)
        with torch.compiler.set_stance("default" if length == 45 else "fail_on_recompile"):
            found = results(compiled, inputs, slopes)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_rows_are_summed(monkeypatch: pytest.MonkeyPatch):
    """In the kernels, by terms: chunks would take a minute to compile."""
    inputs, points = operands((1, 2, 37, 16), (1, 2, 37, 16)), torch.randn(37, 3)

    def nearness(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        apart = (points[i] - points[j]).square().sum(-1)
        return s - apart + points[i].softmax(-1)[h] + points[j].amax()

    mask = flexhop.create_block_mask(
        lambda b, h, i, j: torch.stack([i >= j, i < 9]).any(), None, None, 37, 37, "cpu", 16
    )
    attend = functools.partial(
        flexhop.flex_attention, score_mod=nearness, block_mask=mask, return_aux=WANTED
    )
    for name in ("lower_attention", "lower_attention_backward"):
        monkeypatch.setattr(chunked, name, None)
    assert_compiled_agrees(attend, inputs, points.requires_grad_(), tolerance=1e-4)


def test_no_buffer_holds_every_score(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu, "DTYPES", ())
    length = 2048
    inputs = operands((1, 1, length, 16), (1, 1, length, 16))
    attend = functools.partial(flexhop.flex_attention, return_aux=WANTED)
    _, codes = run_and_get_code(results, torch.compile(attend, fullgraph=True), inputs)
    sizes = re.findall(r"empty_strided_cpu\(\(([\d, ]*)\)", "\n".join(codes))
    elements = [
        math.prod(map(int, size.replace(" ", "").strip(",").split(","))) for size in sizes if size
    ]
    assert chunked.CHUNK_ELEMENTS in elements  # one chunk of scores: the reading of sizes works
    assert max(elements) < length * length // 8


class Documents(torch.nn.Module):
    """A mask that is made inside, of a table; causal by its scores."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, document: Tensor) -> Tensor:
        mask = flexhop.create_block_mask(
            lambda b, h, q, k: document[b, q] == document[b, k],
            query.shape[0], None, query.shape[2], key.shape[2], device="cpu",
        )  # fmt: skip
        mod = lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf)  # noqa: E731
        return flexhop.flex_attention(query, key, value, mod, mask)


def documents(batch: int, length: int) -> list[Tensor]:
    inputs = [t.detach() for t in operands((batch, 1, length, 16), (batch, 1, length, 16))]
    return [*inputs, (torch.arange(length) // 37).expand(batch, length).contiguous()]


@pytest.mark.slow
def test_exported_and_compiled_ahead_of_time(tmp_path: Any):
    """One package for every length, also of less than one block."""
    batch, length = torch.export.Dim("b", max=64), torch.export.Dim("s", max=4096)
    sizes = (*({0: batch, 2: length},) * 3, {0: batch, 1: length})
    program = torch.export.export(Documents(), tuple(documents(2, 300)), dynamic_shapes=sizes)
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )
    loaded = torch._inductor.aoti_load_package(package)
    for batch, length in ((1, 1), (2, 50), (1, 128), (3, 129), (1, 2048)):
        inputs = documents(batch, length)
        torch.testing.assert_close(loaded(*inputs), Documents()(*inputs), atol=2e-5, rtol=2e-5)


class Named(torch.nn.Module):
    """Parameters and buffers that are called like the arguments of its functions."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("score", "b", "h", "q_idx", "kv_idx"):
            self.register_parameter(name, torch.nn.Parameter(torch.rand(40)))
        self.register_buffer("x", torch.arange(40) % 3)

    def modify(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * self.score[h] + self.b[q] - self.h[k] * self.q_idx[k] + self.kv_idx[q - k]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        visible = lambda b, h, q, k: (self.x[q] == self.x[k]) | (q >= k)  # noqa: E731
        mask = flexhop.create_block_mask(visible, None, None, 40, 40, device="cpu")
        return flexhop.flex_attention(query, key, value, self.modify, mask)


@pytest.mark.slow
def test_tensors_named_like_arguments_ahead_of_time(tmp_path: Any):
    """AOTInductor names buffers after parameters: reads of one called b gave the batch."""
    torch.manual_seed(0)
    inputs, model = [t.detach() for t in operands((2, 2, 40, 16), (2, 2, 40, 16))], Named()
    with torch.no_grad():
        program = torch.export.export(model, tuple(inputs))
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2")
        )
        found = torch._inductor.aoti_load_package(package)(*inputs)
        torch.testing.assert_close(found, model(*inputs), atol=2e-5, rtol=2e-5)


def test_a_mask_made_inside_is_compiled_once_for_all_lengths():
    """PyTorch 2.11 checked the indices of the table before it computed them: no C++ at all."""
    counter = CompileCounterWithBackend("inductor")
    attend = torch.compile(Documents(), backend=counter, fullgraph=True, dynamic=True)
    for batch, length in ((3, 300), (2, 50), (4, 128), (2, 129)):
        inputs = documents(batch, length)
        torch.testing.assert_close(attend(*inputs), Documents()(*inputs), atol=2e-5, rtol=2e-5)
    assert counter.frame_count == 1


def test_lengths_that_no_block_divides():
    """Inductor's loop split would leave out the keys behind the last whole block."""
    inputs = operands((1, 2, 37, 16), (1, 2, 150, 16))
    mask = flexhop.create_block_mask(
        lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 113, None, None, 37, 150, device="cpu"
    )
    attend = functools.partial(flexhop.flex_attention, block_mask=mask, return_aux=WANTED)
    assert_compiled_agrees(attend, inputs)


@pytest.mark.parametrize("divisor", [9, 16, 128])
def test_mods_may_read_at_quotients(divisor):
    """The same loop split, by a divisor of the user's."""
    inputs = operands((1, 2, 37, 16), (1, 2, 150, 16))
    table = torch.randn(150 // divisor + 1)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[kv_idx // divisor]

    assert_compiled_agrees(
        functools.partial(flexhop.flex_attention, score_mod=score_mod, return_aux=WANTED), inputs
    )


def test_rows_that_loops_hand_over_are_kept_apart():
    """Inductor vectorised over queries, 16 of which wrote to the buffer of one row."""
    length, dtype = 63, torch.float64  # by the definition
    query, key, value = (torch.randn(1, h, length, 1, dtype=dtype) for h in (4, 2, 2))
    period, bias = torch.randn(11), torch.randn(3 * length)[::3]
    scale = torch.rand(1, 2, length) + 0.5
    mask = flexhop.create_block_mask(
        lambda b, h, q, k: torch.sqrt((q - k).abs() + 0.5) < 5.3, None, None, length, length, "cpu"
    )

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + period[(q - k) % 11] + bias[k]

    def shift(x: Tensor, b: Tensor, h: Tensor, k: Tensor) -> Tensor:
        return (x - 0.25) * scale[b, h, k] + 0.01 * (h - b)

    def attend(*x: Tensor) -> Tensor:
        mods = {"k_mod": shift, "v_mod": shift}
        return flexhop.flex_attention(*x, score_mod, mask, enable_gqa=True, **mods)

    found = torch.compile(attend, fullgraph=True)(query, key, value)
    torch.testing.assert_close(found, attend(query, key, value))


SEED, P = torch.tensor([7, 2**32 - 5]), 0.25


def test_dropout():
    """Tiles begin within groups of 16: blocks hold 24 queries and 40 keys."""
    inputs = operands((2, 4, 67, 16), (2, 2, 600, 16))
    bias = torch.randn(4, 700, requires_grad=True)
    mask = flexhop.create_block_mask(
        lambda b, h, q, k: q + 530 >= k, None, None, 67, 600, "cpu", BLOCK_SIZE=(24, 40)
    )

    def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return flexhop.flex_attention(
            query, key, value, lambda s, b, h, q, k: s + bias[h, q - k + 600], mask,
            enable_gqa=True, return_aux=WANTED, dropout_p=P, dropout_seed=SEED,
        )  # fmt: skip

    assert_compiled_agrees(call, inputs, bias)


@pytest.mark.parametrize("queries", [40, 3])
def test_a_placed_seed_is_the_mask_of_the_whole(queries: int):
    placed = placed_call(SEED, P, queries, 16, KernelOptions())
    out, (code,) = run_and_get_code(torch.compile(placed.call), *placed.operands)
    assert "draw_square" in code, "by the kernel, not in chunks"
    torch.testing.assert_close(out / placed.share, placed.kept.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("path", ["chunks"], indirect=True)
def test_a_page_table_of_any_width(path: str):
    """The loop over chunks reads three keys for each column of a table that it does not get."""
    query, pages = torch.randn(2, 4, 31, 16), torch.randn(40, 2, 3, 16)
    tables, lengths = torch.randperm(40).view(2, 20).int(), torch.tensor([57, 31]).int()
    torch._dynamo.mark_dynamic(tables, 1)
    torch._dynamo.mark_dynamic(query, 2)

    def attend(query: Tensor, tables: Tensor) -> Any:
        table = flexhop.PageTable(tables, 3, lengths)
        bend = lambda s, b, h, i, j: torch.tanh(s) + (i - j) * 0.1  # noqa: E731
        return flexhop.flex_attention(query, pages, pages, bend, page_table=table, enable_gqa=True)

    found = torch.compile(attend, fullgraph=True)(query, tables)
    torch.testing.assert_close(found, attend(query, tables), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("path", ["chunks"], indirect=True)
def test_a_tensor_that_a_mod_makes_of_a_dynamic_number(path: str):
    """No size that the loop over chunks gets is the number itself."""
    inputs = operands((2, 3, 67, 16), (2, 3, 70, 16))

    def attend(q: Tensor, k: Tensor, v: Tensor, count: int) -> Any:
        def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s - torch.arange(1.0, count + 1)[h] * (i - j)

        return flexhop.flex_attention(q, k, v, mod)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for count in (3, 4):
        found, wanted = compiled(*inputs, count), attend(*inputs, count)
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


def test_integers_of_positions_wrap_around():
    """Inductor goes on in 64 bits with what is an expression of loop variables."""
    inputs = operands((2, 2, 37, 16), (2, 2, 41, 16))
    scaled = torch.randn(2, requires_grad=True)

    def hashed(i: Tensor, j: Tensor) -> Tensor:
        return (i * 123456789 + j * 987654321) % 11

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * scaled[h] + 0.1 * hashed(i, j)

    mask = flexhop.create_block_mask(
        lambda b, h, i, j: hashed(i, j) < 7, None, None, 37, 41, "cpu"
    )
    assert_compiled_agrees(
        lambda q, k, v: flexhop.flex_attention(q, k, v, mod, mask, return_aux=WANTED),
        inputs,
        scaled,
    )
