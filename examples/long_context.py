"""Train on sequences that are divided among ranks: FSDP2 for the model, flexhop for attention.

Speeches of a play are packed into one long sequence per step. Every second layer sees whole
speeches, the others a sliding window of them; both share one layout of the tokens, which
`flexhop.distributed.make_plan` makes anew for each batch. Weights are divided by FSDP2 over the
same ranks, checkpoints are written by torch.distributed.checkpoint, and a run that is started
again goes on from the last one: torchrun starts it again when a rank is killed.

    torchrun --standalone --nproc_per_node=2 examples/long_context.py    # GPUs or, without, CPUs
    torchrun --standalone --nproc_per_node=2 --max-restarts=1 examples/long_context.py \\
        --kill-rank-at 12                                                # and goes on from 10
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from quickstart import TEXT, Corpus, load_corpus  # the file beside this one
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn import functional

import flexhop
import flexhop.distributed as sharded
from flexhop import masks


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and of its training."""

    device: str
    tokens: int  # characters of a step, of all ranks together
    window: int
    block: int
    width: int
    heads: int
    layers: int
    steps: int
    compiles: bool
    learning_rate: float = 2e-3


ON_GPU = Settings("cuda", 131072, 2048, 128, 512, 8, 4, 40, compiles=True)
ON_CPU = Settings("cpu", 1500, 64, 32, 64, 4, 2, 30, compiles=False)


@dataclass(frozen=True)
class Batch:
    """One packed sequence on every rank: characters, targets, and the speech of each, [tokens]."""

    inputs: Tensor
    targets: Tensor
    speeches: Tensor


def make_batch(corpus: Corpus, settings: Settings, step: int) -> Batch:
    """A run of the play that begins somewhere, the same on all ranks and in every attempt."""
    generator = torch.Generator().manual_seed(step)
    text = corpus.characters
    start = int(torch.randint(len(text), (), generator=generator))
    place = (start + torch.arange(settings.tokens)) % len(text)
    speech = corpus.speeches[place]
    number = (speech.diff(prepend=speech[:1]) != 0).cumsum(0)
    targets = text[(place + 1) % len(text)].clone()
    targets[:-1][number.diff() != 0] = -100  # the last character of a speech predicts nothing
    targets[-1] = -100
    return Batch(*(t.to(settings.device) for t in (text[place], targets, number)))


