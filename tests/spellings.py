"""Mods that are one mod, written in many ways: the spelling must not choose the kernel."""

from functools import partial

import torch

LENGTH, WIDTH = 192, 24


def causal(b, h, q, k):
    return q >= k


def within(b, h, q, k, width):
    return distance(q, k) < width


def distance(q, k):
    return q - k


def both(*masks):
    """What torch's and_masks returns."""

    def joined(b, h, q, k):
        kept = b.new_ones((), dtype=torch.bool)
        for mask in masks:
            kept = kept & mask(b, h, q, k)
        return kept

    return joined


WINDOWS = {
    "and": lambda b, h, q, k: (q >= k) & (q - k < WIDTH),
    "not or": lambda b, h, q, k: ~((q < k) | (q - k >= WIDTH)),
    "sums": lambda b, h, q, k: (k <= q) & (k > q - WIDTH),
    "logical": lambda b, h, q, k: torch.logical_and(q - k >= 0, q - k <= WIDTH - 1),
    "where": lambda b, h, q, k: torch.where(q >= k, q - k < WIDTH, False),
    "where not": lambda b, h, q, k: torch.where(q < k, False, k + WIDTH > q),
    "product": lambda b, h, q, k: (k - q <= 0) * ((q - k) < WIDTH),
    "minimum": lambda b, h, q, k: torch.minimum(q - k, WIDTH - 1 - (q - k)) >= 0,
    "magnitude": lambda b, h, q, k: (2 * (q - k) - (WIDTH - 1)).abs() <= WIDTH - 1,
    "not and not": lambda b, h, q, k: ~(q < k) & ~(q - k > WIDTH - 1),
    "negative": lambda b, h, q, k: (-k + q >= 0) & (-q + k + WIDTH > 0),
    "long": lambda b, h, q, k: (q.long() >= k.long()) & ((q + 5) - (k + 5) < WIDTH),
    "maximum": lambda b, h, q, k: torch.maximum(k - q, q - k - (WIDTH - 1)) <= 0,
    "not equal": lambda b, h, q, k: (q < k).logical_not() & torch.le(q - k, WIDTH - 1),
    "and_masks": both(causal, partial(within, width=WIDTH)),
    "number first": lambda b, h, q, k: (WIDTH > q - k) & (0 <= q - k),
    "de morgan": lambda b, h, q, k: ~(~(k <= q) | ~(q - WIDTH < k)),
    "shifted sides": lambda b, h, q, k: (q + 100 >= k + 100) & (q + 3 < k + WIDTH + 3),
    "doubled": lambda b, h, q, k: (2 * q + 1 > 2 * k) & (2 * (q - k) < 2 * WIDTH - 1),
    "sum of bools": lambda b, h, q, k: ((q >= k).int() + (q - k < WIDTH).int()) == 2,
    "difference of bools": lambda b, h, q, k: ((k <= q).int() - (k <= q - WIDTH).int()) == 1,
    "product of integers": lambda b, h, q, k: ((q >= k).int() * (q - k < WIDTH).int()).bool(),
    "product of floats": lambda b, h, q, k: ((q >= k).float() * (q - k < WIDTH).float()) > 0.5,
    "bits": lambda b, h, q, k: ((q >= k).long() & (q - k < WIDTH).long()) != 0,
    "minimum of bools": lambda b, h, q, k: torch.minimum(q >= k, q - k < WIDTH),
    "where number": lambda b, h, q, k: torch.where(q >= k, q - k, WIDTH) < WIDTH,
    "where numbers": lambda b, h, q, k: torch.where((k > q) | (q - k >= WIDTH), 0, 1) == 1,
    "where where": lambda b, h, q, k: torch.where(
        k > q, False, torch.where(q - k >= WIDTH, False, True)
    ),
    "clamp": lambda b, h, q, k: (q - k).clamp(0, WIDTH - 1) == q - k,
    "clamp key": lambda b, h, q, k: torch.clamp(k, q - (WIDTH - 1), q) == k,
    "minimum maximum": lambda b, h, q, k: torch.maximum(torch.minimum(k, q), q - (WIDTH - 1)) == k,
    "clamps": lambda b, h, q, k: (k - q).clamp(min=0) + (q - k - WIDTH + 1).clamp(min=0) == 0,
    "relu": lambda b, h, q, k: (q >= k) & (torch.relu(q - k - (WIDTH - 1)) == 0),
    "sign": lambda b, h, q, k: (torch.sign(q - k) >= 0) & (torch.sign(WIDTH - (q - k)) > 0),
    "xor": lambda b, h, q, k: (k <= q) ^ (k <= q - WIDTH),
    "unequal bools": lambda b, h, q, k: (k <= q) != (k <= q - WIDTH),
    "ordered bools": lambda b, h, q, k: (k <= q) > (k <= q - WIDTH),
    "quotient": lambda b, h, q, k: (q - k) // WIDTH == 0,
    "truncated": lambda b, h, q, k: (
        (q >= k) & (torch.div(q - k, WIDTH, rounding_mode="trunc") == 0)
    ),
    "floats": lambda b, h, q, k: (q.float() >= k) & (q.float() - k.float() < WIDTH),
    "halves": lambda b, h, q, k: (q - k > -0.5) & (q - k < WIDTH - 0.5),
    "shifted floats": lambda b, h, q, k: (
        ((q - k).float() - 12.0 >= -12.0) & ((q - k).float() - 12.0 < WIDTH - 12.0)
    ),
    "remainder": lambda b, h, q, k: (q - k) % WIDTH == q - k,
    "no remainder": lambda b, h, q, k: ~(q - k).remainder(WIDTH).ne(q - k),
    "all": lambda b, h, q, k: torch.stack([q >= k, q - k < WIDTH]).all(0),
    "not any": lambda b, h, q, k: ~torch.stack([q < k, q - k >= WIDTH]).any(),
    "row": lambda b, h, q, k: (torch.stack([q - k, k - q + WIDTH - 1]) >= 0).all(-1),
    "least of row": lambda b, h, q, k: torch.stack([q - k, WIDTH - 1 - (q - k)]).amin(0) >= 0,
    "min": lambda b, h, q, k: torch.stack((q - k, WIDTH - 1 - (q - k))).min() >= 0,
    "most of row": lambda b, h, q, k: torch.stack([k - q, q - k - WIDTH + 1]).max() <= 0,
    "sum of row": lambda b, h, q, k: torch.stack([q >= k, q - k < WIDTH]).sum(0) == 2,
    "cat": lambda b, h, q, k: torch.cat([(q >= k).view(1), (q < k + WIDTH)[None]]).all(),
}
DISTANCES = {
    "plain": lambda q, k: q - k + LENGTH - 1,
    "negative first": lambda q, k: -k + q + LENGTH - 1,
    "number first": lambda q, k: LENGTH - 1 - k + q,
    "products": lambda q, k: q * 1 - k * 1 + LENGTH - 1,
    "alpha": lambda q, k: torch.sub(q + LENGTH, k) - 1,
    "rsub": lambda q, k: torch.rsub(k, q + (LENGTH - 1)),
    "twice": lambda q, k: 2 * q - q - k + LENGTH - 1,
    "long": lambda q, k: q.long() - k.long() + LENGTH - 1,
    "add alpha": lambda q, k: torch.add(q, k, alpha=-1) + (LENGTH - 1),
    "neg": lambda q, k: torch.neg(k - q) + LENGTH - 1,
    "difference last": lambda q, k: q - (k - (LENGTH - 1)),
    "shifted": lambda q, k: (q + LENGTH) - (k + 1),
    "bits": lambda q, k: q + ~k + LENGTH,
    "nested": lambda q, k: distance(q + LENGTH - 1, k),
    "floats": lambda q, k: (q.float() - k.float()).int() + LENGTH - 1,
    "sum": lambda q, k: sum([q, -k, LENGTH, -1]),
}
SLOPES = torch.ones(4)
IDS = torch.arange(LENGTH) // 50
LINES = {  # ALiBi
    "plain": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "minus": lambda s, b, h, q, k: s - SLOPES[h] * (q - k),
    "factor last": lambda s, b, h, q, k: s + (k - q) * SLOPES[h],
    "floats": lambda s, b, h, q, k: s + SLOPES[h] * (k.float() - q.float()),
    "float": lambda s, b, h, q, k: s + SLOPES[h] * (k - q).float(),
    "products": lambda s, b, h, q, k: s + SLOPES[h] * k - SLOPES[h] * q,
    "negative slope": lambda s, b, h, q, k: s + (-SLOPES[h]) * (q - k),
    "negative": lambda s, b, h, q, k: s + SLOPES[h] * -(q - k),
    "rsub": lambda s, b, h, q, k: s + SLOPES[h] * torch.rsub(q, k),
    "alpha": lambda s, b, h, q, k: torch.add(s, (q - k) * SLOPES[h], alpha=-1),
    "long": lambda s, b, h, q, k: s + SLOPES[h] * (k.long() - q.long()),
    "addcmul": lambda s, b, h, q, k: torch.addcmul(s, SLOPES[h], (k - q).float()),
    "score last": lambda s, b, h, q, k: SLOPES[h] * distance(k, q) + s,
    "as the score": lambda s, b, h, q, k: s.to(torch.float32) + SLOPES[h] * (k - q).to(s.dtype),
    "one after the other": lambda s, b, h, q, k: (s + SLOPES[h] * k) - SLOPES[h] * q,
    "quotient": lambda s, b, h, q, k: s + (k - q) / (1 / SLOPES[h]),
    "eighths": lambda s, b, h, q, k: s + SLOPES[h] * 8 * (k - q) / 8,
    "shifted": lambda s, b, h, q, k: s + SLOPES[h] * ((k + 5) - (q + 5)),
    "doubled": lambda s, b, h, q, k: s + 0.5 * SLOPES[h] * (2 * k - 2 * q),
    "chosen slope": lambda s, b, h, q, k: s + torch.where(h < 2, SLOPES[h], 0.5) * (k - q),
    "power": lambda s, b, h, q, k: s + 2.0 ** (-8.0 * (h + 1) / 4) * (k - q),
}
MAGNITUDES = {  # ALiBi in both directions
    "abs": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "abs of the opposite": lambda s, b, h, q, k: s - SLOPES[h] * torch.abs(k - q),
    "maximum": lambda s, b, h, q, k: s - SLOPES[h] * torch.maximum(q - k, k - q),
    "minimum": lambda s, b, h, q, k: s + SLOPES[h] * torch.minimum(q - k, k - q),
    "where": lambda s, b, h, q, k: s - SLOPES[h] * torch.where(q >= k, q - k, k - q),
    "where less": lambda s, b, h, q, k: s - SLOPES[h] * torch.where(q < k, k - q, q - k),
    "maximum less minimum": lambda s, b, h, q, k: (
        s - SLOPES[h] * (torch.maximum(q, k) - torch.minimum(q, k))
    ),
    "floats": lambda s, b, h, q, k: s - SLOPES[h] * (q.float() - k.float()).abs(),
    "shifted": lambda s, b, h, q, k: s - SLOPES[h] * ((q + 3) - (k + 3)).abs(),
    "sign": lambda s, b, h, q, k: s - SLOPES[h] * ((q - k) * torch.sign(q - k)),
    "maximum of floats": lambda s, b, h, q, k: (
        s - SLOPES[h] * torch.maximum((q - k).float(), (k - q).float())
    ),
    "clamps": lambda s, b, h, q, k: s - SLOPES[h] * ((q - k).clamp(min=0) + (k - q).clamp(min=0)),
    "relus": lambda s, b, h, q, k: s - SLOPES[h] * (torch.relu(q - k) + torch.relu(k - q)),
    "twice the maximum": lambda s, b, h, q, k: s - SLOPES[h] * (2 * torch.maximum(q, k) - q - k),
    "where not": lambda s, b, h, q, k: s - SLOPES[h] * torch.where(~(k <= q), k - q, q - k),
    "quotient": lambda s, b, h, q, k: s - (q - k).abs() / (1.0 / SLOPES[h]),
}
DOCUMENTS = {
    "and": lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k),
    "causal first": lambda b, h, q, k: (q >= k) & (IDS[q] == IDS[k]),
    "key first": lambda b, h, q, k: (k <= q) & (IDS[k] == IDS[q]),
    "not or": lambda b, h, q, k: ~((IDS[q] != IDS[k]) | (q < k)),
    "where": lambda b, h, q, k: torch.where(q >= k, IDS[q] == IDS[k], False),
    "difference": lambda b, h, q, k: (IDS[q] - IDS[k] == 0) & (q - k >= 0),
    "logical": lambda b, h, q, k: torch.logical_and(torch.eq(IDS[q], IDS[k]), torch.ge(q, k)),
    "product": lambda b, h, q, k: (IDS[q] == IDS[k]) * (q >= k),
    "and_masks": both(lambda b, h, q, k: IDS[q] == IDS[k], causal),
    "int32": lambda b, h, q, k: (IDS[q].int() == IDS[k].int()) & (q >= k),
    "bits": lambda b, h, q, k: ((IDS[q] ^ IDS[k]) == 0) & (q >= k),
    "magnitude": lambda b, h, q, k: ((IDS[q] - IDS[k]).abs() < 1) & (q >= k),
    "both orders": lambda b, h, q, k: (IDS[q] >= IDS[k]) & (IDS[k] >= IDS[q]) & (q >= k),
    "not bool": lambda b, h, q, k: ~(IDS[q] - IDS[k]).bool() & (q >= k),
    "shifted": lambda b, h, q, k: (IDS[q] * 3 + 7 == IDS[k] * 3 + 7) & (q + 1 > k),
    "sum of bools": lambda b, h, q, k: ((IDS[q] == IDS[k]).int() + (q >= k).int()) == 2,
    "where number": lambda b, h, q, k: torch.where(q >= k, IDS[q], -1) == IDS[k],
    "long": lambda b, h, q, k: (IDS[q.long()] == IDS[k.long()]) & (q.long() >= k.long()),
}
