"""What else must hold on a mesh: dropout, sinks, packed sequences, compiling, checkpointing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flexhop
import flexhop.distributed as sharded
from flexhop import masks
from tests.distributed.meshes import mesh_of
from tests.distributed.problems import DEVICE, HEADS, Sizes, find, make_whole
from tests.distributed.tasks import (
    AUX,
    assert_equal,
    differentiate,
    on_mesh,
    reference,
)

CHOICES: dict[str, dict[str, Any]] = {
    "gather": {"layout": "zigzag", "method": "gather"},
    "blocks": {"layout": "contiguous", "method": "blocks"},
    "groups": {"layout": "greedy", "method": "blocks", "groups": 2},
    "stages": {"layout": "greedy", "method": "stages"},
    "heads": {"heads": 2},
}


def _context(whole: Any, choice: str, **more: Any) -> Any:
    length = whole.operands[0].size(2)
    plan = sharded.make_plan(
        whole.block_mask, dist.get_world_size(), length=length, **CHOICES[choice]
    )
    return sharded.context_parallel(plan, mesh_of(), **more)


def check_dropout(choice: str) -> None:
    """The mask of one process, by a seed that is given; and one drawn seed for all ranks."""
    whole = make_whole(find("documents, relative bias"), Sizes())
    seed = torch.tensor([91, 7], device=DEVICE)
    more = {"dropout_p": 0.3, "dropout_seed": seed}
    assert_equal(on_mesh(whole, _context(whole, choice), **more), reference(whole, **more))
    ones = whole._replace(operands=(*whole.operands[:2], torch.ones_like(whole.operands[2])))
    torch.manual_seed(dist.get_rank())
    first = on_mesh(ones, _context(whole, choice), dropout_p=0.5)
    torch.manual_seed(0)
    drawn = flexhop.dropout_seed(DEVICE)
    assert_equal(first, reference(ones, dropout_p=0.5, dropout_seed=drawn))


def check_sinks(choice: str) -> None:
    """Sinks count on every rank, and their gradient is the sum."""
    whole = make_whole(find("causal"), Sizes())
    sinks = torch.linspace(-1, 2, HEADS, dtype=torch.float64, device=DEVICE)
    exact = sinks.clone().requires_grad_()
    flexhop.flex_attention(
        *whole.operands, None, whole.block_mask, enable_gqa=True, sinks=exact
    ).backward(whole.grads[0])
    with _context(whole, choice) as context:
        own = sinks.clone().requires_grad_()
        flexhop.flex_attention(
            *context.shard(*whole.operands, dim=2), None, whole.block_mask, enable_gqa=True,
            sinks=own,
        ).backward(context.shard(whole.grads[0], dim=2))  # fmt: skip
    assert_equal([own.grad], [exact.grad])


def check_packed(choice: str, mask_mod: Any = None) -> None:
    """varlen_attention with the offsets of the whole batch."""
    total = 203
    offsets = torch.tensor([0, 50, 57, 57, 160, 190], device=DEVICE)
    whole = make_whole(find("causal"), Sizes(total))
    query, key, value = (t[0].transpose(0, 1).contiguous() for t in whole.operands)
    grad = whole.grads[0][0].transpose(0, 1)
    slopes = torch.linspace(0.1, 0.4, HEADS, dtype=torch.float64, device=DEVICE)
    keep = None if mask_mod is None else (lambda b, h, q, k: (q + k + b) % 3 != 0)

    def attend(operands: Any, slope: Tensor) -> Any:
        return flexhop.varlen_attention(
            *operands, offsets, score_mod=lambda s, b, h, q, k: s - slope[h] * (q - k) + 0.1 * b,
            mask_mod=keep, is_causal=True, window_size=(40, None), enable_gqa=True, return_aux=AUX,
        )  # fmt: skip

    leaves = [t.clone().requires_grad_() for t in (query, key, value, slopes)]
    out, aux = attend(leaves[:3], leaves[3])
    exact = [out, aux.lse, *torch.autograd.grad(out, leaves, grad)]
    packed = sharded.PackedSequences(
        offsets, total, is_causal=True, window_size=(40, None), mask_mod=keep
    )
    plan = sharded.make_plan(packed, dist.get_world_size(), **CHOICES[choice])
    with sharded.context_parallel(plan, mesh_of()) as context:
        parts = [context.shard(t, dim=0).requires_grad_() for t in (query, key, value)]
        own = slopes.clone().requires_grad_()
        out, aux = attend(parts, own)
        grads = torch.autograd.grad(out, [*parts, own], context.shard(grad, dim=0))
        found = [*context.unshard(out, aux.lse, *grads[:3], dim=0), grads[3]]
    assert_equal(found, [t.detach() for t in exact])


def check_packed_with_mask() -> None:
    """A mask_mod inside of packed sequences."""
    check_packed("blocks", mask_mod=True)


class _Layers(nn.Module):
    """Two layers with two masks and a learned bias, of which one is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 3 * 8 * HEADS, dtype=torch.float64)
        self.out = nn.Linear(8 * HEADS, 8, dtype=torch.float64)
        self.bias = nn.Parameter(torch.linspace(-1, 1, HEADS, dtype=torch.float64))

    def attend(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = self.mix(x).unflatten(-1, (3, HEADS, 8)).permute(2, 0, 3, 1, 4)
        return flexhop.flex_attention(
            q, k, v, lambda s, b, h, i, j: s + self.bias[h] * (i - j) * 0.01, mask
        )

    def forward(self, x: Tensor, full: Any, window: Any) -> Tensor:
        x = x + self.out(self.attend(x, full).transpose(1, 2).flatten(2))
        y = checkpoint(self.attend, x, window, use_reentrant=False)
        return x + self.out(y.transpose(1, 2).flatten(2))


def _make_layers() -> tuple[_Layers, Any, Any, Tensor]:
    torch.manual_seed(5)
    model, length = _Layers().to(DEVICE), 256
    full, window = (
        flexhop.create_block_mask(m, None, None, length, length, device=DEVICE, BLOCK_SIZE=16)
        for m in (masks.causal, masks.sliding_window(40))
    )
    return model, full, window, torch.randn(2, length, 8, dtype=torch.float64, device=DEVICE)


def check_model(backend: str | None) -> None:
    """A model with full and window layers, whose parameters' gradients are summed at the end."""
    model, full, window, x = _make_layers()
    out = model(x, full, window)
    out.square().sum().backward()
    exact = [out.detach(), *(p.grad for p in model.parameters())]
    model, full, window, x = _make_layers()
    plan = sharded.make_plan({"full": full, "window": window}, dist.get_world_size())
    call = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    with sharded.context_parallel(plan, mesh_of(), sum_captured=False) as context:
        out = call(context.shard(x), full, window)
        out.square().sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        found = [context.unshard(out.detach()), *(p.grad for p in model.parameters())]
    assert_equal(found, exact)


def check_packings(choice: str) -> None:
    """Compiled once, for two batches whose documents lie differently."""
    length = 256

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return flexhop.flex_attention(q, k, v, lambda s, b, h, i, j: s - 0.1 * (i - j), mask)

    torch.compiler.reset()  # what an earlier task compiled is for groups of processes of its own
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=False)
    for number, lengths in enumerate(([50, 30, 100, 76], [15, 45, 95, 20, 81])):
        ids = masks.ids_from_lengths(torch.tensor(lengths)).to(DEVICE)
        mask = flexhop.create_block_mask(
            masks.packed_causal(ids), None, None, length, length, device=DEVICE, BLOCK_SIZE=16
        )
        generator = torch.Generator().manual_seed(number)
        operands = [
            torch.randn(1, 2, length, 8, dtype=torch.float64, generator=generator).to(DEVICE)
            for _ in range(3)
        ]
        leaves = [t.clone().requires_grad_() for t in operands]
        exact = attend(*leaves, mask)
        exact.square().sum().backward()
        plan = sharded.make_plan(mask, dist.get_world_size(), **CHOICES[choice])
        with sharded.context_parallel(plan, mesh_of(), bucket=16) as context:
            parts = [context.shard(t, dim=2).requires_grad_() for t in operands]
            with torch._dynamo.config.patch(error_on_recompile=number == 1):
                out = compiled(*parts, mask)
            out.square().sum().backward()
            found = context.unshard(out.detach(), *(p.grad for p in parts), dim=2)
        assert_equal(list(found), [exact.detach(), *(t.grad for t in leaves)])