class Layer(nn.Module):
    """Attention within speeches, then a two-layer perceptron, each added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        """Make the parts; ``heads`` divides ``width``."""
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.slopes = nn.Parameter(torch.linspace(-6, -2, heads))  # learned ALiBi
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, hidden: Tensor, mask: flexhop.BlockMask) -> Tensor:
        """[1, a rank's tokens, width] to the same; the mask is that of the whole sequence."""
        slopes = self.slopes

        def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score - slopes[h].exp() * (q_idx - kv_idx)

        heads = self.query_key_value(self.norms[0](hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = flexhop.flex_attention(query, key, value, alibi, mask)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.perceptron(self.norms[1](hidden))


class Transformer(nn.Module):
    """A rank's characters in, the sum of its losses out."""

    def __init__(self, alphabet: int, settings: Settings) -> None:
        """Make embedding, layers and the final projection."""
        super().__init__()
        self.embedding = nn.Embedding(alphabet, settings.width)
        self.layers = nn.ModuleList(
            Layer(settings.width, settings.heads) for _ in range(settings.layers)
        )
        self.norm = nn.LayerNorm(settings.width)
        self.logits = nn.Linear(settings.width, alphabet)

    def forward(self, inputs: Tensor, targets: Tensor, seen: list[flexhop.BlockMask]) -> Tensor:
        """Sum of cross entropies in nats; layer i sees ``seen[i % 2]``."""
        hidden = self.embedding(inputs)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, seen[number % len(seen)])
        logits = self.logits(self.norm(hidden)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def make_model(alphabet: int, settings: Settings, mesh: DeviceMesh) -> Transformer:
    """The model, its weights divided over the mesh."""
    torch.manual_seed(0)
    model = Transformer(alphabet, settings).to(settings.device)
    for layer in model.layers:
        if settings.compiles:
            layer.compile(fullgraph=True)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def make_masks(batch: Batch, settings: Settings) -> list[flexhop.BlockMask]:
    """Whole speeches, and a window of them; of the whole sequence."""
    whole = masks.packed_causal(batch.speeches.int())
    near = flexhop.and_masks(whole, masks.sliding_window(settings.window))
    return [
        flexhop.create_block_mask(
            mod, None, None, settings.tokens, settings.tokens, device=settings.device,
            BLOCK_SIZE=settings.block,
        )
        for mod in (whole, near)
    ]  # fmt: skip


def train_step(
    model: Transformer, batch: Batch, settings: Settings, mesh: DeviceMesh
) -> tuple[Tensor, sharded.Plan]:
    """Gradients of one batch, and its loss in nats per character."""
    seen = make_masks(batch, settings)
    plan = sharded.make_plan({"speeches": seen[0], "window": seen[1]}, mesh.size())
    # FSDP averages gradients over ranks, those of captured slopes too.
    with sharded.context_parallel(plan, mesh, sum_captured=False, bucket=8) as context:
        inputs = context.shard(batch.inputs[None])
        targets = context.shard(batch.targets[None], fill=-100)
        count = (batch.targets != -100).sum()
        loss = model(inputs, targets, seen) / count
        (loss * mesh.size()).backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh.get_group())
    return total, plan


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint; it counts once its last file is there."""
    weights, moments = get_state_dict(model, optimizer)
    state_dict_saver.save(
        {"model": weights, "optimizer": moments}, checkpoint_id=folder / f"step_{step}"
    )
    if dist.get_rank() == 0:
        (folder / "latest").write_text(str(step))
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Go on from the last checkpoint; the next step, 0 if there is none."""
    if not (folder / "latest").exists():
        return 0
    step = int((folder / "latest").read_text())
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    state_dict_loader.load(state, checkpoint_id=folder / f"step_{step}")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return step + 1


def train(settings: Settings, mesh: DeviceMesh, folder: Path, kill_at: int) -> list[float]:
    """Train from where the folder says; losses of the steps that this attempt made."""
    corpus = load_corpus(TEXT)
    model = make_model(len(corpus.alphabet), settings, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    first, losses, start = load(folder, model, optimizer), [], time.perf_counter()
    for step in range(first, settings.steps):
        if step == kill_at and dist.get_rank() == mesh.size() - 1 and attempt() == 0:
            os.kill(os.getpid(), 9)
        loss, plan = train_step(model, make_batch(corpus, settings, step), settings, mesh)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0 and (step in (first, settings.steps - 1) or step % 5 == 0):
            if step == first:
                print(sharded.explain(plan), flush=True)
            elapsed = time.perf_counter() - start
            print(f"  step {step:4d}  loss {losses[-1]:.3f}  {elapsed:6.1f} s", flush=True)
        if step % 5 == 4:
            save(folder, step, model, optimizer)
    return losses


def attempt() -> int:
    """How many times torchrun has started this run again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def connect(backend: str) -> None:
    """Join the other ranks; the addresses of an attempt that ended are not taken for theirs."""
    store, rank, size = next(rendezvous("env://"))
    own = PrefixStore(f"attempt_{attempt()}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size)


def main(arguments: list[str]) -> int:
    """Train; the exit status says whether the loss fell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--folder", type=Path, help="of checkpoints; by default one of this run")
    parser.add_argument("--kill-rank-at", type=int, default=-1, help="step at which a rank dies")
    options = parser.parse_args(arguments)
    settings = ON_GPU if options.device == "cuda" else ON_CPU
    if options.steps:
        settings = Settings(**(vars(settings) | {"steps": options.steps}))
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    connect("nccl" if options.device == "cuda" else "gloo")
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run") + os.environ["MASTER_PORT"]
    folder = options.folder or Path(tempfile.gettempdir()) / f"long_context_{run}"
    folder.mkdir(parents=True, exist_ok=True)
    mesh = init_device_mesh(options.device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    losses = train(settings, mesh, folder, options.kill_rank_at)
    if dist.get_rank() == 0:
        print(f"Loss: {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last.")
    dist.destroy_process_group()
    return int(not losses[-1] < losses[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
