"""Train a small transformer on a play, check flexhop's kernels, and, on a GPU, print their speed.

The model reads characters. Speeches of the play are packed into sequences: attention is causal,
stays within a speech (``mask_mod``), and sees distance through ALiBi slopes (``score_mod``).

    python examples/quickstart.py            # everything; about half a minute on two CPU cores
    python examples/quickstart.py --steps 20
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import flexhop
import kernel_checks  # the file beside this one
from flexhop import BlockMask

TEXT = Path(__file__).resolve().parent / "data" / "romeo_and_juliet.txt"


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and of its training."""

    device: str
    length: int  # characters in one packed sequence
    batch: int
    width: int
    heads: int
    layers: int
    steps: int
    learning_rate: float = 2e-3

    @property
    def autocast(self) -> torch.autocast:
        """bfloat16 products on a GPU, float32 on a CPU."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")


ON_GPU = Settings("cuda", length=2048, batch=8, width=512, heads=8, layers=6, steps=200)
ON_CPU = Settings("cpu", length=256, batch=8, width=128, heads=4, layers=2, steps=80)


@dataclass(frozen=True)
class Corpus:
    """A text as numbers: one character and one speech number per position."""

    characters: Tensor  # [T] int64
    speeches: Tensor  # [T] int32
    alphabet: str

    def sample(self, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
        """Random windows: inputs, targets and speech numbers, each [batch, length]."""
        starts = torch.randint(len(self.characters) - settings.length - 1, (settings.batch, 1))
        window = starts + torch.arange(settings.length)
        parts = self.characters[window], self.characters[window + 1], self.speeches[window]
        inputs, targets, speeches = (part.to(settings.device) for part in parts)
        return inputs, targets, speeches


def load_corpus(path: Path) -> Corpus:
    """Read the play; a blank line ends a speech."""
    text = path.read_text()
    alphabet = "".join(sorted(set(text)))
    speeches = [speech + "\n\n" for speech in text.split("\n\n")]
    numbers = [torch.full((len(speech),), i) for i, speech in enumerate(speeches)]
    characters = [alphabet.index(character) for character in "".join(speeches)]
    return Corpus(torch.tensor(characters), torch.cat(numbers).int(), alphabet)


def speech_mask(speeches: Tensor) -> BlockMask:
    """Causal attention within each speech of a packed batch; ``speeches`` is [batch, length]."""
    batch, length = speeches.shape

    def causal_in_speech(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (speeches[b, q_idx] == speeches[b, kv_idx])

    return flexhop.create_block_mask(
        causal_in_speech, batch, None, length, length, device=str(speeches.device)
    )


def alibi_slopes(heads: int) -> Tensor:
    """[heads]: the geometric series of Press et al. 2022 (arXiv 2108.12409)."""
    return torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads)


class Attention(nn.Module):
    """Multi-head attention with ALiBi, through flexhop."""

    slopes: Tensor

    def __init__(self, width: int, heads: int) -> None:
        """Make the projections; ``heads`` divides ``width``."""
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.register_buffer("slopes", alibi_slopes(heads))

    def forward(self, hidden: Tensor, mask: BlockMask) -> Tensor:
        """[B, S, width] to the same."""
        batch, length, width = hidden.shape
        slopes = self.slopes

        def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + slopes[h] * (kv_idx - q_idx)

        heads = self.query_key_value(hidden).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B, H, S, D]
        mixed = flexhop.flex_attention(query, key, value, score_mod=alibi, block_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """Attention, then a two-layer perceptron, each added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        """Make the parts."""
        super().__init__()
        self.attention = Attention(width, heads)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.before_attention = nn.LayerNorm(width)
        self.before_perceptron = nn.LayerNorm(width)

    def forward(self, hidden: Tensor, mask: BlockMask) -> Tensor:
        """[B, S, width] to the same."""
        hidden = hidden + self.attention(self.before_attention(hidden), mask)
        return hidden + self.perceptron(self.before_perceptron(hidden))


class Transformer(nn.Module):
    """Characters in, loss of predicting the next characters out."""

    def __init__(self, alphabet: int, settings: Settings) -> None:
        """Make embedding, layers and the final projection."""
        super().__init__()
        self.embedding = nn.Embedding(alphabet, settings.width)
        self.layers = nn.ModuleList(
            Layer(settings.width, settings.heads) for _ in range(settings.layers)
        )
        self.norm = nn.LayerNorm(settings.width)
        self.logits = nn.Linear(settings.width, alphabet)

    def forward(self, inputs: Tensor, targets: Tensor, mask: BlockMask) -> Tensor:
        """Mean cross entropy in nats per character."""
        hidden = self.embedding(inputs)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        logits = self.logits(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train(corpus: Corpus, settings: Settings) -> tuple[float, float]:
    """Train, print the loss now and then; the mean loss of the first and the last five steps."""
    torch.manual_seed(0)
    model = Transformer(len(corpus.alphabet), settings).to(settings.device)
    for layer in model.layers:  # they are alike: the first is compiled, the others reuse its code
        layer.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    losses: list[float] = []
    start = time.perf_counter()
    for step in range(settings.steps):
        inputs, targets, speeches = corpus.sample(settings)
        with settings.autocast:
            loss = model(inputs, targets, speech_mask(speeches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(1, settings.steps // 10) == 0 or step == settings.steps - 1:
            elapsed = time.perf_counter() - start
            print(f"  step {step:4d}  loss {losses[-1]:.3f}  {elapsed:6.1f} s", flush=True)
    ends = losses[:5], losses[-5:]
    return math.fsum(ends[0]) / len(ends[0]), math.fsum(ends[1]) / len(ends[1])


def chosen_settings(arguments: list[str]) -> Settings:
    """The sizes for this machine, with what the command line changes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = ON_GPU if torch.cuda.is_available() else ON_CPU
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default.device)
    parser.add_argument("--steps", type=int, help="training steps")
    options = parser.parse_args(arguments)
    settings = ON_GPU if options.device == "cuda" else ON_CPU
    sizes = vars(settings) | ({"steps": options.steps} if options.steps else {})
    return Settings(**sizes)


def main(arguments: list[str]) -> int:
    """Train, check, measure; the exit status says whether the loss fell and the kernels agree."""
    settings = chosen_settings(arguments)
    corpus = load_corpus(TEXT)
    print(
        f"flexhop {flexhop.__version__}, torch {torch.__version__}, on {settings.device}: "
        f"{len(corpus.characters)} characters, {int(corpus.speeches[-1]) + 1} speeches"
    )
    print("Training, compiled:")
    first, last = train(corpus, settings)
    has_fallen = last < first - 0.1
    print(
        f"  loss fell from {first:.3f} to {last:.3f}" if has_fallen else "  the loss did not fall"
    )
    if settings.device == "cuda":
        agrees = kernel_checks.check_on_gpu(corpus.speeches)
        kernel_checks.print_speed(corpus.speeches)
    else:
        agrees = kernel_checks.check_in_interpreter(corpus.speeches)
    return int(not (has_fallen and agrees))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
