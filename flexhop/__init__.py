"""Attention with your own score and mask functions, fused into one kernel.

A superset of torch.nn.attention.flex_attention: names, signatures and semantics are the same.
"""

from typing import TYPE_CHECKING, Any

from flexhop import errors, flash, masks, mods, nn
from flexhop.attention import AuxOutput, AuxRequest, flex_attention
from flexhop.block_mask.creation import create_block_mask, create_mask
from flexhop.block_mask.mask import BlockMask
from flexhop.cache.paged import PagedAttention
from flexhop.cache.pages import PageTable
from flexhop.compat.imports import private_name
from flexhop.errors import FlexhopError
from flexhop.mods.functions import and_masks, noop_mask, or_masks
from flexhop.ops.dropout_seed import dropout_mask, dropout_seed
from flexhop.ops.uncompiled.option import eager_kernels
from flexhop.ops.verification.certified import verified
from flexhop.ops.verification.checking import Verification
from flexhop.options import FlexKernelOptions, KernelOptions, Tile, TileRequest
from flexhop.plugin import install
from flexhop.reports.explain import Report, explain
from flexhop.reports.verify import verify
from flexhop.sdpa import scaled_dot_product_attention
from flexhop.sequences.nested_mask import create_nested_block_mask
from flexhop.varlen import varlen_attention

__version__ = "0.2.0"
__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "FlexhopError",
    "KernelOptions",
    "PageTable",
    "PagedAttention",
    "Report",
    "Tile",
    "TileRequest",
    "Verification",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "create_nested_block_mask",
    "dropout_mask",
    "dropout_seed",
    "eager_kernels",
    "errors",
    "explain",
    "flash",
    "flex_attention",
    "install",
    "masks",
    "mods",
    "nn",
    "noop_mask",
    "or_masks",
    "scaled_dot_product_attention",
    "varlen_attention",
    "verified",
    "verify",
]

if not TYPE_CHECKING:  # type checkers would accept any misspelled name

    def __getattr__(name: str) -> Any:
        """Private names that projects import from PyTorch's module: they stay PyTorch's."""
        return private_name(name, module=__name__)


install()
