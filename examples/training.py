"""Train a decoder on packed documents, with one flag for whose attention it is.

    python examples/training.py                          # flexhop
    python examples/training.py --attention sdpa         # PyTorch's, with a dense mask
    python examples/training.py --attention flex         # PyTorch's flex_attention, on a GPU
    python examples/training.py --checkpoint run.pt      # saves there, and goes on from there

Everything else is the same: each layer is one compiled graph, its activations are computed again
in the backward pass except the outputs of attention, and products are bfloat16 on a GPU. It prints
the loss, tokens per second, the share of the GPU's peak that the products use (MFU), the time of
the first step and the peak of memory. The documents are the speeches of a play.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quickstart import TEXT, Corpus, load_corpus  # the file beside this one
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import flex_attention as intree
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import flexhop
from flexhop.nn.attention import rotate
from flexhop.ops.forward import attention as operator

# Dense bfloat16 products per second, by NVIDIA's data sheets.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and of its training."""

    attention: str
    device: str
    length: int
    batch: int
    width: int
    heads: int
    kv_heads: int
    layers: int
    steps: int
    compiled: bool = True
    learning_rate: float = 1e-3


ON_GPU: dict[str, Any] = {
    "length": 8192,
    "batch": 2,
    "width": 1024,
    "heads": 8,
    "kv_heads": 2,
    "layers": 8,
}
ON_CPU: dict[str, Any] = {
    "length": 256,
    "batch": 4,
    "width": 128,
    "heads": 4,
    "kv_heads": 2,
    "layers": 2,
}


# masks: what the three kinds of attention want to know about the documents of a step


def visible(documents: Tensor) -> Callable[..., Tensor]:
    """The mask_mod: causal within each document; documents [B, S]."""
    return flexhop.masks.packed_causal(documents)


def make_mask(kind: str, documents: Tensor) -> Any:
    """A block mask, or for sdpa the whole mask, [B, 1, S, S] bool."""
    batch, length = documents.shape
    keep = visible(documents)
    sizes = (batch, None, length, length, documents.device)
    # Compiled, it needs few launches, and the host does not wait for the GPU.
    if kind == "flexhop":
        return flexhop.create_block_mask(keep, *sizes, _compile=documents.is_cuda)
    if kind == "flex":
        return intree.create_block_mask(keep, *sizes, _compile=True)  # pyright: ignore[reportArgumentType]
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & torch.ones(length, length, dtype=torch.bool, device=same.device).tril()


