"""explain(): report what a flex_attention call would run, without running it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from flexhop.attention import AuxRequest, Options, flex_attention
from flexhop.block_mask.creation import create_block_mask, create_mask
from flexhop.block_mask.lists import block_count, lists_to_dense
from flexhop.block_mask.mask import BlockMask
from flexhop.cache.pages import PageTable
from flexhop.compat.operators import hop
from flexhop.compat.storage import begins_with
from flexhop.mods.functions import ScoreMod
from flexhop.mods.keys import KeyMod
from flexhop.ops.args import AttentionArgs, CachedArgs
from flexhop.ops.cached import cached_attention
from flexhop.ops.call import Mistake, note_wrong_type
from flexhop.ops.forward import attention
from flexhop.ops.layout import is_nothing
from flexhop.options.debug import mod_code
from flexhop.reports.report import Capture, Mask, Mod, Pass, Report
from flexhop.sequences.nested import Operands, Packed, has_nested, pack
from flexhop.sequences.ranges import RangeMask

__all__ = ["Report", "explain"]

# Most mask elements to evaluate when counting visible ones: tens of milliseconds.
MAX_ELEMENTS = 1 << 22

_ON_CPU = (
    "query is on the CPU. A compiled call there runs the reference implementation in chunks of "
    "queries. The kernels above are for the GPU named above."
)
_NO_KERNEL = (
    "fp64 has no kernels: a compiled call runs the reference implementation in chunks of queries."
)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Any | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Options = None,
    *,
    return_aux: AuxRequest | None = None,
    sinks: Tensor | None = None,
    page_table: PageTable | None = None,
    k_mod: KeyMod | None = None,
    v_mod: KeyMod | None = None,
    dropout_p: float = 0,
    dropout_seed: Tensor | None = None,
    capability: tuple[int, int] | None = None,
) -> Report:
    """Report what torch.compile would generate for a call: graphs, kernels, tiles, work.

    It runs nothing and needs no GPU. query, key and value may be on the CPU, on a GPU, on "meta",
    or fake: explain reads only their shapes, dtypes and requires_grad, and whether value is a
    view of key's first columns.

    Args:
        query: [B, Hq, M, D]. Nested inputs are reported as packed tokens.
        key: [B, Hkv, N, D].
        value: [B, Hkv, N, Dv].
        score_mod: as for flex_attention, or None.
        block_mask: a BlockMask or None. Counting its blocks synchronises with its device.
        scale: the factor of the scores; None is 1 / sqrt(D).
        enable_gqa: whether groups of query heads share key heads.
        return_lse: whether the call returns the log-sum-exp.
        kernel_options: KernelOptions, or a dictionary as for PyTorch.
        return_aux: further results to return.
        sinks: [Hq], or None. They are applied to the kernel's results.
        page_table: the page table of a KV cache. Its values are not read.
        k_mod: the function applied to each element of key, or None.
        v_mod: the function applied to each element of value, or None.
        dropout_p: probability of dropping a weight, from 0 to below 1.
        dropout_seed: [2] int64, or None. It is not read.
        capability: compute capability of the GPU to plan for, such as (9, 0). None: the GPU that
            holds query, otherwise (9, 0).

    Returns:
        A Report; `print` it.

    Raises:
        FlexhopError: as the call itself would raise.
        OptionValueError: an unknown capability.
    """
    from flexhop.reports import dry_run

    flags = {"enable_gqa": enable_gqa, "return_lse": return_lse}
    _raise(note_wrong_type(query, key, value, scale, return_aux, **flags))
    device = dry_run.find_device(query, capability)
    tensors = (query, key, value)
    if has_nested(*tensors):
        tensors, score_mod, block_mask = _packed(pack(tensors, score_mod, block_mask))
    keywords = {
        "score_mod": score_mod,
        "block_mask": block_mask,
        "scale": scale,
        **flags,
        "kernel_options": kernel_options,
        "return_aux": return_aux,
        "sinks": None if sinks is None else _stand_in(sinks, _home(block_mask)),
        "dropout_p": dropout_p,
        "dropout_seed": _seed_like(dropout_seed, block_mask),
        "page_table": page_table,
        "k_mod": k_mod,
        "v_mod": v_mod,
    }
    if isinstance(page_table, PageTable):
        tables = (_stand_in(t, _home(block_mask)) for t in (page_table.pages, page_table.lengths))
        keywords["page_table"] = PageTable(next(tables), page_table.page_size, next(tables))
    with hop.as_compiled():
        args = _trace([_stand_in(tensor, _home(block_mask)) for tensor in tensors], keywords)
        wants_lse = return_lse or (return_aux is not None and return_aux.lse)
        found = dry_run.survey(
            args, device, value_is_key=begins_with(tensors[1], tensors[2]),
            moves_lse=wants_lse or sinks is not None,
        )  # fmt: skip
        mask = None if block_mask is None else _describe_mask(_as_lists(block_mask))
        report = _report(args, found, mask)
    if query.device.type == "cpu" and capability is None:
        return dataclasses.replace(report, notes=(_ON_CPU, *report.notes))
    return report


def _packed(call: Packed) -> tuple[Operands, ScoreMod | None, Any]:
    """Convert a call with nested operands to its call with packed tokens."""
    _raise(call.mistake)
    return call.operands, call.score_mod, call.block_mask


def _raise(mistake: Mistake | None) -> None:
    if mistake is not None:
        raise mistake[0](**dict(mistake[1]))


def _home(block_mask: Any) -> torch.device:
    """Device for the stand-ins of tensors without data: the mask's, otherwise the CPU."""
    if isinstance(block_mask, RangeMask):
        return block_mask.first_key.device
    counts = getattr(block_mask, "kv_num_blocks", None)
    return torch.device("cpu") if counts is None else counts.device