def check_autocast_and_repeats(choice: str) -> None:
    """bf16 by autocast, travelling as such; twice the same bits."""
    whole = make_whole(find("window, learned ALiBi"), Sizes(), torch.float32)
    exact = reference(make_whole(find("window, learned ALiBi"), Sizes()))

    def run() -> list[Tensor]:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            return on_mesh(whole, _context(whole, choice))

    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        alone = reference(whole)
    found, again = run(), run()
    for a, b in zip(found, again, strict=True):
        assert torch.equal(a, b)
    for number, (a, one, b) in enumerate(zip(found, alone, exact, strict=True)):
        seen = b != -torch.inf
        errors = [float((t.double() - b)[seen].norm() / b[seen].norm()) for t in (a, one)]
        # stages round the parts of out once more.
        assert errors[0] <= 1.5 * errors[1] + 1e-6, (number, errors)


def check_captures() -> None:
    """A captured tensor that each rank computed a part of."""
    whole = make_whole(find("forgetting"), Sizes())
    exact = reference(whole)
    for sums in (True, False):
        with _context(whole, "blocks", sum_captured=sums) as context:
            parts = [context.shard(t, dim=2).requires_grad_() for t in whole.operands]
            fade = context.shard(whole.captures[0], dim=1).requires_grad_()
            out, aux = flexhop.flex_attention(
                *parts, whole.score_mod((context.capture(fade, dim=1),)), whole.block_mask,
                enable_gqa=True, return_aux=AUX,
            )  # fmt: skip
            results = (out, aux.lse, aux.max_scores)
            grads = differentiate(results, [*parts, fade], context.shard(*whole.grads, dim=2))
            found = [*context.unshard(*grads[:3], dim=2), context.unshard(grads[3], dim=1)]
        assert_equal(found, exact[3:])


