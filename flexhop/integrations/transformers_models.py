"""Models that ask more of attention than a mask and a scale.

Some compute with their mask, so it must be a tensor. Some select the keys of each query, or have a
sink for each query. Such arguments are names that a model and its kernels agree on; transformers
documents none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import eager_mask, sdpa_mask

# Models that compute with their mask, by config.model_type. Bool masks, as for sdpa:
_WITH_BOOL = (
    "doge",  # combines it with a mask that depends on the values
    "t5gemma2_decoder",  # appends the mask of the encoder's keys
)
# Masks that are added, as for eager:
_WITH_SUM = (
    "deepseek_v4",  # appends a bias for keys that stand for several tokens
    "git",  # has its own attention
)


def tensor_mask(config: Any) -> Callable[..., Tensor | None] | None:
    """The function of transformers that makes the mask of a model, if it must be a tensor.

    config: of the model or of its part, as transformers passes it to a mask function.
    """
    kind = getattr(config, "model_type", None)
    if kind in _WITH_BOOL:
        return sdpa_mask
    # Sparse attention of DeepSeek 3.2's kind: the indexer adds the mask to its own scores.
    has_indexer = getattr(config, "index_topk", None) is not None
    return eager_mask if has_indexer or kind in _WITH_SUM else None


def selected_keys(module: nn.Module, arguments: dict[str, Any], length: int) -> list[Tensor]:
    """The keys that a layer selects for each query, each [B, 1 or Hq, M, N] bool.

    Args:
        module: the layer. Its `indexer.block_size` is the number of keys in a block.
        arguments: `indices`, [B, M, K] positions of keys; `block_indices`, [B, H, M, K] positions
            of blocks of keys, for groups of heads. Negative ones select nothing.
        length: N, number of keys.
    """
    found = []
    if (indices := arguments.get("indices")) is not None:
        found.append(_marked(indices, length)[:, None])
    if (blocks := arguments.get("block_indices")) is not None:
        size: Any = module.get_submodule("indexer").block_size
        keys = _marked(blocks, -(-length // size)).repeat_interleave(size, -1)[..., :length]
        config: Any = module.config
        heads = config.num_attention_heads // keys.size(1)
        found.append(keys.repeat_interleave(heads, 1))
    return found


def _marked(positions: Tensor, length: int) -> Tensor:
    """[..., K] positions as [..., length] bool."""
    shape = (*positions.shape[:-1], length + 1)  # one more for those that select nothing
    places = positions.long().masked_fill(positions < 0, length)
    marked = torch.zeros(shape, dtype=torch.bool, device=positions.device)
    return marked.scatter(-1, places, True)[..., :length]


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention with one more score per query, whose value is 0.

    Args:
        out: [B, Hq, M, Dv]. lse: [B, Hq, M].
        sinks: [B, Hq, M, 1], the scores.
    """
    share = torch.sigmoid(lse[..., None] - sinks.float())
    return out * share.to(out.dtype)