def _as_lists(block_mask: Any) -> BlockMask:
    """A mask with block lists; packed sequences have ranges of keys instead."""
    if not isinstance(block_mask, RangeMask):
        return BlockMask.of(block_mask)
    return create_block_mask(
        block_mask.mask_mod, None, None, *block_mask.seq_lengths, block_mask.first_key.device,
        block_mask.BLOCK_SIZE,
    )  # fmt: skip


def _seed_like(seed: Tensor | None, block_mask: Any) -> Tensor | None:
    return _stand_in(seed, _home(block_mask)) if isinstance(seed, Tensor) else seed


def _stand_in(tensor: Tensor, home: torch.device) -> Tensor:
    """A tensor of one element that looks like `tensor`."""
    has_data = tensor.device.type != "meta" and not hop.is_fake(tensor)
    one = torch.empty((), dtype=tensor.dtype, device=tensor.device if has_data else home)
    wide = one.expand(tensor.shape).detach()
    return wide.requires_grad_(tensor.requires_grad) if tensor.requires_grad else wide


def _trace(operands: list[Tensor], keywords: dict[str, Any]) -> AttentionArgs | CachedArgs:
    """The operator's operands, as fake tensors and graphs, as Dynamo writes them."""
    seen: list[fx.GraphModule] = []

    def record(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        seen.append(graph)
        results = graph.graph.output_node().args[0]
        assert isinstance(results, (tuple, list))
        values = [node.meta["example_value"] for node in results if isinstance(node, fx.Node)]
        return lambda *_: tuple(torch.empty(v.shape, dtype=v.dtype, device="meta") for v in values)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return flex_attention(query, key, value, **keywords)

    # Use a fresh code object: Dynamo counts recompilations by code, and calls of explain are
    # unrelated.
    code = call.__code__.replace()
    alone = types.FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)
    torch.compile(alone, backend=record, fullgraph=True, dynamic=False)(*operands)
    for operator in (attention, cached_attention):
        for node in seen[0].graph.find_nodes(op="call_function", target=operator):
            return operator.args_type(*map_arg(tuple(node.args), _value_of(seen[0])))
    raise AssertionError("the graph of a call holds one of the operators")


def _value_of(graph: fx.GraphModule) -> Callable[[fx.Node], Any]:
    def value(node: fx.Node) -> Any:
        is_graph = node.op == "get_attr"
        return graph.get_submodule(str(node.target)) if is_graph else node.meta["example_value"]

    return value


