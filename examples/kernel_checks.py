"""The quickstart's second half: are the generated kernels right, and how fast are they?"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as intree
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

import flexhop
from flexhop import mods
from flexhop.errors import EagerWarning
from flexhop.masks import packed_causal
from flexhop.offline.interpret import interpret

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
NAMES = ("out", "grad of query", "grad of key", "grad of value")


@dataclass(frozen=True)
class Problem:
    """Packed speeches with ALiBi: tensors, and the two functions."""

    query: Tensor  # [B, H, S, D]
    key: Tensor
    value: Tensor
    grad_out: Tensor
    speeches: Tensor  # [S] int32
    slopes: Tensor  # [H]

    @property
    def leaves(self) -> list[Tensor]:
        """Fresh query, key and value that collect gradients."""
        return [t.detach().clone().requires_grad_() for t in (self.query, self.key, self.value)]

    def double(self) -> "Problem":
        """The same numbers in float64."""
        floats = ("query", "key", "value", "grad_out")
        return replace(self, **{name: getattr(self, name).double() for name in floats})

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """flexhop's attention of this problem."""
        length = query.shape[2]
        mask = flexhop.create_block_mask(
            packed_causal(self.speeches), None, None, length, length, device=str(query.device)
        )
        score_mod = mods.alibi(self.slopes)
        return flexhop.flex_attention(query, key, value, score_mod=score_mod, block_mask=mask)


def make_problem(speeches: Tensor, shape: tuple[int, int, int, int], device: str) -> Problem:
    """Random tensors of [B, H, S, D] over the first S characters of the play."""
    torch.manual_seed(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query, key, value, grad_out = torch.randn(4, *shape, device=device, dtype=dtype)
    slopes = mods.alibi_slopes(shape[1], device=device)
    return Problem(query, key, value, grad_out, speeches[: shape[2]].to(device), slopes)


def results(problem: Problem, attend: Attend) -> list[Tensor]:
    """Output and the gradients of query, key and value."""
    leaves = problem.leaves
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, problem.grad_out)]


def tolerance(problem: Problem) -> float:
    """Relative error that roundings explain: of the operands, and of float32 sums over S terms."""
    own = torch.finfo(problem.query.dtype).eps
    return 2 * own + math.sqrt(problem.query.shape[2]) * torch.finfo(torch.float32).eps


def compare(problem: Problem, found: list[Tensor]) -> bool:
    """Print the relative error of each result against the specification in float64."""
    with warnings.catch_warnings():  # the specification is eager, here on purpose
        warnings.simplefilter("ignore", EagerWarning)
        exact = results(problem.double(), problem.double().attend)
    bound = tolerance(problem)
    errors = [float((f - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)]
    for name, error in zip(NAMES, errors, strict=True):
        verdict = "ok" if error <= bound else "WRONG"
        print(f"  {name:14s} relative error {error:.1e}, allowed {bound:.1e}: {verdict}")
    return all(error <= bound for error in errors)  # False for NaN, too


def check_on_gpu(speeches: Tensor) -> bool:
    """Whether the compiled kernels, forward and backward, agree with the specification."""
    problem = make_problem(speeches, (2, 8, 1000, 64), "cuda")
    print("GPU kernels in bfloat16 against the specification in float64:")
    return compare(problem, results(problem, torch.compile(problem.attend)))


def print_speed(speeches: Tensor) -> None:
    """Print milliseconds of forward and forward plus backward beside PyTorch's own."""
    problem = make_problem(speeches, (4, 16, 8192, 64), "cuda")
    print("Speed, bfloat16, B=4 H=16 S=8192 D=64, ALiBi, causal within speeches, milliseconds:")
    print(f"  {'':28s}{'forward':>10s}{'+ backward':>12s}")
    for name, attend in contenders(problem).items():
        forward, both = milliseconds(problem, attend)
        print(f"  {name:28s}{forward:10.2f}{both:12.2f}")


def contenders(problem: Problem) -> dict[str, Attend]:
    """The same attention three times; masks are made before the clock starts."""
    length, speeches, slopes = problem.query.shape[2], problem.speeches, problem.slopes
    mask_mod, score_mod = packed_causal(speeches), mods.alibi(slopes)
    own_mask = flexhop.create_block_mask(mask_mod, None, None, length, length, device="cuda")
    peer_mask = intree.create_block_mask(mask_mod, None, None, length, length, device="cuda")
    own, peer = torch.compile(flexhop.flex_attention), torch.compile(intree.flex_attention)
    index = torch.arange(length, device="cuda")
    visible = mask_mod(torch.tensor(0), torch.tensor(0), index[:, None], index[None, :])
    bias = slopes[:, None, None] * (index[None, :] - index[:, None])
    bias = bias.masked_fill(~visible, -math.inf).to(problem.query.dtype)[None]
    return {
        "flexhop": lambda q, k, v: own(q, k, v, score_mod=score_mod, block_mask=own_mask),
        "in-tree flex_attention": lambda q, k, v: peer(
            q, k, v, score_mod=score_mod, block_mask=peer_mask
        ),
        "SDPA with an S x S bias": lambda q, k, v: scaled_dot_product_attention(q, k, v, bias),
    }


def milliseconds(problem: Problem, attend: Attend) -> tuple[float, float]:
    """Median time of a forward call without gradients, and of forward plus backward."""
    leaves = problem.leaves

    def forward() -> None:
        with torch.no_grad():
            attend(*leaves)

    def both() -> None:
        torch.autograd.grad(attend(*leaves), leaves, problem.grad_out)

    medians: list[float] = []
    for step in (forward, both):
        for _ in range(3):
            step()  # compile and warm up
        timer = Timer("step()", globals={"step": step})
        medians.append(1e3 * timer.blocked_autorange(min_run_time=0.3).median)
    return medians[0], medians[1]


def check_in_interpreter(speeches: Tensor) -> bool:
    """Whether the kernels, generated here and run by Triton's interpreter, agree.

    The kernels are those of an H100 (compute capability 9.0): generating them needs no GPU.
    """
    problem = make_problem(speeches, (1, 2, 200, 32), "cpu")
    leaves = problem.leaves
    generated = interpret(problem.attend, *leaves, grad=lambda out: (out * problem.grad_out).sum())
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    count = len(generated.templates)
    print(f"{count} generated GPU kernels, run in Triton's interpreter in float32,")
    print("against the specification in float64:")
    return compare(problem, [generated.result.detach(), *grads])
