"""Train on whole documents of all lengths, packed without padding, with one compiled graph.

Each step takes speeches of a play until its budget of characters is full. They lie one after the
other in one row; ``flexhop.varlen_attention`` keeps them apart, and its mods count positions from
the beginning of each speech. No step pads, and none compiles anew: the offsets are filled up with
empty sequences to a fixed number.

    python examples/packed_training.py            # about a minute on two CPU cores
    python examples/packed_training.py --steps 20
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass

import torch
from quickstart import TEXT, Corpus, alibi_slopes, load_corpus  # the file beside this one
from torch import Tensor, nn
from torch.nn import functional

import flexhop


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and of its training."""

    device: str
    tokens: int  # characters of a step, in however many speeches
    speeches: int  # at most, in a step
    width: int
    heads: int
    layers: int
    steps: int
    learning_rate: float = 2e-3


ON_GPU = Settings("cuda", tokens=16384, speeches=1024, width=512, heads=8, layers=6, steps=200)
ON_CPU = Settings("cpu", tokens=384, speeches=32, width=128, heads=4, layers=2, steps=60)


@dataclass(frozen=True)
class Pack:
    """Speeches one after the other.

    offsets [speeches + 1] int32: where each begins, and the end; what is left over are empty
    sequences. inputs, targets: [tokens], where the last character of a speech predicts nothing.
    """

    inputs: Tensor
    targets: Tensor
    offsets: Tensor

    @property
    def lengths(self) -> Tensor:
        """Of the speeches that are there."""
        lengths = self.offsets.diff()
        return lengths[lengths > 0]


def split(corpus: Corpus) -> list[Tensor]:
    """The characters of each speech."""
    counts: list[int] = torch.bincount(corpus.speeches).tolist()
    return list(corpus.characters.split(counts))


def pack(speeches: list[Tensor], settings: Settings) -> Pack:
    """Random speeches until the tokens are full; the last one is cut short."""
    taken: list[Tensor] = []
    room = settings.tokens
    while room:
        last = len(taken) == settings.speeches - 1
        speech = torch.cat(speeches) if last else speeches[int(torch.randint(len(speeches), ()))]
        taken.append(speech[:room])
        room -= len(taken[-1])
    targets = [functional.pad(speech[1:], (0, 1), value=-100) for speech in taken]
    ends = torch.tensor([len(speech) for speech in taken]).cumsum(0)
    offsets = torch.full((settings.speeches + 1,), settings.tokens, dtype=torch.int32)
    offsets[0] = 0
    offsets[1 : len(ends) + 1] = ends
    parts = (torch.cat(taken), torch.cat(targets), offsets)
    return Pack(*(part.to(settings.device) for part in parts))


class Layer(nn.Module):
    """Attention within each speech, then a two-layer perceptron, each added to the stream."""

    slopes: Tensor

    def __init__(self, width: int, heads: int) -> None:
        """Make the parts; ``heads`` divides ``width``."""
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.register_buffer("slopes", alibi_slopes(heads))

    def forward(self, hidden: Tensor, offsets: Tensor) -> Tensor:
        """[tokens, width] to the same."""
        slopes = self.slopes

        def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + slopes[h] * (kv_idx - q_idx)  # positions within the speech

        heads = self.query_key_value(self.norms[0](hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.unbind(1)
        mixed = flexhop.varlen_attention(
            query, key, value, offsets, score_mod=alibi, is_causal=True
        )
        assert isinstance(mixed, Tensor)
        hidden = hidden + self.out(mixed.flatten(1))
        return hidden + self.perceptron(self.norms[1](hidden))


class Transformer(nn.Module):
    """Packed characters in, loss of predicting the next ones out."""

    def __init__(self, alphabet: int, settings: Settings) -> None:
        """Make embedding, layers and the final projection."""
        super().__init__()
        self.embedding = nn.Embedding(alphabet, settings.width)
        self.layers = nn.ModuleList(
            Layer(settings.width, settings.heads) for _ in range(settings.layers)
        )
        self.norm = nn.LayerNorm(settings.width)
        self.logits = nn.Linear(settings.width, alphabet)

    def forward(self, batch: Pack) -> Tensor:
        """Mean cross entropy in nats per character."""
        hidden = self.embedding(batch.inputs)
        for layer in self.layers:
            hidden = layer(hidden, batch.offsets)
        logits = self.logits(self.norm(hidden)).float()
        return functional.cross_entropy(logits, batch.targets)


def train(corpus: Corpus, settings: Settings) -> tuple[float, float]:
    """Train, print the loss now and then; the mean loss of the first and the last five steps."""
    torch.manual_seed(0)
    model, speeches = Transformer(len(corpus.alphabet), settings), split(corpus)
    model.to(settings.device)
    for layer in model.layers:  # they are alike: the first is compiled, the others reuse its code
        layer.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    losses: list[float] = []
    start = time.perf_counter()
    for step in range(settings.steps):
        batch = pack(speeches, settings)
        with torch.autocast(settings.device, torch.bfloat16, enabled=settings.device == "cuda"):
            loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(1, settings.steps // 10) == 0 or step == settings.steps - 1:
            report(step, losses[-1], batch, time.perf_counter() - start)
    ends = losses[:5], losses[-5:]
    return math.fsum(ends[0]) / len(ends[0]), math.fsum(ends[1]) / len(ends[1])


def report(step: int, loss: float, batch: Pack, elapsed: float) -> None:
    """Print one line; what padding would have cost is the longest speech for each."""
    lengths = batch.lengths
    padded = int(lengths.max()) * len(lengths)
    print(
        f"  step {step:4d}  loss {loss:.3f}  {len(lengths):4d} speeches of {int(lengths.min())} "
        f"to {int(lengths.max())} characters, {padded / batch.inputs.numel():.1f} times as many "
        f"if padded  {elapsed:6.1f} s",
        flush=True,
    )


def main(arguments: list[str]) -> int:
    """Train; the exit status says whether the loss fell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = ON_GPU if torch.cuda.is_available() else ON_CPU
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default.device)
    parser.add_argument("--steps", type=int, help="training steps")
    options = parser.parse_args(arguments)
    settings = ON_GPU if options.device == "cuda" else ON_CPU
    sizes = vars(settings) | ({"steps": options.steps} if options.steps else {})
    first, last = train(load_corpus(TEXT), Settings(**sizes))
    print(f"Loss: {first:.3f} in the first steps, {last:.3f} in the last.")
    return int(not last < first)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
