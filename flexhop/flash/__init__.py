"""The functions of flash-attn on flexhop's operator: change the import, keep the calls.

Layouts, defaults and meaning are those of flash-attn 2.8; every option is a mod, a mask or a mode
of the one operator. docs/flash.md says what differs.

Options that several functions share:

- dropout_p: probability with which a weight becomes 0; the others are divided by 1 - dropout_p.
  Seeds come from PyTorch's generator; packed tokens have the mask of varlen_attention.
- softmax_scale: multiplies q·k; 1/sqrt(D) by default.
- causal: a query sees no key behind the one that it is aligned with; the last query is aligned
  with the last key.
- window_size: (left, right), how many keys before and behind that one a query sees; -1 is all.
- softcap: above 0, scores become softcap * tanh(score / softcap).
- alibi_slopes: [H], or [B, H] with a row per sequence; then slope * |i + N - M - j| is subtracted
  from the (capped) score of query i and key j. Slopes get no gradient.
- deterministic: gradients repeat bit by bit; on Hopper GPUs that of q does not otherwise.
- return_attn_probs: also return the logarithm of the softmax's sum, fp32, and with dropout_p the
  weights of the softmax, negative where they are dropped: [B, Hq, M, N], or of sequences
  [S, Hq, max_seqlen_q, max_seqlen_k], which is for tests only. Without dropout None.

Heads of q may be a multiple of those of k and v, which then serve groups of neighbours.

Raises, all of them: FlashArgumentError, UnsupportedFeatureError, and what flex_attention raises.

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
