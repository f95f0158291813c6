"""Latent attention, as in DeepSeek-V2 (arXiv 2405.04434): training, and decoding from its cache.

    python examples/latent_attention.py    # compiled and bfloat16 on a GPU, small on a CPU

Keys and values of all heads are linear functions of one latent vector per token. Training computes
them: a head has 192 columns of query and key, of which 64 are rotated, and 128 columns of value.
Decoding stores the latent vector alone, 512 columns, and 64 rotated ones that all heads share. It
multiplies the query by the weights of the keys, and the output by the weights of the values. That
is the same function with one key head of 576 columns, whose first 512 columns are also the values.
The kernel for such calls reads them once.
"""

import argparse
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import flexhop
from flexhop.masks import causal
from flexhop.nn.attention import rotate

ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class Sizes:
    """Of the layer. head, rotated, latent and value are columns, those of DeepSeek-V3."""

    width: int
    heads: int
    batch: int
    length: int
    steps: int
    head: int = 128
    rotated: int = 64
    latent: int = 512
    value: int = 128

    @property
    def scale(self) -> float:
        """Of scores, in training and in decoding."""
        return (self.head + self.rotated) ** -0.5


ON_GPU = Sizes(width=4096, heads=128, batch=4, length=2048, steps=20)
ON_CPU = Sizes(width=64, heads=4, batch=2, length=40, steps=10)