def attend(kind: str, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """[B, Hq, S, D] queries, [B, Hkv, S, D] keys and values."""
    if kind == "flexhop":
        return flexhop.flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
    if kind == "flex":
        out = intree.flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
        return out  # pyright: ignore[reportReturnType]
    call = functional.scaled_dot_product_attention
    return call(query, key, value, attn_mask=mask, enable_gqa=True)


# the model


def keep_attention(context: Any, op: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
    """Outputs of attention are kept, by whoever computes it; all else is computed again."""
    is_attention = op is operator or "attention" in str(op)
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


contexts = functools.partial(create_selective_checkpoint_contexts, keep_attention)


class Block(nn.Module):
    """One layer; in the backward pass all of it but attention is computed again."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.kind, self.size = settings.attention, settings.width // settings.heads
        self.heads = (settings.heads, settings.kv_heads, settings.kv_heads)
        width = settings.width
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.project = nn.Linear(width, sum(self.heads) * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.gate = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, hidden: Tensor, positions: Tensor, mask: Any) -> Tensor:
        """hidden [B, S, W]; positions [B, S]: of each token in its document."""
        call = functools.partial(checkpoint, self.layer, use_reentrant=False, context_fn=contexts)
        return call(hidden, positions, mask)

    def layer(self, hidden: Tensor, positions: Tensor, mask: Any) -> Tensor:
        """Attention and two linear layers, each beside a sum."""
        rows = self.project(self.norms[0](hidden)).unflatten(-1, (-1, self.size)).transpose(1, 2)
        query, key, value = rows.split(self.heads, dim=1)
        query, key = (rotate(heads, positions, 10000.0) for heads in (query, key))
        mixed = attend(self.kind, query, key, value, mask)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        inner = self.norms[1](hidden)
        return hidden + self.down(functional.silu(self.gate(inner)) * self.up(inner))


class Decoder(nn.Module):
    """Characters to the loss of the next ones."""

    def __init__(self, symbols: int, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.embed = nn.Embedding(symbols, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm, self.head = nn.RMSNorm(settings.width), nn.Linear(settings.width, symbols)
        if settings.compiled:
            for block in self.blocks:
                block.compile(fullgraph=True)

    def forward(self, inputs: Tensor, targets: Tensor, documents: Tensor) -> Tensor:
        """All [B, S]; the mean loss of targets."""
        mask = make_mask(self.settings.attention, documents)
        place = torch.arange(inputs.size(1), device=inputs.device).expand_as(inputs)
        is_first = functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        positions = place - torch.where(is_first, place, 0).cummax(1).values
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden, positions, mask)
        return functional.cross_entropy(
            self.head(self.norm(hidden)).flatten(0, 1), targets.flatten()
        )


# training


def sample(corpus: Corpus, settings: Settings, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """The batch of a step, the same in every run: inputs, targets and documents, [B, S] each."""
    random = torch.Generator().manual_seed(step)
    last = len(corpus.characters) - settings.length - 1
    starts = torch.randint(last, (settings.batch, 1), generator=random)
    window = starts + torch.arange(settings.length)
    parts = corpus.characters[window], corpus.characters[window + 1], corpus.speeches[window]
    inputs, targets, documents = (part.to(settings.device) for part in parts)
    return inputs, targets, documents


def operations(model: Decoder, documents: Tensor) -> float:
    """Products and sums of a step, forward and backward, without what is computed twice."""
    sizes = torch.cat([row.unique_consecutive(return_counts=True)[1] for row in documents.cpu()])
    pairs = float((sizes.double() * (sizes + 1) / 2).sum())
    weights = sum(p.numel() for block in model.blocks for p in block.parameters())
    settings = model.settings
    return 6.0 * weights * documents.numel() + 12.0 * settings.layers * settings.width * pairs


def progress(steps: range) -> tuple[Iterator[int], Callable[[str], None]]:
    """The steps, with a bar if tqdm is installed, and a way to say something beside it."""
    try:
        from tqdm import tqdm
    except ImportError:
        return iter(steps), lambda words: print(words, flush=True)
    bar = tqdm(steps, initial=steps.start, total=steps.stop, unit="step")
    return iter(bar), bar.set_postfix_str


def train(settings: Settings, path: Path | None = None) -> list[float]:
    """Train, from a checkpoint if there is one; the losses of the steps that were made."""
    corpus = load_corpus(TEXT)
    torch.manual_seed(0)
    model = Decoder(len(corpus.alphabet), settings).to(settings.device)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate)
    first = 0
    if path is not None and path.exists():
        state = torch.load(path, map_location=settings.device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    losses: list[float] = []
    steps, say = progress(range(first, settings.steps))
    for step in steps:
        start = time.perf_counter()
        inputs, targets, documents = sample(corpus, settings, step)
        with torch.autocast(settings.device, torch.bfloat16, enabled=settings.device == "cuda"):
            loss = model(inputs, targets, documents)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        seconds = time.perf_counter() - start
        say(report(model, documents, losses[-1], seconds, is_first=step == first))
    if path is not None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": settings.steps}, path)
    return losses


def report(
    model: Decoder, documents: Tensor, loss: float, seconds: float, *, is_first: bool
) -> str:
    """One line about a step."""
    words = f"loss {loss:.3f}, {documents.numel() / seconds:,.0f} tokens/s"
    if documents.is_cuda:
        name = torch.cuda.get_device_name()
        peak = next((rate for chip, rate in PEAKS.items() if chip in name), None)
        if peak is not None and not is_first:
            words += f", MFU {operations(model, documents) / seconds / peak:.1%}"
        words += f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    return words + (f", first step {seconds:.1f} s" if is_first else "")


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--attention", choices=("flexhop", "flex", "sdpa"), default="flexhop")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, default=None)
    given = parser.parse_args()
    if (given.attention, given.device) == ("flex", "cpu"):
        parser.error("PyTorch's flex_attention has no backward pass on a CPU")
    sizes = ON_GPU if given.device == "cuda" else ON_CPU
    settings = Settings(given.attention, given.device, **sizes, steps=given.steps)
    losses = train(settings, given.checkpoint)
    if losses:
        print(f"\n{given.attention}: loss {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
