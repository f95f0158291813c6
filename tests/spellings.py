"""Mods that are one mod, written in many ways: the spelling must not choose the kernel."""

import torch

LENGTH, WIDTH = 192, 24
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
}
