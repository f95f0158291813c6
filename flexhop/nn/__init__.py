"""Modules: attention with its projections, a KV cache, and a holder for block masks."""

from flexhop.nn.attention import Attention, Cache
from flexhop.nn.holder import HeldMask

__all__ = ["Attention", "Cache", "HeldMask"]