def _report(args: AttentionArgs | CachedArgs, found: Any, mask: Mask | None) -> Report:
    """Assemble the report; `found` is a flexhop.reports.dry_run.Survey."""
    from flexhop.reports import flop_counts

    problem, device = found.problem, found.problem.device
    pairs = flop_counts.dense_pairs(problem)
    density = 1.0 if mask is None else mask.density
    unmasked = 1.0 if mask is None else mask.unmasked
    visited = None if density is None else round(pairs * density)
    passes = tuple(
        Pass(
            kernel=plan.kernel,
            tile=plan.tile,
            reason=plan.reason,
            shared_memory=plan.shared_memory,
            available=device.shared_memory,
            programs=plan.programs,
            flops=None if visited is None else flop_counts.flops(plan.kernel, problem, visited),
            bytes=flop_counts.least_bytes(plan.kernel, problem),
        )
        for plan in found.plans
    )
    return Report(
        device=f"{device.name}, sm_{device.capability[0]}{device.capability[1]}",
        call=_describe_call(args),
        score_mod=_describe_mod(
            "score", found.score, not problem.mods.has_score_mod, args.score_captures
        ),
        mask_mod=_describe_mod(
            "mask", found.mask, not problem.mods.has_mask_mod, args.mask_captures
        ),
        score_mod_grad=_gradient_code(found),
        mask=mask,
        passes=passes,
        options=found.options,
        unmasked_flops=None
        if unmasked is None
        else flop_counts.flops("forward", problem, round(pairs * unmasked)),
        notes=tuple(_notes(args, found, mask)),
    )


def _gradient_code(found: Any) -> str | None:
    joint = found.joint
    if joint is None or (not found.problem.mods.has_score_mod and not joint.sites):
        return None
    return mod_code(joint.joint, "joint")


def _describe_call(args: AttentionArgs | CachedArgs) -> str:
    tensors = {"query": args.query, "key": args.key, "value": args.value}
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    return f"{shapes}, {_dtype(args.query)}, scale {args.scale:.6g}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _describe_mod(
    kind: str, graph: fx.GraphModule, is_trivial: bool, captures: tuple[Any, ...]
) -> Mod:
    named = tuple(_capture(f"capture_{i}", value) for i, value in enumerate(captures))
    return Mod(mod_code(graph, kind), is_trivial, named)


def _capture(name: str, value: Any) -> Capture:
    if not isinstance(value, Tensor):
        return Capture(name, type(value).__name__, False)
    kind = f"{_dtype(value)} {list(value.shape)} on {value.device}"
    return Capture(name, kind, value.requires_grad)


def _describe_mask(mask: BlockMask) -> Mask:
    columns = block_count(mask.seq_lengths[1], mask.BLOCK_SIZE[1])
    total = mask.kv_num_blocks.numel() * columns
    lists = mask.kv_num_blocks
    if lists.device.type == "meta" or hop.is_fake(lists):
        return Mask(mask.BLOCK_SIZE, mask.shape, None, None, total, None, None)
    return Mask(
        block_size=mask.BLOCK_SIZE,
        shape=mask.shape,
        partial=mask.num_partial_blocks(),
        full=mask.num_full_blocks(),
        total=total,
        density=mask.density(),
        unmasked=_unmasked_part(mask) if mask.numel() <= MAX_ELEMENTS else None,
        picture=mask.to_svg(),
    )


def _unmasked_part(mask: BlockMask) -> float:
    """Visible fraction of the matrix: listed and kept, or in a full block."""
    batch, heads, q_len, kv_len = mask.shape
    keep = create_mask(mask.mask_mod, batch, heads, q_len, kv_len, device=mask.device)
    visible = keep & _elements(mask, mask.kv_num_blocks, mask.kv_indices)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        visible |= _elements(mask, mask.full_kv_num_blocks, mask.full_kv_indices)
    return visible.sum().item() / max(1, visible.numel())


