"""One row of ``python -m benchmarks.varlen`` in a process of its own.

What the row is, who computes it, and whether that is right; then it is timed.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.nn import attention as sdpa
from torch.nn.attention import flex_attention as intree

import flexhop
from benchmarks.correctness import rounding_error
from benchmarks.timing import in_rounds, medians
from benchmarks.varlen_cases import MODS, Pack, lengths, offsets, words_of
from flexhop.masks import causal

Attention = Callable[..., torch.Tensor]  # of query, key, value and the table of a mod
Tensors = tuple[torch.Tensor, ...]  # query, key, value; the table of a mod; the gradient of out
NAMES = ("flexhop", "layers", "dense", "in-tree", "in-tree-ready", "flash", "cudnn")
DIRECTIONS = ("fwd", "both")
ROUNDS = 5
SECONDS = 0.05  # of one round
LONGEST_DENSE = 64 << 10  # tokens whose mask in-tree can hold while it makes one
LAYERS = 4  # that share offsets in a row's "layers"
CHECKED = 24  # sequences that are compared with float64


def build(name: str, pack: Pack, device: torch.device) -> Attention | None:
    """An implementation on packed tokens [T, H, D], or None where it cannot do the row."""
    cut = offsets(pack, device)
    if pack.mod and name not in ("flexhop", "in-tree", "in-tree-ready"):
        return None
    if name in ("flexhop", "layers"):

        def attend(q: Any, k: Any, v: Any, *table: torch.Tensor) -> Any:
            words = words_of(pack, *table)
            return flexhop.varlen_attention(q, k, v, cut, is_causal=True, **words)

        return torch.compile(stack(attend) if name == "layers" else attend, fullgraph=True)
    if name in ("in-tree", "in-tree-ready"):
        return _intree(pack, cut, is_ready=name == "in-tree-ready")
    if name == "flash":
        from torch.nn.attention import varlen

        longest, flash = max(lengths(pack)), cast(Any, varlen.varlen_attn)
        return lambda q, k, v: flash(q, k, v, cut, cut, longest, longest, window_size=(-1, 0))
    return _padded(name, pack, device) if pack.cut == "equal" else None


def stack(attend: Attention) -> Attention:
    """Layers of a model: each attends with what the one before gives, all with one mask."""

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        for _ in range(LAYERS):
            query = attend(query, key, value)
        return query

    return call


def _intree(pack: Pack, cut: torch.Tensor, *, is_ready: bool) -> Attention | None:
    """PyTorch's flex_attention with a document mask, made in every call or before all of them.

    It is made eagerly: compiling its sort takes minutes.
    """
    attend: Any = torch.compile(intree.flex_attention, fullgraph=True)
    size = pack.tokens

    def place() -> tuple[torch.Tensor, torch.Tensor]:
        token = torch.arange(size, device=cut.device)
        documents = torch.searchsorted(cut, token, right=True, out_int32=True) - 1
        return documents, token - cut[documents]

    def make_mask(*table: torch.Tensor) -> Any:
        documents, positions = place()
        keep = words_of(pack, *table).get("mask_mod")

        def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            seen = (documents[q_idx] == documents[kv_idx]) & (q_idx >= kv_idx)
            if keep is None:
                return seen
            return seen & keep(documents[q_idx], h, positions[q_idx], positions[kv_idx])

        return intree.create_block_mask(document, None, None, size, size, device=str(cut.device))

    if size > LONGEST_DENSE:
        return None
    ready: list[Any] = []
    placed = place()

    def score_mod(*table: torch.Tensor) -> Any:
        mod = words_of(pack, *table).get("score_mod")
        if mod is None:
            return None
        documents, positions = placed
        return lambda s, b, h, q_idx, kv_idx: mod(
            s, documents[q_idx], h, positions[q_idx], positions[kv_idx]
        )

    def call(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *table: torch.Tensor
    ) -> torch.Tensor:
        if is_ready and not ready:
            ready.append(make_mask(*table))
        batched = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
        mask = ready[0] if is_ready else make_mask(*table)
        out = attend(*batched, score_mod(*table), mask)
        return out.squeeze(0).transpose(0, 1)

    return call


def _padded(name: str, pack: Pack, device: torch.device) -> Attention:
    """Equal lengths as a batch: our own kernel with a ready mask, or cuDNN's."""
    size = pack.mean
    mask = flexhop.create_block_mask(causal, None, None, size, size, device=str(device))
    compiled: Any = torch.compile(flexhop.flex_attention, fullgraph=True)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if name == "dense":
            return compiled(query, key, value, block_mask=mask)
        with sdpa.sdpa_kernel(sdpa.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True
            )

    def call(*packed: torch.Tensor) -> torch.Tensor:
        query, key, value = (t.unflatten(0, (-1, size)).transpose(1, 2) for t in packed)
        return attend(query, key, value).transpose(1, 2).flatten(0, 1)

    return call


