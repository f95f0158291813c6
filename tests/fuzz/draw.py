"""A problem is a number: from it a plan is drawn, and nothing else."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch

from tests.case_inputs import Shape
from tests.fuzz import compared, later, made, masks, rarer, scores, users
from tests.fuzz.masks import BY_BATCH, BY_HEAD
from tests.fuzz.plan import Around, Derivative, Family, Plan
from tests.fuzz.scores import HIDING, IGNORING, SCORES

LENGTHS = (1, 2, 7, 16, 17, 31, 33, 37, 48, 63, 64, 65, 70)
LONG = (100, 127, 128, 129, 200, 257, 513, 1024, 1030, 1281)
WIDTHS = (8, 16, 17, 24, 32, 40, 1, 3)
WIDE = (48, 64, 64, 72, 80, 96, 128, 128, 192, 256)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
FAMILIES: tuple[Family, ...] = ("dense",) * 9 + ("packed",) * 3 + ("paged", "cached", "nested")
LAYOUTS = ("contiguous", "bshd", "column", "padded", "offset", "expanded")
SHARING = 3 * 10**9  # the smallest number of a problem whose batches may share keys or values
SEEDS = 4 * 10**9  # new problems have smaller numbers
BLOCKS = [(128, 128)] * 4 + [
    (64, 64),
    (32, 32),
    (16, 16),
    (20, 20),
    (48, 16),
    (16, 64),
    (256, 256),
]
BLOCKS += [(128, 32), (32, 128), (96, 96), (256, 64), (64, 256), (192, 48)]
STORED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16)


def draw(seed: int, *, large: bool = False) -> Plan:
    """The problem of a number.

    Args:
        seed: any number; the same problem in every run and on every machine.
        large: sizes as on a GPU, for kernels that are generated and perhaps run there.
    """
    r = random.Random(f"flexhop {seed}")
    family = r.choice(FAMILIES)
    dtype = r.choice(DTYPES)
    if large and dtype == torch.float64:  # which has no kernel
        dtype = torch.bfloat16
    mask_names = tuple(r.sample(sorted(masks.OLDER), r.choice([0, 1, 1, 2, 3])))
    score_names = _scores(r)
    plan = Plan(
        family=family, shape=_shape(r, large), dtype=dtype, masks=mask_names,
        how=r.choice(["and", "and", "or", "not", "where", "product"]), scores=score_names,
        learned=tuple(n for s in score_names for n in SCORES[s].learned if r.random() < 0.6),
        train=r.choice(["qkv"] * 8 + ["q", "k", "v", "qk", "kv", "qv", ""]),
        block_size=r.choice(BLOCKS),
        listed=r.random() < 0.1,
        by_batch=r.random() < 0.8 or bool(BY_BATCH & {*mask_names}),
        by_head=r.random() < 0.8 or bool(BY_HEAD & {*mask_names}),
        scale=r.choice([None] * 5 + [0.3, 1.0, -0.2]), layouts=_layouts(r),
        lse=r.random() < 0.4, max_scores=r.random() < 0.15, sinks=r.random() < 0.1,
        dropout=r.choice([0.0] * 9 + [0.1, 0.5]), dynamic=r.choice([False] * 4 + [True, None]),
    )  # fmt: skip
    for newer in (made, users, later, rarer, compared):
        name = newer.__name__.rpartition(".")[2]
        if seed >= newer.FIRST:  # problems keep their numbers
            plan = _with_more(random.Random(f"{name} {seed}"), plan, newer)
    plan = dataclasses.replace(plan, **_of_family(r, plan))
    if seed >= SHARING:
        plan = dataclasses.replace(plan, layouts=_shared(random.Random(f"shared {seed}"), plan))
    plan = dataclasses.replace(plan, options=_options(r, plan, large))
    plan = _consistent(plan)
    # By numbers of their own: they came later, and problems keep their numbers.
    plan = dataclasses.replace(plan, around=_around(random.Random(f"around {seed}"), plan))
    r = random.Random(f"derivative {seed}")
    return dataclasses.replace(plan, derivative=_derivative(r, plan))


def for_hopper(plan: Plan, seed: int) -> Plan:
    """The same problem, as small as it is, for Hopper kernels; or as it is, if it has none."""
    if plan.family not in ("dense", "packed") or plan.dropout or plan.reads_cache:
        return plan
    r = random.Random(f"hopper {seed}")
    width = r.choice([64, 64, 80, 96, 128, 128, 192, 256])
    longer = r.choice([1, 3, 7]) if plan.family == "dense" else 1
    shape = dataclasses.replace(
        plan.shape, head_dim=width, value_head_dim=r.choice([width, width, width, 64]),
        q_len=min(600, plan.shape.q_len * longer), kv_len=min(600, plan.shape.kv_len * longer),
    )  # fmt: skip
    blocks = r.choice([(128, 128)] * 4 + [(64, 64), (32, 32), (16, 16)])
    options = tuple(one for one in plan.options if one[0] == "deterministic")
    return dataclasses.replace(
        plan, shape=shape, dtype=r.choice([torch.bfloat16, torch.float16]),
        block_size=blocks if plan.family == "dense" else (128, 128), layouts=("contiguous",) * 3,
        options=(*options, ("backend", "hopper")), derivative="",
    )  # fmt: skip


def _with_more(r: random.Random, plan: Plan, newer: Any) -> Plan:
    """The plan with functions of the newer vocabulary."""
    more_masks, more = (
        tuple(r.sample(sorted(names), r.choice([0, 1]))) for names in (newer.MASKS, newer.SCORES)
    )
    if any(name in IGNORING for name in plan.scores):  # a number per head cannot hold all scores
        more = tuple(name for name in more if name not in made.IN_PLACE)
    learned = tuple(n for s in more for n in newer.SCORES[s].learned if r.random() < 0.6)
    hiding = [name for name in plan.scores if name in HIDING]
    others = [name for name in plan.scores if name not in HIDING]
    # Autograd may keep the results of others, so that nobody may write to them.
    first = [name for name in more if name in made.IN_PLACE]
    others += [name for name in more if name not in first]
    return dataclasses.replace(
        plan, masks=(*plan.masks, *more_masks), scores=(*first, *others, *hiding),
        learned=(*plan.learned, *learned),
        by_batch=plan.by_batch or bool(BY_BATCH & {*more_masks}),
        by_head=plan.by_head or bool(BY_HEAD & {*more_masks}),
    )  # fmt: skip


def _around(r: random.Random, plan: Plan) -> Around:
    """What the call stands in, if that takes it."""
    chosen: Around = r.choice(["autocast"] * 8 + ["checkpoint"] * 4 + ["vmap"] * 4 + [""] * 84)
    is_half = plan.dtype in (torch.bfloat16, torch.float16)
    takes = {
        "autocast": is_half and plan.family in ("dense", "packed"),
        "checkpoint": plan.is_differentiated and plan.family != "nested",
        "vmap": plan.family == "dense" and not plan.dropout,
    }
    return chosen if takes.get(chosen) else ""


def _derivative(r: random.Random, plan: Plan) -> Derivative:
    """What is computed besides the gradient, if the call has it."""
    chosen: Derivative = r.choice(["tangent"] * 5 + ["second"] * 6 + ["flow"] * 4 + [""] * 85)
    has_leaves = plan.is_differentiated and plan.family in ("dense", "packed")
    # Others have first derivatives alone.
    has_kernel = dict(plan.options).get("backend") != "hopper"
    return chosen if has_leaves and has_kernel and not plan.around else ""


def _shape(r: random.Random, large: bool) -> Shape:
    heads, group = r.choice([1, 2, 3]), r.choice([1, 1, 2, 3, 7])
    lengths = LENGTHS + LONG if large else LENGTHS
    q_len, kv_len = r.choice(lengths), r.choice(lengths)
    if r.random() < 0.5:
        kv_len = q_len
    if r.random() < 0.15:
        q_len = r.choice([1, 1, 2, 5])
    width = r.choice(WIDTHS + WIDE * 2 if large else WIDTHS)
    value = r.choice(WIDTHS) if r.random() < 0.2 else width
    shared = 1 if r.random() < 0.1 else None
    return Shape(r.choice([1, 2]), heads * group, heads, q_len, kv_len, width, value, shared)


def _scores(r: random.Random) -> tuple[str, ...]:
    """Names of score_mods; one that ignores its score comes first, or it would hide others.

    Those that hide keys come last: others would make NaN of an infinity.
    """
    names = r.sample(sorted(scores.OLDER), r.choice([0, 1, 1, 2, 3]))
    ignoring = [n for n in names if n in IGNORING][:1]
    names = [n for n in names if n not in IGNORING]
    return (*ignoring, *sorted(names, key=lambda name: name in HIDING))


def _layouts(r: random.Random) -> tuple[str, ...]:
    if r.random() < 0.1:
        return ("views",) * 3
    if r.random() < 0.6:
        return (r.choice(LAYOUTS),) * 3
    return tuple(r.choice(LAYOUTS) for _ in range(3))


def _shared(r: random.Random, plan: Plan) -> tuple[str, str, str]:
    """The layouts of a plan, of which key or value, or both, may be shared by all batches."""
    if plan.reads_cache or plan.queries or plan.family == "nested" or plan.layouts[0] == "views":
        return plan.layouts
    query, *others = plan.layouts
    key, value = ("shared" if r.random() < 0.25 else layout for layout in others)
    return query, key, value


def _of_family(r: random.Random, plan: Plan) -> dict[str, Any]:
    shape = plan.shape
    if plan.family in ("packed", "nested"):
        return _sequences(r, plan)
    if plan.family == "paged":
        page = r.choice([1, 3, 8, 16, 17, 64, 128])
        room = -(-shape.kv_len // page) * page
        lengths = tuple(r.choice([0, room, r.randint(1, room)]) for _ in range(shape.batch))
        shape = dataclasses.replace(shape, kv_len=room, kv_batch=None)
        return {"page": page, "keys": lengths, "shape": shape} | _stored(r, 0.5)
    return _stored(r, 1.0) if plan.family == "cached" else {}


def _stored(r: random.Random, share: float) -> dict[str, Any]:
    if r.random() > share:
        return {"train": "", "learned": ()}
    kind = r.choice(["number", "head", "key", "shift"])
    return {"stored": r.choice(STORED), "key_mod": kind, "train": "", "learned": ()}


def _sequences(r: random.Random, plan: Plan) -> dict[str, Any]:
    shape, count = plan.shape, r.choice([1, 2, 3, 5])
    queries = tuple(r.choice([0, 1, *[r.randint(1, shape.q_len)] * 6]) for _ in range(count))
    queries = (*queries[1:], max(1, queries[0]))
    keys = None
    if r.random() < 0.4:
        keys = tuple(r.choice([0, *[r.randint(1, shape.kv_len)] * 6]) for _ in range(count))
        keys = (*keys[1:], max(1, keys[0]))
    found = {"queries": queries, "keys": keys}
    lengths = queries if keys is None else keys
    if plan.family == "packed" and r.random() < 0.5:
        found |= {"causal": r.random() < 0.6, "bottom_right": r.random() < 0.7}
        if r.random() < 0.5:
            found["window"] = (r.choice([None, 0, 3, 17]), r.choice([None, 0, 5]))
        if r.random() < 0.3:
            found["used"] = tuple(r.randint(0, n) for n in lengths)
    found["shape"] = dataclasses.replace(
        shape, batch=count, q_len=max(queries), kv_len=max(lengths), kv_batch=None
    )
    return found


def _options(r: random.Random, plan: Plan, large: bool) -> tuple[tuple[str, Any], ...]:
    chosen: dict[str, Any] = {}
    if r.random() < 0.2:
        chosen["deterministic"] = True
    if r.random() < 0.15:
        chosen["short_queries"] = "forward"
    if r.random() < 0.1:
        chosen["splits"] = r.choice([1, 2, 5])
    if r.random() < 0.05:
        chosen["prescale_qk"] = True
    is_half = plan.dtype in (torch.bfloat16, torch.float16)
    if large and is_half and not plan.reads_cache and r.random() < 0.3:
        if _suits_hopper(plan):  # others would be refused
            chosen["backend"] = "hopper"
    elif r.random() < 0.3:
        chosen["backend"] = "triton"
    if plan.dtype == torch.float32 and r.random() < 0.3:
        chosen["float32_precision"] = r.choice(["ieee", "tf32"])
    return tuple(chosen.items())


def _suits_hopper(plan: Plan) -> bool:
    widths = (plan.shape.head_dim, plan.shape.value_head_dim)
    is_aligned = all(33 <= n <= 256 and n % 8 == 0 for n in widths)
    is_aligned = is_aligned and {*plan.layouts} <= {"contiguous", "bshd"}
    has_blocks = plan.block_size == (128, 128) or plan.family == "packed"
    return is_aligned and has_blocks and not plan.dropout


def _consistent(plan: Plan) -> Plan:
    """Without what a family does not have."""
    changes: dict[str, Any] = {}
    if plan.family != "dense":
        changes |= {"listed": False}
    if plan.reads_cache:
        changes |= {"dropout": 0.0}
        if plan.layouts[0] == "views":
            changes |= {"layouts": ("offset",) * 3}
    if plan.family == "nested":
        changes |= {"lse": False, "max_scores": False, "layouts": ("contiguous",) * 3}
        changes |= {"dropout": 0.0, "sinks": False}
    if plan.ignores_score and plan.train and not plan.learned and "v" not in plan.train:
        changes |= {"train": plan.train + "v"}  # nothing else would have a gradient
    return dataclasses.replace(plan, **changes)
