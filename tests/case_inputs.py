"""What a case of tests/cases.py is made of, and how it becomes a call of flex_attention.

A case's functions are built by factories that are given its captured tensors, so that one case
runs on any device, with any copy of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import flexhop
from flexhop import BlockMask, KernelOptions, Tile


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one call. kv_batch: 1 when all batches share key and value."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    q_len: int = 65
    kv_len: int = 65
    head_dim: int = 16
    value_head_dim: int = 16
    kv_batch: int | None = None

    @property
    def query(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.q_len, self.head_dim

    @property
    def key(self) -> tuple[int, int, int, int]:
        return self.kv_batch or self.batch, self.kv_heads, self.kv_len, self.head_dim

    @property
    def value(self) -> tuple[int, int, int, int]:
        return (*self.key[:3], self.value_head_dim)


class Random:
    """Captured tensors from a seed, the same on every device."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, generator=self.generator).to(dtype)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator)

    def integers(self, high: int, *size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(0, high, size, generator=self.generator).to(dtype)

    def flags(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator) < 0.5

    def documents(self, count: int, *size: int) -> Tensor:
        """Ascending document ids along the last dimension."""
        return self.integers(count, *size).sort(-1).values


Captures = Any  # SimpleNamespace of the case's captured tensors and its `shape`
MakeMod = Callable[[Captures], Callable[..., Tensor]]
MakeCaptures = Callable[[Shape, Random], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem.

    Args:
        name: unique.
        score: from captures to a score_mod.
        mask: from captures to a mask_mod.
        blocks: from captures and device to a block mask made by hand; then `mask` is not used.
        captures: from shape and random numbers to the captured values.
        learned: names of captures that need a gradient.
        shape: of the kernel tiers, small.
        grown: of the GPU tier; by default `shape` with lengths, heads and head dim enlarged.
        dtype: of query, key and value.
        block_size: of the mask.
        per_batch, per_head: whether the mask differs by batch, by head.
        scale: of flex_attention.
        layout: of the inputs, see `strided`.
        options: kernel options of the kernel tiers.
        lse: whether the loss depends on lse, too.
        max_scores: whether the largest scores are asked for and compared.
        ignores_score: whether score_mod does without its score, so query gets no gradient.
        stock: whether PyTorch's compiled flex_attention takes it on CUDA, with gradients.
    """

    name: str
    score: MakeMod | None = None
    mask: MakeMod | None = None
    blocks: Callable[[Captures, torch.device], BlockMask] | None = None
    captures: MakeCaptures | None = None
    learned: tuple[str, ...] = ()
    shape: Shape = Shape()
    grown: Shape | None = None
    dtype: torch.dtype = torch.float32
    block_size: int | tuple[int, int] = 128
    per_batch: bool = False
    per_head: bool = False
    scale: float | None = None
    layout: str = "contiguous"
    options: KernelOptions | None = None
    lse: bool = False
    max_scores: bool = False
    ignores_score: bool = False
    stock: bool = True

    @property
    def has_mask(self) -> bool:
        return self.mask is not None or self.blocks is not None

    def on_gpu(self) -> Case:
        """The case at a realistic size, with default tiles."""
        return dataclasses.replace(self, shape=self.grown or _grow(self.shape), options=None)


def _grow(shape: Shape) -> Shape:
    length = {1: 1, 37: 277, 65: 513, 127: 1023, 257: 2049, 333: 1733}
    width = {16: 64}
    return dataclasses.replace(
        shape,
        batch=shape.batch + 1,
        heads=shape.heads * 2,
        kv_heads=shape.kv_heads * 2,
        q_len=length.get(shape.q_len, shape.q_len * 4),
        kv_len=length.get(shape.kv_len, shape.kv_len * 4),
        head_dim=width.get(shape.head_dim, shape.head_dim),
        value_head_dim=width.get(shape.value_head_dim, shape.value_head_dim),
    )


TINY = Tile(16, 16, num_warps=4, num_stages=1)
SMALL_TILES = KernelOptions(forward=TINY, grad_query=TINY, grad_key_value=TINY)
OBLONG_TILES = KernelOptions(
    forward=Tile(32, 16, num_warps=4, num_stages=1),
    grad_query=Tile(16, 32, num_warps=4, num_stages=1),
    grad_key_value=Tile(32, 16, num_warps=4, num_stages=1),
)


@dataclasses.dataclass
class Inputs:
    """Tensors of one run of a case."""

    query: Tensor
    key: Tensor
    value: Tensor
    captures: Captures
    grad_out: Tensor
    grad_lse: Tensor

    def leaves(self, case: Case) -> dict[str, Tensor]:
        """What is differentiated, by name."""
        learned = {name: getattr(self.captures, name) for name in case.learned}
        return {"query": self.query, "key": self.key, "value": self.value} | learned


def make_inputs(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    """Fresh inputs with the case's layout; the leaves require gradients."""
    random = Random(seed)
    shape = case.shape
    tensors = [
        strided(random.normal(*size, dtype=case.dtype).to(device), case.layout)
        for size in (shape.query, shape.key, shape.value)
    ]
    values = case.captures(shape, random) if case.captures is not None else {}
    values = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}
    for name in case.learned:
        values[name].requires_grad_()
    return Inputs(
        *(tensor.requires_grad_() for tensor in tensors),
        captures=SimpleNamespace(**values, shape=shape),
        grad_out=random.normal(*shape.query[:3], shape.value_head_dim, dtype=case.dtype).to(
            device
        ),
        grad_lse=random.normal(*shape.query[:3]).to(device),
    )


def copy_inputs(case: Case, inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """Fresh leaves of equal value, query, key, value and learned captures in `dtype` if given.

    Captures that are not learned keep their dtype: they belong to the mod.
    """

    def leaf(tensor: Tensor) -> Tensor:
        kept = tensor.detach().clone() if dtype is None else tensor.detach().to(dtype)
        return kept.requires_grad_()

    values = dict(vars(inputs.captures))
    for name in case.learned:
        values[name] = leaf(values[name])
    return Inputs(
        leaf(inputs.query), leaf(inputs.key), leaf(inputs.value),
        SimpleNamespace(**values), inputs.grad_out, inputs.grad_lse,
    )  # fmt: skip


def strided(tensor: Tensor, layout: str) -> Tensor:
    """A tensor of the same values, [B, H, S, D], stored another way.

    bshd: a transposed [B, S, H, D]. column: the last stride is S. padded: rows of D + 1.
    offset: behind 997 elements of its storage. expanded: every head is the first one, stride 0.
    shared: every batch is the first one, likewise.
    """
    batch, heads, length, width = tensor.shape
    if layout == "contiguous":
        return tensor
    if layout == "bshd":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "column":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "padded":
        rows = tensor.new_full((batch, heads, length, width + 1), float("nan"))
        rows[..., :width] = tensor
        return rows[..., :width]
    if layout == "offset":
        storage = tensor.new_full((997 + tensor.numel(),), float("nan"))
        storage[997:] = tensor.flatten()
        return storage[997:].view(tensor.shape)
    if layout == "expanded":
        return tensor[:, :1].contiguous().expand(tensor.shape)
    if layout == "shared":
        return tensor[:1].contiguous().expand(tensor.shape)
    raise ValueError(layout)


def make_block_mask(
    case: Case, inputs: Inputs, create: Callable[..., Any] = flexhop.create_block_mask
) -> Any:
    """The case's block mask, or None."""
    shape, device = case.shape, inputs.query.device
    if case.blocks is not None:
        return case.blocks(inputs.captures, device)
    if case.mask is None:
        return None
    return create(
        case.mask(inputs.captures),
        shape.batch if case.per_batch else None,
        shape.heads if case.per_head else None,
        shape.q_len,
        shape.kv_len,
        device=str(device),
        BLOCK_SIZE=case.block_size,
    )


def make_call(
    case: Case, inputs: Inputs, flex: Callable[..., Any] = flexhop.flex_attention, **extra: Any
) -> Callable[..., Any]:
    """A function of query, key and value that calls flex_attention as the case says.

    It returns out, or (out, aux) if the case needs statistics.
    """
    block_mask = extra.pop("block_mask", None)
    if block_mask is None:
        block_mask = make_block_mask(case, inputs)
    score_mod = case.score(inputs.captures) if case.score is not None else None
    if case.options is not None:
        extra.setdefault("kernel_options", case.options)
    if case.lse or case.max_scores:
        extra.setdefault("return_aux", flexhop.AuxRequest(case.lse, case.max_scores))

    def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return flex(
            query, key, value, score_mod, block_mask, scale=case.scale,
            enable_gqa=case.shape.heads != case.shape.kv_heads, **extra,
        )  # fmt: skip

    return call


def make_loss(case: Case, inputs: Inputs) -> Callable[[Any], Tensor]:
    """The scalar that is differentiated: sum(out * grad_out), plus sum(lse * grad_lse)."""

    def loss(result: Any) -> Tensor:
        out, lse, _ = unpack(result)
        total = (out * inputs.grad_out.to(out.dtype)).sum()
        if case.lse:
            assert lse is not None
            # A row that sees nothing has lse -inf, and no gradient.
            total = total + (lse * inputs.grad_lse.to(lse.dtype))[lse.detach().isfinite()].sum()
        return total

    return loss


def unpack(result: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Out, lse, max_scores of what flex_attention returned."""
    if isinstance(result, Tensor):
        return result, None, None
    out, aux = result
    return out, aux.lse, aux.max_scores
