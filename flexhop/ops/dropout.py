"""Which weights dropout keeps, as a function of only a seed and the position of the weight.

The generator is Philox 4x32-10. Its key is the two words of the seed, and its counter is the
position (group of queries, batch, group of keys, head). One call yields 16 bits for each weight of
a group: queries i and i + 8 and keys j, j + 1, j + 8 and j + 9 of a 16 x 16 square, because one
thread holds these of a tensor core product. Tiles, splits, recomputation and the choice of kernel
make no difference. templates/mods/dropout.py.jinja is the kernels' version of this file.

Source: Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed from the device's PyTorch generator, [2] int64: two 32-bit words.

    This is an ordinary random operation, so torch.manual_seed, checkpointing, CUDA graph replay
    and joint graph partitioning treat it like any other.
    """
    return torch.randint(0, 1 << 32, (2,), dtype=torch.int64, device=device)


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random 32-bit words, as int64, from a counter and a key of such words."""
    c0, c1, c2, c3 = counter
    k0, k1 = (word & _WORD for word in key)
    for _ in range(ROUNDS):
        high_0, low_0 = _multiply(c0, MULTIPLIERS[0])
        high_1, low_1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + KEY_STEPS[0]) & _WORD, (k1 + KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of a product, computed by halves of the factor.

    The whole product overflows int64. C++ compilers assume that this cannot happen and drop masks.
    """
    upper, lower = word * (factor >> 16), word * (factor & 0xFFFF)
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & _WORD


def random_bits(seed: Tensor, index: tuple[Tensor, ...]) -> Tensor:
    """The 16 bits of every weight, int64 in [0, 65536).

    Args:
        seed: [2] integers; only their low 32 bits are used.
        index: b, h, q_idx, kv_idx, integers that broadcast.
    """
    b, h, q_idx, kv_idx = (tensor.long() for tensor in index)
    # Shifts, not quotients: Inductor's C++ backend splits a loop whose counter is divided.
    rows, columns = q_idx >> 4 << 3 | q_idx & 7, kv_idx >> 4 << 2 | (kv_idx >> 1) & 3
    words = philox((rows, b, columns, h), (seed[0], seed[1]))
    below, right = (q_idx & 8) != 0, (kv_idx & 8) != 0
    first, second = (torch.where(right, words[2 * i + 1], words[2 * i]) for i in (0, 1))
    word = torch.where(below, second, first)
    return torch.where((kv_idx & 1) != 0, word >> 16, word & 0xFFFF)


def threshold(dropout_p: float) -> int:
    """A weight is dropped if its bits are below this: the probability in units of 2**-16."""
    return min(round(dropout_p * (1 << 16)), 0xFFFF)


def is_kept(seed: Tensor, dropout_p: float, index: tuple[Tensor, ...]) -> Tensor:
    """Which weights are kept, bool; arguments as in random_bits."""
    return random_bits(seed, index) >= threshold(dropout_p)


def place(seed: Tensor, first: tuple[int, int], groups: Tensor) -> Tensor:
    """The seed operand of a call whose batch, head and token indices differ from the mask's.

    Args:
        seed: [2] int64.
        first: the mask's indices of the call's first batch and query head.
        groups: int64, for each 16 queries of the call, then for each 16 keys, the index of the
            mask's group of 16.

    Returns:
        [4 + groups] int64: seed, first, groups. The operator's option `dropout_groups` is the
        number of query groups.
    """
    numbers = [seed.new_full((1,), number) for number in first]
    return torch.cat((seed, *numbers, groups))


def _placed(
    seed: Tensor, queries: int, index: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions of a call's weights in the mask; templates/mods/dropout.py.jinja does the same."""
    b, h, q_idx, kv_idx = (tensor.long() for tensor in index)
    groups = seed[4:]
    return (
        b + seed[2],
        h + seed[3],
        (groups[q_idx >> 4] << 4) | (q_idx & 15),
        (groups[queries + (kv_idx >> 4)] << 4) | (kv_idx & 15),
    )


def drop(
    weights: Tensor, seed: tuple[Tensor, ...], options: dict[str, Any], index: tuple[Tensor, ...]
) -> Tensor:
    """Apply dropout to weights, or their gradients, [B, Hq, m, N]: 0 or divided by 1 - p.

    Args:
        weights: returned unchanged if `seed` is empty.
        seed: the operand of AttentionArgs. options: the operator's options.
        index: the four index vectors.
    """
    if not seed:
        return weights
    dropout_p = float(options["dropout_p"])
    if "dropout_groups" in options:
        index = _placed(seed[0], int(options["dropout_groups"]), index)
    b, h, q_idx, kv_idx = index
    grid = (b[:, None, None, None], h[:, None, None], q_idx[:, None], kv_idx)
    return torch.where(is_kept(seed[0], dropout_p, grid), weights / (1.0 - dropout_p), 0.0)
