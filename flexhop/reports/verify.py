"""flexhop.verify: check a function's attention calls against the reference, at samples."""

from __future__ import annotations

import dataclasses
import inspect
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from flexhop.ops.args import AttentionArgs
from flexhop.ops.forward import attention
from flexhop.ops.sampled import Saved, key_rows, query_rows, widened

__all__ = ["CallCheck", "Verification", "verify"]

# Error of a row in units of plain PyTorch's, and the roundings allowed on top (numerics.md).
_FACTORS = {torch.float32: 32.0, torch.float64: 32.0}
_LOW_FACTOR = 4.0
_TF32_EPS = 2.0**-10


@dataclasses.dataclass(frozen=True)
class CallCheck:
    """One attention call.

    Args:
        shape: query's [B, Hq, M, D] and key's [B or 1, Hkv, N, D], in words.
        ratios: for out, lse and the gradients, the largest error of a sampled row divided by its
            budget. Correct is at most 1. Infinite if a NaN or an infinity is misplaced.
        worst: for each, the [batch, head, row] of that error.
        origin: if a result is NaN, the operand that the first NaN came from.
        reproducer: file that holds the call, if a ratio exceeds 1.
    """

    shape: str
    ratios: dict[str, float]
    worst: dict[str, tuple[int, ...]]
    origin: str = ""
    reproducer: Path | None = None

    @property
    def ok(self) -> bool:
        """Whether every error is within its budget."""
        return all(ratio <= 1 for ratio in self.ratios.values())

    def __str__(self) -> str:
        parts = [f"{name} {ratio:.2f}" for name, ratio in self.ratios.items()]
        words = f"{'correct' if self.ok else 'WRONG'}: {self.shape}; {', '.join(parts)} of budget"
        if not self.ok:
            name = max(self.ratios, key=self.ratios.__getitem__)
            words += f"; worst: {name}{list(self.worst[name])}; reproducer: {self.reproducer}"
        return words + (f"; {self.origin}" if self.origin else "")


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `flexhop.verify`: one CallCheck per attention call, in order."""

    calls: tuple[CallCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether every call is correct."""
        return all(call.ok for call in self.calls)

    def __str__(self) -> str:
        return "\n".join(map(str, self.calls)) or "The function made no flex_attention call."


def verify(
    fn: Callable[..., Any],
    *args: Any,
    rows: int = 16,
    seed: int = 0,
    backend: str = "inductor",
    folder: str | Path | None = None,
    **kwargs: Any,
) -> Verification:
    """Run a function, and check each of its flex_attention calls against the reference.

    Each call is compiled on its own, with the operands that the function passes, and runs forward
    and backward with random gradients. Sampled queries (out, lse, gradient) and sampled keys
    (gradients of key and value) are computed by the reference in fp64, on the same device, and in
    plain PyTorch, whose error is the budget. Only the sampled rows of scores are stored. Calls
    that read a cache have no gradient and are not checked.

    Args:
        fn: a function or module, compiled or not.
        *args: its arguments.
        rows: how many queries and keys of each call to sample.
        seed: seed of the samples and the random gradients.
        backend: backend of torch.compile.
        folder: where to write a wrong call; by default a new temporary folder.
        **kwargs: further arguments of fn.

    Returns:
        A Verification. `.ok` says whether every call is correct; print it for details.
    """
    found: list[CallCheck] = []
    run = getattr(fn, "_orig_mod", None) or inspect.unwrap(fn)

    def interpret(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        check = _Checker(backend, rows, seed, Path(folder) if folder else None, found)
        return _Checking(graph, check).run

    torch.compile(run, backend=interpret)(*args, **kwargs)
    return Verification(tuple(found))


class _Checking(fx.Interpreter):
    """Runs a graph and checks each attention call."""

    def __init__(self, graph: fx.GraphModule, check: Callable[[AttentionArgs], Any]) -> None:
        super().__init__(graph)
        self.check = check

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one node."""
        if target is attention:
            given = AttentionArgs(*args)
            # Graphs hold their own kind of dict, which Dynamo does not trace.
            self.check(given._replace(options=dict(given.options)))
        return super().call_function(target, args, kwargs)


@dataclasses.dataclass
class _Checker:
    """Checks calls one by one."""

    backend: str
    rows: int
    seed: int
    folder: Path | None
    found: list[CallCheck]

    def __call__(self, args: AttentionArgs) -> None:
        """Check a call of tensors and graphs."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed + len(self.found))
            grad_out = torch.randn(
                (*args.query.shape[:3], args.value.size(3)),
                dtype=args.query.dtype, device=args.query.device,
            )  # fmt: skip
            places = [_sample(t.size(2), self.rows, t.device) for t in (args.query, args.key)]
        actual = _run_compiled(args, grad_out, self.backend)
        saved = Saved(actual["out"], actual["lse"], grad_out)
        wide = Saved(*(t.double() for t in saved))
        gold = _expected(widened(args), places, wide)
        plain = _expected(args, places, saved)
        ratios: dict[str, float] = {}
        worst: dict[str, tuple[int, ...]] = {}
        for name, expected in gold.items():
            place = places[name in ("grad_key", "grad_value")]
            sampled = actual[name].index_select(2, place)
            ratio, at = _judge(sampled, expected, plain[name], args)
            ratios[name], worst[name] = ratio, (*at[:2], int(place[at[2]]))
        shape = f"{list(args.query.shape)} x {list(args.key.shape)} {args.query.dtype}"
        check = CallCheck(shape, ratios, worst, _origin(args, actual["out"]))
        if not check.ok:
            check = dataclasses.replace(check, reproducer=self._write(args, grad_out, check))
        self.found.append(check)

    def _write(self, args: AttentionArgs, grad_out: Tensor, check: CallCheck) -> Path:
        """Write everything that the call needs to a file for torch.load(...,
        weights_only=False)."""
        folder = self.folder or Path(tempfile.mkdtemp(prefix="flexhop_verify_"))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"call_{len(self.found)}.pt"
        given: dict[str, Any] = args._asdict()
        mods = {name: given[name].code for name in ("score_mod", "mask_mod")}
        torch.save(
            {
                "operands": given, "grad_out": grad_out, "ratios": check.ratios,
                "worst": check.worst, "mods": mods, "torch": torch.__version__,
            },
            path,
        )  # fmt: skip
        return path


def _sample(length: int, count: int, device: torch.device) -> Tensor:
    """Some positions in order: the first, the last, and random others."""
    inner = torch.randperm(length)[: max(0, count - 2)]
    return torch.cat([inner, torch.tensor([0, length - 1])]).unique().to(device)


def _run_compiled(args: AttentionArgs, grad_out: Tensor, backend: str) -> dict[str, Tensor]:
    """Results and gradients of the compiled call."""
    leaves = [t.detach().requires_grad_() for t in (args.query, args.key, args.value)]

    def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
        operands = args._replace(query=query, key=key, value=value)
        return attention(*operands)

    out, lse, _ = torch.compile(call, backend=backend, fullgraph=True)(*leaves)
    grads = torch.autograd.grad(out, leaves, grad_out)
    names = ("grad_query", "grad_key", "grad_value")
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}


