"""``python -m benchmarks.cpu``: compiled attention on a CPU beside in-tree's and PyTorch's SDPA.

All implementations of a case run in one process and take turns, so that their ratios are fair on
a busy machine, too; the least of several times counts. Each result is compared with float64 first.
"""

import argparse
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask as in_tree_mask
from torch.nn.attention.flex_attention import flex_attention as in_tree
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flexhop

WINDOW, CAP, DOCUMENT = 256, 30.0, 300
ROUNDS, SECONDS = 5, 0.3
Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """Self-attention of one batch, or one query against a cache.

    kind: mask or score function. step: forward, training or decode.
    """

    kind: str
    step: str
    keys: int
    dtype: torch.dtype
    queries: int = 0
    heads: int = 8
    kv_heads: int = 8
    width: int = 64

    @property
    def name(self) -> str:
        """As the table and ``--cases`` say it."""
        return f"{self.step}-{self.kind}-{self.keys}-{str(self.dtype).removeprefix('torch.')}"

    def mods(self) -> tuple[Any, Any]:
        """score_mod and mask_mod."""
        document = torch.arange(self.keys) // DOCUMENT
        slopes = torch.exp2(-torch.arange(1, self.heads + 1).float())
        masks = {
            "causal": lambda b, h, q, k: q >= k,
            "window": lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
            "documents": lambda b, h, q, k: document[q] == document[k],
        }
        scores = {
            "alibi": lambda s, b, h, q, k: s + slopes[h] * (k - q),
            "softcap": lambda s, b, h, q, k: CAP * torch.tanh(s / CAP),
        }
        return scores.get(self.kind), masks.get(self.kind)

    def bias(self) -> Any:
        """What SDPA takes as attn_mask; None without."""
        score_mod, mask_mod = self.mods()
        sizes = (self.heads, self.queries, self.keys)
        h, q, k = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
        if mask_mod is not None:
            return mask_mod(0, h[:1], q[:1], k[:1])[None]
        return None if score_mod is None else score_mod(0.0, 0, h, q, k).to(self.dtype)[None]


def _forwards(dtype: torch.dtype) -> list[Case]:
    kinds = ("full", "causal", "window", "documents", "alibi", "softcap")
    sizes = [(kind, 2048) for kind in kinds] + [("causal", 512), ("causal", 4096)]
    return [Case(kind, "forward", size, dtype, size) for kind, size in sizes]


def _others(dtype: torch.dtype) -> list[Case]:
    trained = [("full", 2048), ("causal", 2048), ("window", 2048), ("causal", 512)]
    return [
        *(Case("full", "decode", keys, dtype, 1, 32, 8, 128) for keys in (4096, 16384)),
        *(Case(kind, "training", size, dtype, size) for kind, size in trained),
    ]


CASES = [
    case
    for dtype in (torch.float32, torch.bfloat16)
    for case in (*_forwards(dtype), *_others(dtype))
]


def implementations(case: Case) -> dict[str, Callable[..., torch.Tensor]]:
    """The functions of (query, key, value) that compute a case."""
    score_mod, mask_mod = case.mods()
    ours = theirs = None
    if mask_mod is not None:
        ours = flexhop.create_block_mask(
            mask_mod, None, None, case.queries, case.keys, device="cpu"
        )
        theirs = in_tree_mask(mask_mod, None, None, case.queries, case.keys, device="cpu")
    gqa = case.heads != case.kv_heads
    found: dict[str, Callable[..., torch.Tensor]] = {
        "flexhop": torch.compile(
            lambda q, k, v: flexhop.flex_attention(q, k, v, score_mod, ours, enable_gqa=gqa)
        )
    }
    if case.step != "training":  # in-tree has no backward pass on a CPU
        found["in-tree"] = torch.compile(
            lambda q, k, v: in_tree(q, k, v, score_mod, theirs, enable_gqa=gqa)
        )
    if case.kind == "causal":
        found["sdpa"] = lambda *x: sdpa(*x, is_causal=True)
    elif case.kind != "softcap":
        bias = case.bias()
        found["sdpa"] = lambda *x: sdpa(*x, attn_mask=bias, enable_gqa=gqa)
    return found


