"""Modules: attention with its projections, a cache for it, and a holder of block masks."""

from flexhop.nn.attention import Attention, Cache
from flexhop.nn.holder import HeldMask

__all__ = ["Attention", "Cache", "HeldMask"]
