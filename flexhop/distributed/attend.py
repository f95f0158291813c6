"""One attention call on a rank's part of the sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexhop.compat.operators.autograd import wanted_dtype
from flexhop.distributed.exchange import receive_keys, send_keys
from flexhop.distributed.heads import gather_heads, gather_tokens
from flexhop.distributed.places import Places, global_mask_mod, global_score_mod
from flexhop.distributed.views import Part, View
from flexhop.ops.args import AttentionArgs
from flexhop.ops.call import Call
from flexhop.ops.dispatch import run_operator
from flexhop.ops.dropout import place

Results = tuple[Tensor, Tensor, Tensor]


def attend_view(
    args: AttentionArgs, call: Call, view: View, groups: tuple[str, str], wants_lse: bool
) -> Results:
    """Attention of a rank's queries to the keys of all ranks.

    Args:
        args: query [B, Hq, M, D], key and value [B, Hkv, M, ...] of the rank's tokens; score_mod
            and mask_mod take global indices.
        call: the call's options; its mask is left open.
        view: the view of its mask.
        groups: names of the process groups that shard the sequence, and the heads.
        wants_lse: whether lse is used.
    """
    args = _cast(args)
    first_head = 0
    if view.heads > 1:
        first_head = view.head_rank * (args.query.size(1) // view.heads)
        query, key, value = (gather_tokens(t, view.heads, groups[1]) for t in args[:3])
        args = args._replace(query=query, key=key, value=value)
    if view.is_merged:
        results = _merged(args, call, view, first_head, groups[0])
    else:
        results = _by_heads(args, call, view, first_head, groups[0])
    if view.heads > 1:
        out, lse, largest = results
        out = gather_heads(out, view.heads, groups[1])
        lse = gather_heads(lse, view.heads, groups[1]) if wants_lse else lse
        largest = gather_heads(largest, view.heads, groups[1]) if call.return_max else largest
        results = (out, lse, largest)
    return results


def _cast(args: AttentionArgs) -> AttentionArgs:
    """Apply autocast to the operands before they are sent."""
    dtype = wanted_dtype(args.query.device.type)
    if dtype is None:
        return args
    query, key, value = (t.to(dtype) for t in args[:3])
    return args._replace(query=query, key=key, value=value)


def _by_heads(args: AttentionArgs, call: Call, view: View, first_head: int, group: str) -> Results:
    """One call per group of heads, with all the keys that it needs."""
    (part,) = view.parts
    if part.route.is_own:
        return _call(args, call, part, part.places._replace(head=first_head), (0, 1))
    key, value, sent = send_keys(args.key, args.value, part.route, view.unit, view.groups, group)
    count = view.groups
    each = args.query.size(1) // count
    found: list[Results] = []
    split = [t.chunk(count, 1) for t in (args.query, key, value)]
    for number, (query, own_key, own_value, way) in enumerate(zip(*split, sent, strict=True)):
        keys, values = receive_keys(
            own_key, own_value, way, part.route, view.unit, part.tokens, group
        )
        operands = args._replace(query=query, key=keys, value=values)
        head = first_head + number * each
        found.append(_call(operands, call, part, part.places._replace(head=head), (number, count)))
    if count == 1:
        return found[0]
    out, lse = (torch.cat(tensors, 1) for tensors in list(zip(*found, strict=True))[:2])
    largest = torch.cat([f[2] for f in found], 1) if call.return_max else found[0][2]
    return out, lse, largest


def _merged(args: AttentionArgs, call: Call, view: View, first_head: int, group: str) -> Results:
    """One call on the rank's own keys while the others travel, and one on the received keys;
    merged by lse."""
    own = view.parts[0]
    if len(view.parts) == 1:
        return _call(args, call, own, own.places._replace(head=first_head), (0, 1))
    remote = view.parts[1]
    key, value, sent = send_keys(args.key, args.value, remote.route, view.unit, 1, group)
    here = args._replace(key=key, value=value)
    first = _call(here, call, own, own.places._replace(head=first_head), (0, 1))
    keys, values = receive_keys(key, value, sent[0], remote.route, view.unit, remote.tokens, group)
    there = args._replace(key=keys, value=values)
    second = _call(there, call, remote, remote.places._replace(head=first_head), (0, 1))
    return merge(first, second, has_max=call.return_max)


def merge(first: Results, second: Results, *, has_max: bool) -> Results:
    """Merge attention over two parts of the keys.

    Rows that see nothing keep out 0 and lse -inf, without NaN in their gradients.
    """
    highest = torch.maximum(first[1], second[1]).detach()
    is_seen = highest > -torch.inf
    base = torch.where(is_seen, highest, 0.0)
    shares = [torch.exp(part[1] - base) for part in (first, second)]
    total = torch.where(is_seen, shares[0] + shares[1], 1.0)
    out: Any = sum(
        part[0].to(total.dtype) * (share / total)[..., None]
        for part, share in zip((first, second), shares, strict=True)
    )
    lse = torch.where(is_seen, base + torch.log(total), -torch.inf)
    largest = torch.maximum(first[2], second[2]) if has_max else first[2]
    return out.to(first[0].dtype), lse, largest


def _call(
    args: AttentionArgs, call: Call, part: Part, places: Places, heads: tuple[int, int]
) -> Results:
    """One call of the operator, with mods that see global indices.

    Args:
        args, call, part: operands, options, and the part of the keys.
        places: global positions of queries and keys, and the first head.
        heads: index of the group of heads, and number of groups.
    """
    call = call._replace(mask=part.facts)
    if args.dropout_seed:
        first = call.first[0], call.first[1] + places.head
        args = args._replace(dropout_seed=(place(args.dropout_seed[0], first, part.groups),))
        call = call._replace(dropout_groups=part.facts.query_length // 16)
    local = args._replace(
        score_mod=global_score_mod(args.score_mod, places),
        mask_mod=global_mask_mod(args.mask_mod, places),
        blocks=_heads_of(part.blocks, heads),
    )
    return run_operator(local, call)


def _heads_of(blocks: tuple[Tensor, ...], heads: tuple[int, int]) -> tuple[Tensor, ...]:
    """The block lists of one group of heads, if they differ by head."""
    number, count = heads
    if count == 1:
        return blocks
    return tuple(t if t.size(1) == 1 else t.chunk(count, 1)[number] for t in blocks)
