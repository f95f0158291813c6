"""From a plan to tensors and a call: what a user would write."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import flexhop
from tests.caches import place
from tests.case_inputs import Random, strided
from tests.fuzz.around import surrounded
from tests.fuzz.functions import chain_scores, combine_masks
from tests.fuzz.masks import MASKS
from tests.fuzz.plan import Plan
from tests.fuzz.scores import SCORES

Mod = Callable[..., Any]


@dataclasses.dataclass
class Problem:
    """Tensors of one plan.

    operands: query, key and value as the call takes them. plain: key and value of a cache, as its
    mods make them, [B, Hkv, N, D] and fp32. factors: tensors that these mods read. grad_out,
    grad_lse: of the results, in their shapes.
    is_for_gpu: whether kernels of GPUs compute it, there or in the interpreter.
    """

    plan: Plan
    operands: tuple[Tensor, Tensor, Tensor]
    captures: SimpleNamespace
    sinks: Tensor | None
    seed: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    plain: tuple[Tensor, Tensor] | None = None
    table: flexhop.PageTable | None = None
    key_mods: dict[str, Mod] = dataclasses.field(default_factory=dict)
    factors: tuple[Tensor, ...] = ()
    is_for_gpu: bool = False

    @property
    def truncates(self) -> bool:
        """Whether products drop the bits of fp32 that TF32 lacks; only GPUs have TF32."""
        return self.is_for_gpu and dict(self.plan.options).get("float32_precision") == "tf32"

    @property
    def device(self) -> torch.device:
        return self.operands[0].device

    def leaves(self) -> dict[str, Tensor]:
        """What is differentiated, by name."""
        named = dict(zip("qkv", self.operands, strict=True))
        leaves = {f"grad_{n}": t for n, t in named.items() if t.requires_grad}
        leaves |= {n: getattr(self.captures, n) for n in self.plan.learned}
        if self.sinks is not None and self.sinks.requires_grad:
            leaves["sinks"] = self.sinks
        return leaves

    def fill(self, other: Problem) -> None:
        """Give operands, what is learned, and the gradients of results, the values of another one.

        Of a cache, too: equal plans put equal lengths into the same pages.
        """
        self.plain = other.plain
        pairs = [*zip(self.operands, other.operands, strict=True)]
        pairs += zip(self.factors, other.factors, strict=True)
        pairs += [
            (getattr(self.captures, n), getattr(other.captures, n)) for n in self.plan.learned
        ]
        pairs += [(self.grad_out, other.grad_out), (self.grad_lse, other.grad_lse)]
        if self.sinks is not None and other.sinks is not None:
            pairs.append((self.sinks, other.sinks))
        with torch.no_grad():
            for mine, new in pairs:
                for dim, stride in enumerate(mine.stride()):
                    if stride == 0:  # the same numbers everywhere
                        mine, new = mine.narrow(dim, 0, 1), new.narrow(dim, 0, 1)
                mine.copy_(new)

    def with_leaves(self, values: Sequence[Tensor]) -> Problem:
        """The same problem of other tensors, in the order of `leaves`."""
        named = dict(zip(self.leaves(), values, strict=True))
        pairs = zip("qkv", self.operands, strict=True)
        query, key, value = (named.get(f"grad_{n}", t) for n, t in pairs)
        captures = dict(vars(self.captures)) | {n: named[n] for n in self.plan.learned}
        fresh = copy.copy(self)
        fresh.operands = (query, key, value)
        fresh.captures = SimpleNamespace(**captures)
        fresh.sinks = named.get("sinks", self.sinks)
        return fresh

    def score_mod(self) -> Mod | None:
        names = self.plan.scores
        return chain_scores([SCORES[n] for n in names])(self.captures) if names else None

    def mask_mod(self) -> Mod | None:
        names, how = self.plan.masks, self.plan.how
        return combine_masks([MASKS[n] for n in names], how)(self.captures) if names else None


def make_problem(plan: Plan, seed: int, device: torch.device | str = "cpu") -> Problem:
    """Tensors from a number."""
    r, shape = Random(seed), plan.shape
    values = _captured(plan, r)
    values = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}
    for name in plan.learned:
        values[name].requires_grad_()
    sinks = r.normal(shape.heads).to(device) if plan.sinks else None
    if sinks is not None and plan.is_differentiated:
        sinks.requires_grad_()
    rows = (sum(plan.queries),) if plan.queries else (shape.batch, shape.q_len)
    is_dense = not plan.queries
    lse_shape = (rows[0], shape.heads, *rows[1:]) if is_dense else (*rows, shape.heads)
    grad_lse = r.normal(*lse_shape).to(device)
    grad_out = r.normal(*lse_shape, shape.value_head_dim, dtype=plan.dtype).to(device)
    return Problem(
        plan, captures=SimpleNamespace(**values, shape=shape), sinks=sinks, grad_out=grad_out,
        seed=r.integers(2**31 - 1, 2, dtype=torch.int64).to(device), grad_lse=grad_lse,
        **_operands(plan, r, device),
    )  # fmt: skip


def _captured(plan: Plan, r: Random) -> dict[str, Any]:
    """What the mods capture, by name.

    Raises:
        ValueError: two mods give one name to different values: one would read the other's.
    """
    values: dict[str, Any] = {}
    for entry in plan.entries:
        for name, value in entry.captures(plan.shape, r).items():
            if name in values and not _is_same(values[name], value):
                raise ValueError(
                    f"Two mods of a random problem capture different values as {name!r}; give one "
                    f"of them another name: {plan.words()}"
                )
            values[name] = value
    return values


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def _operands(plan: Plan, r: Random, device: Any) -> dict[str, Any]:
    if plan.reads_cache:
        return _cache(plan, r, device)
    shape, rows = plan.shape, sum(plan.queries)
    sizes = [shape.query, shape.key, shape.value]
    if plan.queries:
        keys = sum(plan.key_lengths)
        sizes = [
            (1, rows, shape.heads, shape.head_dim),
            (1, keys, *shape.key[1:2], shape.head_dim),
        ]
        sizes.append((*sizes[1][:3], shape.value_head_dim))
    tensors = [r.normal(*size, dtype=plan.dtype).to(device) for size in sizes]
    if plan.around == "autocast":
        tensors = [tensor.float() for tensor in tensors]
    if plan.layouts[0] == "views":
        tensors = _views(tensors)
    else:
        # "expanded" is of heads, which packed tokens do not have in the second place.
        layouts = ["offset" if plan.queries and n == "expanded" else n for n in plan.layouts]
        tensors = [strided(t, layout) for t, layout in zip(tensors, layouts, strict=True)]
    tensors = [t[0] if plan.queries else t for t in tensors]
    for tensor, letter in zip(tensors, "qkv", strict=True):
        tensor.requires_grad_(letter in plan.train)
    return {"operands": tuple(tensors)}


def _views(tensors: list[Tensor]) -> list[Tensor]:
    """Parts of one storage, one after the other."""
    storage = torch.cat([t.flatten() for t in tensors])
    parts = storage.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def _cache(plan: Plan, r: Random, device: Any) -> dict[str, Any]:
    """Keys and values in a cache, with what their mods make of them."""
    shape = plan.shape
    query = strided(r.normal(*shape.query, dtype=plan.dtype).to(device), plan.layouts[0])
    stored, plain, mods, factors = [], [], {}, []
    for name, size in (("k_mod", shape.key), ("v_mod", shape.value)):
        numbers = r.normal(*size)
        kept = (numbers * 40).round().clamp(-127, 127) if plan.stored == torch.int8 else numbers
        kept = kept.to(plan.stored or plan.dtype).to(device)
        mod, factor = _key_mod(plan, r, device)
        stored.append(kept)
        plain.append(kept.double() if mod is None else _applied(mod, kept, shape.batch))
        if mod is not None:
            mods[name] = mod
        if factor is not None:
            factors.append(factor)
    table = None
    if plan.page:
        assert plan.keys is not None
        paged = place(stored[0].cpu(), stored[1].cpu(), list(plan.keys), plan.page)
        stored = [paged.key_cache.to(device), paged.value_cache.to(device)]
        table = flexhop.PageTable(
            paged.table.pages.to(device), plan.page, paged.table.lengths.to(device)
        )
    return {
        "operands": (query, *stored), "plain": tuple(plain), "table": table, "key_mods": mods,
        "factors": tuple(factors),
    }  # fmt: skip


def _key_mod(plan: Plan, r: Random, device: Any) -> tuple[Mod | None, Tensor | None]:
    """A mod of keys or values, and the tensor that it reads."""
    kind, shape = plan.key_mod, plan.shape
    unit = 1 / 40 if plan.stored == torch.int8 else 1.0
    if kind == "none":
        return None, None
    if kind == "number":
        return flexhop.mods.dequantize(unit * 1.25), None
    sizes = (shape.kv_heads,) if kind == "head" else (shape.batch, shape.kv_heads, shape.kv_len)
    scale = ((0.5 + r.uniform(*sizes)) * unit).to(device)
    if kind != "shift":
        return flexhop.mods.dequantize(scale), scale
    return lambda x, b, h, kv_idx: (x - 0.25) * scale[b, h, kv_idx] + 0.01 * (h - b), scale


def _applied(mod: Mod, stored: Tensor, batch: int) -> Tensor:
    """What a key_mod makes of keys, [B, Hkv, N, D], in fp64."""
    stored = stored.expand(batch, -1, -1, -1)
    b, h, n = (torch.arange(size, device=stored.device) for size in stored.shape[:3])
    scale = getattr(mod, "scale", None)
    if scale is None:
        index = (b.view(-1, 1, 1, 1), h.view(-1, 1, 1), n.view(-1, 1))
        return mod(stored.double(), *index)
    factor = torch.as_tensor(scale, dtype=torch.float64, device=stored.device)
    shape = {0: (), 1: (-1, 1, 1)}.get(factor.dim(), (*factor.shape, 1))
    return stored.double() * factor.view(shape)


def make_call(problem: Problem) -> Callable[..., Any]:
    """A function of query, key and value."""
    return surrounded(problem, bare_call(problem))


def bare_call(problem: Problem) -> Callable[..., Any]:
    """The same without what stands around it; keywords replace those of the problem."""
    plan, keywords = problem.plan, _keywords(problem)
    if plan.family == "packed":
        return _packed_call(problem, keywords)
    if plan.family == "nested":
        return _nested_call(problem, keywords)
    if problem.table is not None:
        keywords["page_table"] = problem.table
    mask_mod = problem.mask_mod()
    mask = None if mask_mod is None else _block_mask(problem, mask_mod)

    def call(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> Any:
        return flexhop.flex_attention(
            query, key, value, block_mask=mask, **problem.key_mods, **(keywords | others)
        )

    return call


def _keywords(problem: Problem) -> dict[str, Any]:
    plan = problem.plan
    keywords: dict[str, Any] = {
        "score_mod": problem.score_mod(), "scale": plan.scale,
        "enable_gqa": plan.shape.heads != plan.shape.kv_heads,
        "kernel_options": plan.kernel_options(),
    }  # fmt: skip
    if plan.lse or plan.max_scores:
        keywords["return_aux"] = flexhop.AuxRequest(plan.lse, plan.max_scores)
    if problem.sinks is not None:
        keywords["sinks"] = problem.sinks
    if plan.dropout:
        keywords |= {"dropout_p": plan.dropout, "dropout_seed": problem.seed}
    return keywords


def _block_mask(problem: Problem, mask_mod: Mod) -> flexhop.BlockMask:
    plan, shape = problem.plan, problem.plan.shape
    mask = flexhop.create_block_mask(
        mask_mod, shape.batch if plan.by_batch else None, shape.heads if plan.by_head else None,
        shape.q_len, shape.kv_len, str(problem.device), BLOCK_SIZE=plan.block_size,
    )  # fmt: skip
    if not plan.listed:
        return mask
    lists: list[Tensor] = []
    pairs = (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    )
    for counts, indices in pairs:
        assert counts is not None and indices is not None
        width = max(1, int(counts.max()))
        indices = indices[..., :width].clone()
        # Nobody may read behind the end of a list.
        indices[torch.arange(width, device=counts.device) >= counts[..., None]] = 2**30
        lists += [counts, indices]
    return flexhop.BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=plan.block_size, mask_mod=mask_mod,
        seq_lengths=(shape.q_len, shape.kv_len),
    )  # fmt: skip


def offsets(lengths: tuple[int, ...], device: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    """Where sequences begin, and the end of the last one."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, dtype)


