"""Who is measured. An implementation takes [B, H, S, D] tensors and gives back the output."""

from collections.abc import Callable
from types import ModuleType

import torch
from torch.nn import attention as sdpa
from torch.nn.attention import flex_attention as intree
from torch.nn.functional import scaled_dot_product_attention

import flexhop
import flexhop.mods
from benchmarks.cases import SOFTCAP, Case, Mod, make_mask_mod, make_score_mod

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
NAMES = ("flexhop", "portable", "in-tree", "cudnn", "flash")


def build(name: str, case: Case, device: torch.device | str) -> Attention | None:
    """The implementation of that name for a case, or None where it cannot do the case."""
    if name == "flexhop":
        return build_flexhop(case, device)
    if name == "portable":
        return build_flexhop(case, device, flexhop.KernelOptions(backend="triton"))
    if name == "in-tree":
        return build_intree(case, device)
    if not case.is_dense:
        return None
    if name == "cudnn":
        return build_sdpa(case, sdpa.SDPBackend.CUDNN_ATTENTION)
    return build_sdpa(case, sdpa.SDPBackend.FLASH_ATTENTION)


def build_flexhop(
    case: Case, device: torch.device | str, options: flexhop.KernelOptions | None = None
) -> Attention:
    """flexhop, compiled; the approximate softcap where the case asks for it."""
    score_mod = make_score_mod(case, device)
    if case.score == "softcap_approx":
        score_mod = flexhop.mods.softcap(SOFTCAP, approximate=True)
    return build_flex(flexhop, case, device, score_mod, options)


def build_intree(case: Case, device: torch.device | str) -> Attention:
    """PyTorch's FlexAttention, compiled, default options, its own block mask."""
    return build_flex(intree, case, device, make_score_mod(case, device), None)


def build_flex(
    module: ModuleType,
    case: Case,
    device: torch.device | str,
    score_mod: Mod | None,
    options: flexhop.KernelOptions | None,
) -> Attention:
    """flex_attention of a module with that interface, compiled, with the block mask of a case."""
    mask_mod, length = make_mask_mod(case, device), case.length
    block_mask = mask_mod and module.create_block_mask(
        mask_mod, None, None, length, length, device=str(device), BLOCK_SIZE=case.block
    )
    compiled = torch.compile(module.flex_attention, fullgraph=True)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return compiled(
            query,
            key,
            value,
            score_mod=score_mod,
            block_mask=block_mask,
            enable_gqa=case.q_heads != case.kv_heads,
            kernel_options=options,
        )

    attend.learned = getattr(score_mod, "learned", ())  # type: ignore[attr-defined]
    return attend


def build_sdpa(case: Case, backend: sdpa.SDPBackend) -> Attention:
    """One fused backend of scaled_dot_product_attention; it raises where it does not exist."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa.sdpa_kernel(backend):
            return scaled_dot_product_attention(
                query,
                key,
                value,
                is_causal=case.pattern == "causal",
                enable_gqa=case.q_heads != case.kv_heads,
            )

    return attend