def _steps() -> tuple[list[Tensor], Tensor, Any, Any, int]:
    """Queries of three steps, caches of 64 keys, lengths of which one is shorter than a chunk."""
    generator = torch.Generator().manual_seed(2)
    batch, capacity, steps = 3, 64, 3
    sizes = ((batch, HEADS, steps, 8), (batch, 2, capacity, 8), (batch, 2, capacity, 8))
    operands = [torch.randn(s, dtype=torch.float64, generator=generator).to(DEVICE) for s in sizes]
    lengths = torch.tensor([57, 5, 33], device=DEVICE)

    def place(b: Tensor, q: Tensor) -> Tensor:
        return lengths[b] - steps + q

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s - 0.1 * (h + 1) * (place(b, q) - k)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= place(b, q)) & (place(b, q) - k < 40)

    return operands, lengths, score_mod, mask_mod, steps


def check_decode(chunk: int) -> None:
    """A cache in one tensor."""
    (query, key, value), _, score_mod, mask_mod, steps = _steps()
    mesh, sinks = mesh_of(), torch.linspace(-1, 1, HEADS, dtype=torch.float64, device=DEVICE)
    whole = flexhop.create_block_mask(
        mask_mod, 3, None, steps, 64, device=DEVICE, BLOCK_SIZE=(16, 8)
    )
    exact = flexhop.flex_attention(
        query, key, value, score_mod, whole, enable_gqa=True, return_aux=AUX, sinks=sinks
    )
    ranks, places = sharded.local_positions(torch.arange(64, device=DEVICE), chunk, mesh)
    mine = torch.arange(64, device=DEVICE)[ranks == mesh.get_local_rank()]
    assert torch.equal(places[mine], torch.arange(len(mine), device=DEVICE))
    own = [t[:, :, mine] for t in (key, value)]
    found = sharded.decode_attention(
        query, *own, score_mod, sharded.decode_mask(whole, mesh, chunk), enable_gqa=True,
        mesh=mesh, chunk=chunk, sinks=sinks, return_aux=AUX,
    )  # fmt: skip
    assert_equal([found[0], *found[1]], [exact[0], *exact[1]])


def check_paged_decode() -> None:
    """A cache in pages, which are the chunks; masked by its lengths alone."""
    (query, key, value), lengths, score_mod, _, _ = _steps()
    mesh, page = mesh_of(), 8
    hidden = flexhop.create_block_mask(
        lambda b, h, q, k: k < lengths[b], 3, None, 3, 64, device=DEVICE
    )
    exact = flexhop.flex_attention(query, key, value, score_mod, hidden, enable_gqa=True)
    rank, ranks = mesh.get_local_rank(), mesh.size()
    pages = [
        t.unflatten(2, (-1, page))[:, :, rank::ranks].transpose(1, 2).flatten(0, 1)
        for t in (key, value)
    ]
    each = 64 // page // ranks
    table = torch.arange(3 * each, device=DEVICE, dtype=torch.int32).view(3, each)
    own = sharded.local_lengths(lengths, page, mesh)
    page_table = flexhop.PageTable(table, page, own)
    found = sharded.decode_attention(
        query, *pages, score_mod, enable_gqa=True, mesh=mesh, page_table=page_table
    )
    assert_equal([found], [exact])