def make_tensors(pack: Pack, device: torch.device) -> Tensors:
    """Random query, key and value, which are leaves, and a gradient of out."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (pack.tokens, pack.heads, pack.head_dim)
    query, key, value, grad = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    tables: list[torch.Tensor] = []
    if pack.mod:
        sizes = lengths(pack)
        table = torch.randn(len(sizes), pack.heads, max(sizes), device=device)
        tables = [table.requires_grad_(MODS[pack.mod].is_learned)]
    leaves = (t.requires_grad_() for t in (query, key, value))
    return (*leaves, *tables, grad)


def _learned(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names of their gradients, and what has one."""
    named = zip(("dq", "dk", "dv", "dtable"), tensors, strict=False)
    return {name: tensor for name, tensor in named if tensor.requires_grad}


def run_once(attention: Attention, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Output and gradients of one call."""
    *leaves, grad = tensors
    out = attention(*leaves)
    learned = _learned(leaves)
    grads = torch.autograd.grad(out, tuple(learned.values()), grad)
    return {"out": out.detach(), **dict(zip(learned, grads, strict=True))}


class Part(NamedTuple):
    """One sequence: its number, and its tokens."""

    number: int
    tokens: slice

    def of(self, name: str, tensor: torch.Tensor, *, is_sequence: bool = False) -> torch.Tensor:
        """Its rows of a result, last head; is_sequence: of that which has no other rows."""
        if name == "dtable":
            size = self.tokens.stop - self.tokens.start
            return tensor[self.number, -1, :size]
        return tensor if is_sequence else tensor[self.tokens, -1]


def exact_sequence(pack: Pack, tensors: Tensors, part: Part) -> dict[str, torch.Tensor]:
    """One sequence by definition in float64, last head: [n, D] each, the table's gradient [n]."""
    query, key, value, *table, grad = tensors
    operands = (t.detach()[part.tokens, -1].double() for t in (query, key, value))
    query, key, value = (operand.requires_grad_() for operand in operands)
    tables = [t.detach().double().requires_grad_(t.requires_grad) for t in table]
    scores = query @ key.T / key.size(1) ** 0.5
    place = torch.arange(len(scores), device=scores.device)
    indices = torch.tensor(part.number), torch.tensor(pack.heads - 1), place[:, None], place
    words = words_of(pack, *tables)
    if "score_mod" in words:
        scores = words["score_mod"](scores, *indices)
    hidden = place[:, None] < place
    if "mask_mod" in words:
        hidden = hidden | ~words["mask_mod"](*indices)
    out = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ value
    learned = _learned((query, key, value, *tables))
    grads = torch.autograd.grad(out, tuple(learned.values()), grad[part.tokens, -1].double())
    found = {"out": out.detach(), **dict(zip(learned, grads, strict=True))}
    return {name: part.of(name, tensor, is_sequence=True) for name, tensor in found.items()}


def checked_parts(pack: Pack) -> list[Part]:
    """The longest sequences, the first, the last, and some between."""
    sizes = lengths(pack)
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    by_length = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    spread = range(0, len(sizes), max(1, len(sizes) // CHECKED))
    chosen = {0, len(sizes) - 1, *by_length[:2], *spread}
    return [Part(n, slice(starts[n], starts[n + 1])) for n in sorted(chosen)]


Results = dict[str, torch.Tensor]


def errors_of(exact: list[Results], parts: list[Part], found: Results) -> dict[str, float]:
    """Largest error of each result over the checked sequences; a NaN is infinitely wrong."""
    return {
        name: max(
            float((part.of(name, tensor).double() - right[name]).abs().nan_to_num(torch.inf).max())
            for part, right in zip(parts, exact, strict=True)
        )
        for name, tensor in found.items()
    }


def misses(
    errors: dict[str, dict[str, float]], exact: list[Results], dtype: torch.dtype
) -> list[str]:
    """What exceeds twice in-tree's error plus a rounding; eight roundings stand in for it."""
    words: list[str] = []
    for name, error in errors["flexhop"].items():
        rounding = max(rounding_error(right[name], dtype) for right in exact)
        allowed = 2 * errors.get("in-tree", {}).get(name, 8 * rounding) + rounding
        if not error <= allowed:
            words.append(f"{name}: error {error:.3g} > budget {allowed:.3g}")
    return words


class Run(NamedTuple):
    """What is timed: one call; on a GPU, the replay of its graph.

    attention: kept, for a graph does not keep what it reads.
    """

    start: Callable[[], None]
    attention: Attention


def prepare(attention: Attention, tensors: Tensors, direction: str) -> Run:
    """A call that was made before, in one of the DIRECTIONS."""

    def call() -> None:
        if direction == "both":
            run_once(attention, tensors)
        else:
            with torch.no_grad():
                attention(*tensors[:-1])

    call()
    if tensors[0].device.type != "cuda":
        return Run(call, attention)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return Run(graph.replay, attention)


def milliseconds(run: Run, on_gpu: bool, calls: int) -> float:
    """Of one call, by CUDA events or the wall clock."""
    if not on_gpu:
        start = time.perf_counter()
        for _ in range(calls):
            run.start()
        return 1e3 * (time.perf_counter() - start) / calls
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(calls):
        run.start()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / calls


def time_in_turn(runs: dict[str, Run], on_gpu: bool) -> dict[str, float]:
    """Median milliseconds of a call over interleaved rounds."""
    once = {name: milliseconds(run, on_gpu, 1) for name, run in runs.items()}
    calls = {
        n: max(1, min(200, int(1e3 * SECONDS / ms))) if on_gpu else 1 for n, ms in once.items()
    }
    measures = {
        name: functools.partial(milliseconds, run, on_gpu, calls[name])
        for name, run in runs.items()
    }
    return medians(in_rounds(measures, ROUNDS))


class Worker:
    """One row: builds and checks its implementations, then times them when it is told to."""

    def __init__(self, pack: Pack, names: tuple[str, ...], device: torch.device) -> None:
        """Make the first calls and compare them with float64."""
        self.pack, self.tensors, self.on_gpu = (
            pack,
            make_tensors(pack, device),
            device.type != "cpu",
        )
        self.failed: dict[str, str] = {}
        self.errors: dict[str, dict[str, float]] = {}
        self.attentions: dict[str, Attention] = {}
        parts = checked_parts(pack)
        exact = [exact_sequence(pack, self.tensors, part) for part in parts]

        def check(name: str) -> None:
            attention = build(name, pack, device)
            if name == "layers":
                assert attention is not None
                with torch.no_grad():
                    single = stack(self.attentions["flexhop"])(*self.tensors[:-1])
                    torch.testing.assert_close(
                        attention(*self.tensors[:-1]), single, rtol=0, atol=0
                    )
                self.attentions[name] = attention
            elif attention is not None:
                found = run_once(attention, self.tensors)
                with torch.no_grad():  # another graph, compiled now
                    attention(*self.tensors[:-1])
                self.errors[name] = errors_of(exact, parts, found)
                self.attentions[name] = attention

        for name in names:
            self.attempt(name, check)
        wrong = misses(self.errors, exact, self.tensors[0].dtype)
        if wrong:
            self.failed["flexhop"] = "wrong: " + "; ".join(wrong)
            del self.attentions["flexhop"]

    def attempt(self, name: str, action: Callable[[str], None]) -> None:
        """A peer that cannot must not end the others' measurement."""
        try:
            action(name)
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

    def time(self) -> dict[str, Any]:
        """What the parent is told."""
        runs: dict[str, dict[str, Run]] = {direction: {} for direction in DIRECTIONS}

        def record(name: str) -> None:
            for direction in DIRECTIONS:
                runs[direction][name] = prepare(self.attentions[name], self.tensors, direction)

        for name in self.attentions:
            self.attempt(name, record)
        found = {direction: time_in_turn(some, self.on_gpu) for direction, some in runs.items()}
        for times in found.values():
            if "layers" in times:
                times["layers"] /= LAYERS
        return {"milliseconds": found, "errors": self.errors, "failed": self.failed}
