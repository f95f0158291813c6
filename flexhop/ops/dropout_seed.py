"""Attention dropout: a call's seed, and the mask that it determines."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexhop import errors
from flexhop.errors.base import shape_text
from flexhop.ops.call import PROBABILITIES, Mistake, note_mistake
from flexhop.ops.dropout import draw_seed, is_kept

__all__ = ["Dropout", "dropout_mask", "dropout_seed"]


class Dropout(NamedTuple):
    """A call's dropout arguments.

    p: probability that a weight is dropped. seed: [2] int64, or None to draw one.
    """

    # 0 and not 0.0, here and in the doors: under dynamic=True Dynamo would make a default that is
    # a float an input of the graph, find that it chooses code, and trace everything again.
    p: float = 0
    seed: Tensor | None = None

    def operand(self, query: Tensor) -> tuple[Tensor, ...]:
        """The seed as an operand, or no operand without dropout."""
        # An invalid p raises later (ops/call.py); the generator must not advance before that.
        if not 0.0 < self.p < 1.0:
            return ()
        return (draw_seed(query.device) if self.seed is None else self.seed,)

    def mistake(self, query: Tensor) -> Mistake | None:
        """The first invalid argument, or None."""
        p, seed = cast("tuple[Any, Any]", self)
        if not isinstance(p, (float, int, torch.SymFloat, torch.SymInt)):
            found = type(p).__name__
            return note_mistake(
                errors.OptionValueError, name="dropout_p", value=found, allowed=PROBABILITIES
            )
        if seed is None:
            return None
        wanted = f"int64 of shape [2] on {query.device}"
        if not isinstance(seed, Tensor):
            return _seed_mistake(type(seed).__name__, wanted)
        is_pair = seed.dim() == 1 and seed.size(0) == 2
        if is_pair and seed.dtype == torch.int64 and seed.device == query.device:
            return None
        found = f"{seed.dtype} of shape {shape_text(seed.shape)} on {seed.device}"
        return _seed_mistake(found, wanted)


NO_DROPOUT = Dropout()


def _seed_mistake(found: Any, wanted: str) -> Mistake:
    return note_mistake(errors.OptionValueError, name="dropout_seed", value=found, allowed=wanted)


def dropout_seed(device: torch.device | str = "cpu") -> Tensor:
    """Draw a seed, as a call with dropout_p and without dropout_seed does.

    Args:
        device: the device of query. Its default generator advances.

    Returns:
        [2] int64, for `flex_attention(..., dropout_seed=)` and `dropout_mask`.
    """
    return draw_seed(torch.device(device))


def dropout_mask(seed: Tensor, dropout_p: float, shape: tuple[int, int, int, int]) -> Tensor:
    """Which weights a call with this seed keeps.

    Only the seed and the position of a weight matter: its batch, query head, query and key,
    counted in the operands of the call. For packed and nested sequences, batch is 0, and queries
    and keys count packed tokens.

    Args:
        seed: [2] int64, from `dropout_seed`.
        dropout_p: the call's dropout_p.
        shape: B, Hq, M, N: batches, query heads, queries and keys.

    Returns:
        [B, Hq, M, N] bool, True if a weight is kept (and divided by 1 - dropout_p).

    Source: Philox 4x32-10, Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3.
    """
    b, h, q_idx, kv_idx = (torch.arange(size, device=seed.device) for size in shape)
    index = (b[:, None, None, None], h[:, None, None], q_idx[:, None], kv_idx)
    return is_kept(seed, dropout_p, index)
