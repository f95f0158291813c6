"""flash-attn's functions on flexhop's operator: change the import, keep the calls.

Layouts, defaults and semantics are those of flash-attn 2.8. docs/flash.md lists the differences.

Options that several functions share:

- dropout_p: probability that a weight becomes 0. The others are divided by 1 - dropout_p. Seeds
  come from PyTorch's generator. For packed tokens, the mask is that of varlen_attention.
- softmax_scale: the factor of q·k; 1/sqrt(D) by default.
- causal: hides keys after the one that a query is aligned with. The last query is aligned with the
  last key.
- window_size: (left, right), how many keys before and after that one are visible; -1 means all.
- softcap: above 0, scores become softcap * tanh(score / softcap).
- alibi_slopes: [H], or [B, H] with one row per sequence. slope * |i + N - M - j| is subtracted
  from the (capped) score of query i and key j. Slopes get no gradient.
- deterministic: bitwise reproducible gradients. Otherwise the gradient of q varies on Hopper GPUs.
- return_attn_probs: also return lse, float32, and with dropout_p the softmax weights, negative if
  dropped: [B, Hq, M, N], or for sequences [S, Hq, max_seqlen_q, max_seqlen_k]. The weights are for
  tests only. Without dropout the third result is None.

The number of query heads may be a multiple of the number of key heads: groups of adjacent query
heads then share a key head.

All functions raise FlashArgumentError, UnsupportedFeatureError, and the errors of flex_attention.

Source: flash_attn.flash_attn_interface (flash-attn 2.8).
"""

from flexhop.flash.cache import flash_attn_with_kvcache
from flexhop.flash.functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