def _expected(args: AttentionArgs, places: Sequence[Tensor], saved: Saved) -> dict[str, Tensor]:
    queries, keys = places
    return {**query_rows(args, queries, saved.grad_out), **key_rows(args, keys, saved)}


def _judge(
    actual: Tensor, gold: Tensor, plain: Tensor, args: AttentionArgs
) -> tuple[float, tuple[int, ...]]:
    """The largest error of a row in units of its budget, and its position."""
    actual, gold, plain = (t.double().reshape(*t.shape[:3], -1) for t in (actual, gold, plain))
    same = torch.isclose(actual, gold, rtol=0, atol=0, equal_nan=True)
    misplaced = (~same & ~(actual.isfinite() & gold.isfinite())).any(-1)
    error, usual = (
        torch.where(gold.isfinite() & t.isfinite(), (t - gold).abs(), 0.0).amax(-1)
        for t in (actual, plain)
    )
    dtype = args.query.dtype
    size = torch.where(gold.isfinite(), gold.abs(), 0.0).amax(-1)
    eps = 4 * torch.finfo(dtype).eps if dtype in _FACTORS else torch.finfo(dtype).eps
    is_tf32 = dtype == torch.float32 and actual.device.type == "cuda"
    granted = usual + usual.mean() + (_TF32_EPS if is_tf32 else eps) * size
    ratio = error / (_FACTORS.get(dtype, _LOW_FACTOR) * granted + 1e-6)
    ratio = torch.where(misplaced, float("inf"), ratio)
    place = int(ratio.argmax())
    return float(ratio.flatten()[place]), tuple(map(int, torch.unravel_index(
        torch.tensor(place), ratio.shape)))  # fmt: skip


def _origin(args: AttentionArgs, out: Tensor) -> str:
    """Which operand the first NaN of the output came from."""
    bad = out.isnan().any(-1).nonzero()
    if not len(bad):
        return ""
    b, h, row = bad[0].tolist()
    head, batch = h * args.key.size(1) // args.query.size(1), min(b, args.key.size(0) - 1)
    if not args.query[b, h, row].isfinite().all():
        return f"the first NaN, out[{b}, {h}, {row}], comes from query[{b}, {h}, {row}]"
    for name, tensor in (("key", args.key), ("value", args.value)):
        rows = (~tensor[batch, head].isfinite()).any(-1).nonzero()
        if len(rows):
            source = f"{name}[{batch}, {head}, {int(rows[0])}]"
            return f"the first NaN, out[{b}, {h}, {row}], comes from {source}"
    for kind, captures in (("score_mod", args.score_captures), ("mask_mod", args.mask_captures)):
        for n, value in enumerate(captures):
            if isinstance(value, Tensor) and value.is_floating_point() and value.isnan().any():
                return f"the first NaN, out[{b}, {h}, {row}], comes from capture {n} of {kind}"
    return f"the first NaN, out[{b}, {h}, {row}], comes from score_mod, or from the kernel"
