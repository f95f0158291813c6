"""Decoding with a KV cache that is sharded by sequence.

Keys are distributed in chunks: chunk j of a sequence is on rank j mod P, so ranks are balanced at
any length, and one rank writes a new token. Every rank has the queries and attends to its own
keys. One collective merges the results by their lse. If the cache is paged, a page is a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexhop.attention import AuxOutput, AuxRequest, Options, flex_attention
from flexhop.block_mask.fields import dense_blocks
from flexhop.block_mask.lists import block_count, dense_to_lists
from flexhop.block_mask.mask import BlockMask
from flexhop.cache.pages import PageTable
from flexhop.compat import collectives
from flexhop.errors import PlanError
from flexhop.mods.functions import ScoreMod
from flexhop.mods.keys import KeyMod
from flexhop.ops.sinks import add_sinks


def local_lengths(lengths: Tensor, chunk: int, mesh: DeviceMesh) -> Tensor:
    """Number of keys of each sequence on this rank, int32, from the lengths of the sequences."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    turns = torch.div(lengths, chunk * ranks, rounding_mode="floor")
    rest = lengths - turns * chunk * ranks
    return (turns * chunk + (rest - rank * chunk).clamp(0, chunk)).int()


def local_positions(positions: Tensor, chunk: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Where tokens of a sequence are stored.

    Args:
        positions: integer positions in the sequence.
        chunk: keys per chunk.
        mesh: of one dimension.

    Returns:
        Their ranks, and their positions among the keys of that rank.
    """
    number = torch.div(positions, chunk, rounding_mode="floor")
    turn = torch.div(number, mesh.size(), rounding_mode="floor")
    return number - turn * mesh.size(), turn * chunk + positions - number * chunk


def _to_sequence(chunk: int, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Map the position of a key on this rank to its position in the sequence."""
    ranks, rank = mesh.size(), mesh.get_local_rank()

    def to_sequence(kv_idx: Tensor) -> Tensor:
        number = torch.div(kv_idx, chunk, rounding_mode="floor")
        # This chunk's index among all chunks, from its index on this rank.
        return kv_idx + (number * (ranks - 1) + rank) * chunk

    return to_sequence


def decode_mask(block_mask: BlockMask | Any, mesh: DeviceMesh, chunk: int) -> BlockMask:
    """This rank's part of a block mask of whole sequences.

    Args:
        block_mask: a mask of whole sequences; its number of keys is the capacity of all ranks
            together.
        mesh: of one dimension.
        chunk: keys per chunk, a multiple of the mask's key block size.

    Raises:
        PlanError: blocks that span two ranks, or a number of keys that is no multiple of all
            ranks' chunks.
    """
    mask, ranks = BlockMask.of(block_mask), mesh.size()
    queries, keys = mask.seq_lengths
    rows, columns = mask.BLOCK_SIZE
    if chunk % columns:
        raise PlanError(
            argument="chunk", found=f"is {chunk}",
            expected=f"it must be a multiple of the mask's blocks of {columns} keys",
        )  # fmt: skip
    if keys % (chunk * ranks):
        raise PlanError(
            argument="block_mask", found=f"has {keys} keys",
            expected=f"{ranks} ranks with chunks of {chunk} need a multiple of {chunk * ranks}",
        )  # fmt: skip
    own = torch.arange(block_count(keys, columns), device=mask.device)
    own = own.view(-1, ranks, chunk // columns)[:, mesh.get_local_rank()].flatten()
    lists = [part for dense in dense_blocks(mask) for part in dense_to_lists(dense[..., own])]
    to_sequence, mask_mod = _to_sequence(chunk, mesh), mask.mask_mod

    def in_sequence(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b, h, q_idx, to_sequence(kv_idx))

    return BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=(rows, columns), mask_mod=in_sequence,
        seq_lengths=(queries, keys // ranks), compute_q_blocks=False,
    )  # fmt: skip


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: Options = None,
    *,
    mesh: DeviceMesh,
    chunk: int | None = None,
    page_table: PageTable | None = None,
    k_mod: KeyMod | None = None,
    v_mod: KeyMod | None = None,
    sinks: Tensor | None = None,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Attention of replicated queries to keys that are sharded over ranks.

    Has no gradient. Every rank of the mesh calls it, with the same queries.

    Args:
        query: [B, Hq, M, D], the same on all ranks.
        key: [B or 1, Hkv, N, D], this rank's keys; or its pages.
        value: [B or 1, Hkv, N, Dv].
        score_mod: (score, b, h, q_idx, kv_idx) -> score; kv_idx is the position in the sequence.
        block_mask: from `decode_mask`. None: every key on the rank is visible.
        scale: the factor of q·k; None is 1/sqrt(D).
        enable_gqa: allow Hq to be a multiple of Hkv.
        kernel_options: as for `flex_attention`.
        mesh: of one dimension.
        chunk: keys per chunk; by default the page size if there is a page_table.
        page_table: the table of this rank's pages, with lengths from `local_lengths`.
        k_mod: as for `flex_attention`; kv_idx is the position in the sequence.
        v_mod: the same for value.
        sinks: [Hq], as for `flex_attention`.
        return_aux: statistics to return, over all keys.

    Returns:
        out [B, Hq, M, Dv], on all ranks; with return_aux (out, AuxOutput).

    Raises:
        PlanError: no chunk, or one that differs from the page size.
        FlexhopError: as for `flex_attention`.
    """
    to_sequence = _to_sequence(_chunk(chunk, page_table), mesh)
    wants = return_aux or AuxRequest()
    found: Any = flex_attention(
        query, key, value, _moved_score(score_mod, to_sequence), block_mask, scale, enable_gqa,
        kernel_options=kernel_options, page_table=page_table,
        k_mod=_moved_key(k_mod, to_sequence), v_mod=_moved_key(v_mod, to_sequence),
        return_aux=AuxRequest(lse=True, max_scores=wants.max_scores),
    )  # fmt: skip
    out, lse, largest = _merged(found[0], found[1], mesh.get_group().group_name, mesh.size())
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    out = out.to(query.dtype)
    if return_aux is None:
        return out
    return out, AuxOutput(lse if wants.lse else None, largest)


def _chunk(chunk: int | None, page_table: PageTable | None) -> int:
    page = None if page_table is None else page_table.page_size
    if chunk is None and page is None:
        raise PlanError(
            argument="chunk", found="is missing",
            expected="mods must know which keys of a sequence each rank holds",
        )  # fmt: skip
    if chunk is not None and page is not None and chunk != page:
        raise PlanError(
            argument="chunk",
            found=f"is {chunk}",
            expected=f"a chunk is a page, and pages have {page} keys",
        )
    return int(page if chunk is None else chunk)  # type: ignore[arg-type]


def _merged(
    out: Tensor, aux: AuxOutput, group: str, ranks: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Merge the results of all ranks, in one collective."""
    lse, largest = aux.lse, aux.max_scores
    assert lse is not None
    parts = [out.to(lse.dtype), lse[..., None]]
    if largest is not None:
        parts.append(largest[..., None])
    every = collectives.gather_over(torch.cat(parts, -1)[None], group, ranks)
    width = out.size(-1)
    outs, lses = every[..., :width], every[..., width]
    total = torch.logsumexp(lses, 0)
    shares = torch.exp(lses - torch.where(total == -torch.inf, 0.0, total))
    merged = outs[0] * shares[0, ..., None]
    for rank in range(1, ranks):
        merged = merged + outs[rank] * shares[rank, ..., None]
    return merged, total, None if largest is None else every[..., -1].amax(0)


def _moved_score(
    score_mod: ScoreMod | None, to_sequence: Callable[[Tensor], Tensor]
) -> ScoreMod | None:
    if score_mod is None:
        return None

    def moved(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, b, h, q_idx, to_sequence(kv_idx))

    return moved


def _moved_key(mod: KeyMod | None, to_sequence: Callable[[Tensor], Tensor]) -> KeyMod | None:
    if mod is None:
        return None

    def moved(number: Tensor, b: Tensor, h: Tensor, kv_idx: Tensor) -> Tensor:
        return mod(number, b, h, to_sequence(kv_idx))

    return moved
