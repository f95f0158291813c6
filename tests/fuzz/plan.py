"""A plan says a random problem in plain values; from it everything else follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch

from flexhop import KernelOptions
from tests.case_inputs import Shape
from tests.fuzz.functions import Entry
from tests.fuzz.masks import MASKS
from tests.fuzz.scores import IGNORING, SCORES

Family = Literal["dense", "packed", "nested", "paged", "cached"]
Around = Literal["", "autocast", "checkpoint", "vmap"]
Derivative = Literal["", "tangent", "second", "flow"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """One problem.

    Args:
        family: dense operands; packed sequences; jagged nested tensors; a cache in pages; a cache
            in one piece that k_mod and v_mod read.
        shape: of the call; for sequences, batch is their number, and lengths are the largest.
        dtype: of query.
        masks, how: names in MASKS, and how they are combined.
        scores: names in SCORES, in the order in which they are applied.
        learned: names of captured tensors that need a gradient.
        train: which of q, k and v need one.
        block_size: of the mask. listed: whether it is handed over as lists, with room behind them.
        by_batch, by_head: whether the mask has lists of their own for them.
        layouts: of query, key and value, as for `strided`; "views": parts of one storage.
        options: fields of KernelOptions.
        queries, keys: lengths of sequences; keys None: those of queries. For paged: lengths.
        used: seqused_k. causal, window, bottom_right: of varlen_attention.
        page: size of a page. stored: dtype of the cache. key_mod: "none", "number", "head", "key",
            "shift".
        around: what the call stands in. derivative: what is computed besides; see derivatives.py.
    """

    family: Family = "dense"
    shape: Shape = dataclasses.field(default_factory=Shape)
    dtype: torch.dtype = torch.float32
    masks: tuple[str, ...] = ()
    how: str = "and"
    scores: tuple[str, ...] = ()
    learned: tuple[str, ...] = ()
    train: str = "qkv"
    block_size: tuple[int, int] = (128, 128)
    listed: bool = False
    by_batch: bool = True
    by_head: bool = True
    scale: float | None = None
    layouts: tuple[str, str, str] = ("contiguous",) * 3
    options: tuple[tuple[str, Any], ...] = ()
    lse: bool = False
    max_scores: bool = False
    sinks: bool = False
    dropout: float = 0.0
    dynamic: bool | None = False
    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] | None = None
    used: tuple[int, ...] | None = None
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    bottom_right: bool = True
    page: int = 0
    stored: torch.dtype | None = None
    key_mod: str = "none"
    around: Around = ""
    derivative: Derivative = ""

    @property
    def entries(self) -> list[Entry]:
        return [*(MASKS[n] for n in self.masks), *(SCORES[n] for n in self.scores)]

    @property
    def key_lengths(self) -> tuple[int, ...]:
        return self.queries if self.keys is None else self.keys

    @property
    def ignores_score(self) -> bool:
        return any(name in IGNORING for name in self.scores)

    @property
    def is_differentiated(self) -> bool:
        return bool(self.train or self.learned or self.sinks) and not self.reads_cache

    @property
    def reads_cache(self) -> bool:
        return self.family in ("paged", "cached")

    def kernel_options(self) -> KernelOptions | None:
        return KernelOptions(**dict(self.options)) if self.options else None

    def words(self) -> str:
        """What differs from the simplest plan."""
        simplest = Plan()
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(simplest, field.name)
        ]
        return " ".join(changed)


def simpler(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Plans with less in them, and what was taken away; for the search for a small failure."""
    for name in plan.scores:
        yield f"score {name}", _trimmed(plan, scores=_without(plan.scores, name))
    for name in plan.masks:
        yield f"mask {name}", _trimmed(plan, masks=_without(plan.masks, name))
    for name in plan.learned:
        yield f"learned {name}", _trimmed(plan, learned=_without(plan.learned, name))
    for option in plan.options:
        yield f"option {option[0]}", _trimmed(plan, options=_without(plan.options, option))
    for letter in plan.train:
        yield f"gradient of {letter}", _trimmed(plan, train=plan.train.replace(letter, ""))
    kept = {"family", "shape", "dtype", "masks", "scores", "learned", "options", "train"}
    kept |= {"queries", "keys", "page", "stored", "key_mod"}
    for field in dataclasses.fields(plan):
        if field.name not in kept and getattr(plan, field.name) != field.default:
            yield field.name, _trimmed(plan, **{field.name: field.default})
    yield from _smaller(plan)


def _smaller(plan: Plan) -> Iterator[tuple[str, Plan]]:
    shape = plan.shape
    if plan.queries:
        for i in range(len(plan.queries)) if len(plan.queries) > 1 else ():
            yield f"sequence {i}", without_sequence(plan, i)
        return
    if plan.page:  # whose pages have these lengths
        return
    sizes = {"batch": (1,), "q_len": _halves(shape.q_len), "kv_len": _halves(shape.kv_len)}
    sizes |= {"head_dim": (16, 32, 64), "value_head_dim": (16, 32, 64)}
    for name, values in sizes.items():
        for value in values:
            if value < getattr(shape, name):
                smaller = dataclasses.replace(shape, **{name: value})
                yield f"{name}={value}", _trimmed(plan, shape=smaller)
    if shape.heads > 1:
        yield "heads", _trimmed(plan, shape=dataclasses.replace(shape, heads=1, kv_heads=1))


def without_sequence(plan: Plan, index: int) -> Plan:
    """The plan with one sequence less."""
    cut = {
        name: None if getattr(plan, name) is None else _without_place(getattr(plan, name), index)
        for name in ("queries", "keys", "used")
    }
    shape = dataclasses.replace(plan.shape, batch=plan.shape.batch - 1)
    return _trimmed(plan, shape=shape, **cut)


def _trimmed(plan: Plan, **changes: Any) -> Plan:
    """A changed plan, without the learned names that no function of it has."""
    changed = dataclasses.replace(plan, **changes)
    names = {name for entry in changed.entries for name in entry.learned}
    learned = tuple(name for name in changed.learned if name in names)
    return dataclasses.replace(changed, learned=learned)


def _without(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    return tuple(v for v in values if v != value)


def _without_place(values: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return values[:index] + values[index + 1 :]


def _halves(length: int) -> tuple[int, ...]:
    return tuple(
        sorted({max(1, n) for n in (1, length // 4, length // 2, length - 16, length - 1)})
    )