class LatentAttention(nn.Module):
    """One layer of causal latent attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = s = sizes
        self.query = nn.Linear(s.width, s.heads * (s.head + s.rotated), bias=False)
        self.compress = nn.Linear(s.width, s.latent + s.rotated, bias=False)
        self.norm = nn.RMSNorm(s.latent)
        # What makes the key, without rotated columns, and the value of each head.
        self.key = nn.Parameter(torch.randn(s.heads, s.head, s.latent) * s.latent**-0.5)
        self.value = nn.Parameter(torch.randn(s.heads, s.value, s.latent) * s.latent**-0.5)
        self.out = nn.Linear(s.heads * s.value, s.width, bias=False)

    def forward(self, hidden: Tensor, mask: flexhop.BlockMask) -> Tensor:
        """[B, S, W]: [B, S, W], with keys and values of every head."""
        positions = torch.arange(hidden.size(1), device=hidden.device)
        latent, rotated = self.latents(hidden, positions).split(self._latent_columns(), -1)
        key = torch.einsum("bsl,hdl->bhsd", latent[:, 0], self.key)
        key = torch.cat([key, rotated.expand(-1, self.sizes.heads, -1, -1)], -1)
        value = torch.einsum("bsl,hdl->bhsd", latent[:, 0], self.value)
        query = self.queries(hidden, positions)
        mixed = flexhop.flex_attention(query, key, value, block_mask=mask, scale=self.sizes.scale)
        return self.out(mixed.transpose(1, 2).flatten(-2))

    def step(self, hidden: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        """One token per sequence, [B, 1, W], at `position`, [1]: [B, 1, W].

        It is added to cache, [B, 1, N, latent + rotated].
        """
        size = self.sizes
        cache.index_copy_(2, position, self.latents(hidden, position))
        query, rotated = self.queries(hidden, position).split((size.head, size.rotated), -1)
        query = torch.cat([torch.einsum("bhsd,hdl->bhsl", query, self.key), rotated], -1)
        mask = flexhop.create_block_mask(
            lambda b, h, q_idx, kv_idx: kv_idx <= position[q_idx],
            None, None, 1, cache.size(2), cache.device,
        )  # fmt: skip
        mixed = flexhop.flex_attention(
            query, cache, cache[..., : size.latent],
            block_mask=mask, scale=size.scale, enable_gqa=True,
        )  # fmt: skip
        mixed = torch.einsum("bhsl,hdl->bhsd", mixed, self.value)
        return self.out(mixed.transpose(1, 2).flatten(-2))

    def queries(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """[B, S, W]: [B, H, S, head + rotated]."""
        query = self.query(hidden).unflatten(-1, (self.sizes.heads, -1)).transpose(1, 2)
        plain, turned = query.split((self.sizes.head, self.sizes.rotated), -1)
        return torch.cat([plain, rotate(turned, positions, ROTARY_BASE)], -1)

    def latents(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """[B, S, W]: [B, 1, S, latent + rotated], the rows of the cache."""
        latent, turned = self.compress(hidden)[:, None].split(self._latent_columns(), -1)
        return torch.cat([self.norm(latent), rotate(turned, positions, ROTARY_BASE)], -1)

    def _latent_columns(self) -> tuple[int, int]:
        return self.sizes.latent, self.sizes.rotated


def train(layer: LatentAttention, device: str, *, compiled: bool) -> list[float]:
    """Teach the layer to give the token before each token of one batch; the losses."""
    size = layer.sizes
    mask = flexhop.create_block_mask(causal, None, None, size.length, size.length, device)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    run = torch.compile(layer) if compiled else layer
    losses: list[float] = []
    hidden = _tokens(layer, device)
    for _ in range(size.steps):
        found = run(hidden, mask)
        loss = functional.mse_loss(found[:, 1:].float(), hidden[:, :-1].float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def decode(layer: LatentAttention, hidden: Tensor, *, compiled: bool) -> tuple[Tensor, float]:
    """All tokens one after the other: outputs, and seconds per token after the first ones."""
    size = layer.sizes
    shape = (hidden.size(0), 1, hidden.size(1), size.latent + size.rotated)
    cache = torch.zeros(shape, dtype=hidden.dtype, device=hidden.device)
    step = torch.compile(layer.step) if compiled else layer.step
    positions = torch.arange(hidden.size(1), device=hidden.device)
    outputs: list[Tensor] = []
    started = time.perf_counter()
    for number in range(hidden.size(1)):
        if number == 3:
            _wait(hidden)
            started = time.perf_counter()
        at = slice(number, number + 1)
        outputs.append(step(hidden[:, at], cache, positions[at]))
    _wait(hidden)
    return torch.cat(outputs, 1), (time.perf_counter() - started) / (hidden.size(1) - 3)


def _tokens(layer: LatentAttention, device: str) -> Tensor:
    """Random numbers in the dtype of the layer, [B, S, W]."""
    size = layer.sizes
    dtype = layer.out.weight.dtype
    return torch.randn(size.batch, size.length, size.width, device=device, dtype=dtype)


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


@torch.no_grad()
def compare(layer: LatentAttention, device: str, *, compiled: bool) -> float:
    """The largest difference between decoding and the whole sequence, of the largest output."""
    size = layer.sizes
    hidden = _tokens(layer, device)
    mask = flexhop.create_block_mask(causal, None, None, size.length, size.length, device)
    whole = (torch.compile(layer) if compiled else layer)(hidden, mask)
    found, seconds = decode(layer, hidden, compiled=compiled)
    full = size.heads * (size.head + size.rotated + size.value)
    print(
        f"decoding: {1e3 * seconds:.2f} ms per token; a token of the cache has "
        f"{size.latent + size.rotated} numbers instead of {full}"
    )
    return float((found - whole).abs().max() / whole.abs().max())


def main() -> None:
    """Train, decode, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    on_gpu = device == "cuda"
    torch.manual_seed(0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    layer = LatentAttention(ON_GPU if on_gpu else ON_CPU).to(device, dtype)
    losses = train(layer, device, compiled=on_gpu)
    print(f"training: loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps")
    error = compare(layer, device, compiled=on_gpu)
    print(f"decoding and the whole sequence differ by {error:.1e} of the largest output")
    if error > (3e-2 if on_gpu else 1e-4):
        raise SystemExit("they should be the same function")


if __name__ == "__main__":
    main()