def step_of(case: Case, attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> Run:
    """What is timed: the output, or output and gradients."""
    if case.step == "training":
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]

        def train() -> list[torch.Tensor]:
            out = attend(*leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]

        return train

    @torch.no_grad()
    def forward() -> list[torch.Tensor]:
        return [attend(*inputs[:3])]

    return forward


def exact(case: Case, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results in float64, with all scores at once."""
    leaves = [x.double().detach().requires_grad_() for x in inputs[:3]]
    group = case.heads // case.kv_heads
    key, value = (x.repeat_interleave(group, 1) for x in leaves[1:])
    scores = leaves[0] @ key.mT / math.sqrt(case.width)
    score_mod, mask_mod = case.mods()
    index = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *index)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*index), -math.inf)
    out = torch.softmax(scores, -1) @ value
    if case.step != "training":
        return [out.detach()]
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3].double())]


def check(case: Case, runs: dict[str, Run], inputs: list[torch.Tensor]) -> None:
    """Our errors are at most twice a peer's plus one rounding.

    Raises:
        AssertionError: they are not.
    """
    wanted = exact(case, inputs)
    errors = {
        name: [float((a - b).abs().max()) for a, b in zip(run(), wanted, strict=True)]
        for name, run in runs.items()
    }
    for number, (mine, right) in enumerate(zip(errors.pop("flexhop"), wanted, strict=True)):
        allowed = 2 * max(found[number] for found in errors.values())
        allowed += torch.finfo(case.dtype).eps * float(right.abs().max())
        assert mine <= allowed, f"{case.name}, result {number}: {mine} > {allowed}"


def measure(case: Case) -> dict[str, float]:
    """Least milliseconds of each implementation."""
    torch.manual_seed(0)
    shape = (1, case.kv_heads, case.keys, case.width)
    query = (1, case.heads, case.queries, case.width)
    inputs = [torch.randn(size, dtype=case.dtype) for size in (query, shape, shape, query)]
    runs = {name: step_of(case, run, inputs) for name, run in implementations(case).items()}
    check(case, runs, inputs)
    least = dict.fromkeys(runs, math.inf)
    for _ in range(ROUNDS):
        for name, run in runs.items():
            end = time.perf_counter() + SECONDS
            while True:
                start = time.perf_counter()
                run()
                stop = time.perf_counter()
                least[name] = min(least[name], 1e3 * (stop - start))
                if stop > end:
                    break
    return least


def describe_machine() -> str:
    """CPU, threads and versions."""
    try:
        with open("/proc/cpuinfo") as file:
            text = file.read()
    except OSError:
        text = ""
    model = re.search(r"model name\s*: (.*)", text)
    capability = torch.backends.cpu.get_cpu_capability()
    name = model.group(1) if model else "CPU"
    return f"{name}, {capability}; {torch.get_num_threads()} threads; torch {torch.__version__}"


def main(arguments: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("--cases", default="", metavar="REGEX", help="only matching case names")
    options = parser.parse_args(arguments)
    print(f"{describe_machine()}; milliseconds.\n")
    print("| case | flexhop | in-tree | sdpa | / in-tree | / sdpa |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for case in CASES:
        if not re.search(options.cases, case.name):
            continue
        found = measure(case)
        torch.compiler.reset()
        times = [f"{found[n]:.2f}" if n in found else "–" for n in ("flexhop", "in-tree", "sdpa")]
        ratios = [
            f"{found['flexhop'] / found[n]:.2f}" if n in found else "–"
            for n in ("in-tree", "sdpa")
        ]
        print("| " + " | ".join([case.name, *times, *ratios]) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