def _elements(mask: BlockMask, counts: Tensor, indices: Tensor) -> Tensor:
    """Listed blocks, element by element: [B, H, M, N] bool."""
    (q_len, kv_len), (q_size, kv_size) = mask.seq_lengths, mask.BLOCK_SIZE
    listed = lists_to_dense(counts, indices, block_count(kv_len, kv_size)).bool()
    wide = listed.repeat_interleave(q_size, -2).repeat_interleave(kv_size, -1)
    return wide[..., :q_len, :kv_len]


def _notes(args: AttentionArgs | CachedArgs, found: Any, mask: Mask | None) -> list[str]:
    notes = [
        "A call recompiles if a dtype, the number of heads, a head size, an option, the code of a "
        "mod or a captured Python value changes. A new length or batch size recompiles once, "
        "unless torch.compile's `dynamic` says otherwise.",
    ]
    if args.score_captures or args.mask_captures:
        notes.append(
            "Captured tensors are operands: new values of the same shape do not recompile."
        )
    if found.tables is not None:
        sizes, saved = found.tables.sizes, round(found.tables.saved)
        notes.append(
            "Parts of score_mod that depend on few values are precomputed, before the kernels, "
            f"as tables of {', '.join(str(list(size)) for size in sizes)}. "
            + (f"Reading them saves about {saved} instructions per score." if saved > 0 else
               "Kernels cannot compute them.")
        )  # fmt: skip
    if found.joint is None:
        notes.append("No operand requires a gradient, so no backward kernel would run.")
    elif found.joint.sites:
        notes.append(_note_of_captured(found, is_exact=bool(args.options.get("deterministic"))))
    if found.second:
        notes.append(found.second)
    if found.joint is not None and any(plan.kernel == "backward" for plan in found.plans):
        notes.append(
            "The gradient of query is summed in fp32, in the order of the keys."
            if args.options.get("deterministic")
            else "The gradient of query is summed in fp32 without a fixed order: its last bits "
            "differ from run to run. torch.use_deterministic_algorithms(True) fixes the order."
        )
    if found.joint is not None and mask is not None and not args.options["has_q_blocks"]:
        notes.append(
            "The block mask has no query side (compute_q_blocks=False), so the backward pass "
            "raises an error."
        )
    if mask is not None and mask.density == 1.0:
        notes.append("The block mask skips nothing.")
    notes += [
        f"Failed to compile in this process, so the next candidate ran: {words}."
        for words in found.failures
    ]
    if is_nothing(args.query):
        return [*notes, "query has no elements: a call runs no kernel."]
    return [*notes, *(_kernel_notes(found.plans[0]) if found.plans else [_NO_KERNEL])]


def _note_of_captured(found: Any, *, is_exact: bool) -> str:
    """How gradients of captured tensors come about; found: a Survey."""
    names = " and ".join(found.adders)
    kernels, s = (f"{names} kernel", "s") if len(found.adders) == 1 else (f"{names} kernels", "")
    if not found.problem.grad.adds_captured:
        return (
            f"The {kernels} store{s} the gradients of captured tensors, because each score reads "
            "entries of its own."
        )
    if is_exact:
        return "Gradients of captured tensors are summed exactly, as integers."
    return (
        f"The {kernels} add{s} gradients of captured tensors atomically: their last bits differ "
        "from run to run."
    )


def _kernel_notes(plan: Any) -> list[str]:
    """Notes on the forward kernel's plan, a flexhop.lowering.plan.KernelPlan."""
    notes, constants = list(plan.notes), plan.constants
    if constants.get("CHECK_Q") or constants.get("CHECK_KV"):
        notes.append("The last tile extends past a length or a block, so kernels check bounds.")
    if constants.get("SPLITS", 1) > 1:
        notes.append(
            f"The keys are divided into {constants['SPLITS']} splits; a second, small kernel "
            "combines their results."
        )
    for name, prefix in (("head", "QK"), ("value head", "V")):
        size, width = map(constants.get, (f"{prefix}_HEAD_DIM", f"{prefix}_HEAD_DIM_ROUNDED"))
        if width not in (size, None):  # some kernels hold wide heads in pieces
            notes.append(f"A {name} size of {size} is padded to {width}.")
    return notes