def _packed_call(problem: Problem, keywords: dict[str, Any]) -> Callable[..., Any]:
    plan, device = problem.plan, problem.device
    used = None if plan.used is None else torch.tensor(plan.used, device=device).int()
    keys = None if plan.keys is None else offsets(plan.keys, device)
    starts = offsets(plan.queries, device)
    mask_mod = problem.mask_mod()

    def call(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> Any:
        return flexhop.varlen_attention(
            query, key, value, starts, keys, mask_mod=mask_mod, is_causal=plan.causal,
            window_size=plan.window, bottom_right=plan.bottom_right, seqused_k=used,
            **(keywords | others),
        )  # fmt: skip

    return call


def _nested_call(problem: Problem, keywords: dict[str, Any]) -> Callable[..., Any]:
    plan, device = problem.plan, problem.device
    starts = offsets(plan.queries, device, torch.int64)
    ends = starts if plan.keys is None else offsets(plan.keys, device, torch.int64)
    longest = (max(plan.queries), max(1, *plan.key_lengths))

    def nest(values: Tensor, cuts: Tensor, length: int) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(
            values, cuts, min_seqlen=0, max_seqlen=length
        )
        return nested.transpose(1, 2)

    mask_mod, mask = problem.mask_mod(), None
    if mask_mod is not None:
        query, key = (t.detach() for t in problem.operands[:2])
        mask = flexhop.create_nested_block_mask(
            mask_mod, plan.shape.batch, plan.shape.heads, nest(query, starts, longest[0]),
            None if plan.keys is None else nest(key, ends, longest[1]),
            BLOCK_SIZE=plan.block_size,
        )  # fmt: skip

    def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
        out = flexhop.flex_attention(
            nest(query, starts, longest[0]), nest(key, ends, longest[1]),
            nest(value, ends, longest[1]), block_mask=mask, **keywords,
        )  # fmt: skip
        return out.transpose(1, 2).values()

    return call
