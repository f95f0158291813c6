"""One job of ``benchmarks.mesh`` on one rank: a mask, a length, and whose attention.

Every rank has such a process. They compile, check results, wait for their turn, and measure.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import experimental
from torch.nn.attention import flex_attention as intree

import flexhop
import flexhop.distributed as sharded
from benchmarks.cases import document_ids
from benchmarks.mesh import Job
from benchmarks.mesh_profile import profiled, steady
from benchmarks.turns import answer, wait_for_turn
from flexhop import masks
from flexhop.distributed.exchange import RECEIVED

WINDOW, DOCUMENT_MEAN = 4096, 8192
SAMPLED = 16  # queries whose output is compared with the definition
# What timing one case may take, and its profile.
ROW_SECONDS = 4.0

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def make_mask_mod(job: Job, device: torch.device) -> Any:
    """The mask of a job."""
    if job.mask == "causal":
        return masks.causal
    if job.mask == "window":
        return masks.sliding_window(WINDOW // job.shrunk)
    return masks.packed_causal(document_ids(job.length, device, DOCUMENT_MEAN // job.shrunk))


def make_shape(job: Job) -> sharded.AttentionShape:
    """Sizes of a layer."""
    on_gpu = job.device == "cuda"
    return sharded.AttentionShape() if on_gpu else sharded.AttentionShape(4, 2, 16, 16)


class Worker:
    """One rank of a job."""

    def __init__(self, job: Job) -> None:
        """Join the other ranks; make the mask and the plan."""
        self.job = job
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device(job.device)
        if job.device == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
            torch.cuda.set_device(self.device)
        self.host = Host(f"{job.who}/{job.name}", self.rank, self.ranks)
        dist.init_process_group(
            "nccl" if job.device == "cuda" else "gloo", store=self.host.store, rank=self.rank,
            world_size=self.ranks,
        )  # fmt: skip
        self.mask_mod, length = make_mask_mod(job, self.device), job.length
        self.block = 128 if job.device == "cuda" else 16
        self.mask = flexhop.create_block_mask(
            self.mask_mod, None, None, length, length, self.device, BLOCK_SIZE=self.block
        )
        self.plan = sharded.make_plan(self.mask, self.ranks, shape=make_shape(job))
        self.positions = self.plan.positions(self.rank).to(self.device)
        self.mesh = init_device_mesh(job.device, (self.ranks,), mesh_dim_names=("cp",))
        self.group = self.mesh.get_group().group_name
        self.calls: dict[str, Attend] = {}  # compiled code
        cost = self.plan.masks[""].cost
        self.results: dict[str, Any] = {
            "rank": self.rank, "planned": cost.bytes, "words": sharded.explain(self.plan, 32),
            "machine": f"{describe(self.device)}; {self.ranks} ranks; torch {torch.__version__}",
        }  # fmt: skip

    # What is measured.

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compiled on a GPU; the trial on a CPU is eager."""
        if self.job.device == "cpu":
            return function
        return torch.compile(function, fullgraph=True, dynamic=False)

    @contextlib.contextmanager
    def attention(self, where: str) -> Generator[Attend, None, None]:
        """Attention on one rank's whole sequence ("one"), or on its part of it ("mesh")."""
        if self.job.who == "in-tree":
            yield self.intree()
            return
        mask = self.mask

        def attend(query: Any, key: Any, value: Any) -> Any:
            return flexhop.flex_attention(query, key, value, block_mask=mask, enable_gqa=True)

        call = self.compiled(attend)
        if where == "one":
            yield call
            return
        with sharded.context_parallel(self.plan, self.mesh):
            yield call

    def intree(self) -> Attend:
        """PyTorch's exchange for FlexAttention, on the same parts of the sequence.

        As its context parallelism does: all keys are gathered, and the mask reads positions from
        a table unless they are consecutive.
        """
        order = torch.cat([self.plan.positions(rank) for rank in range(self.ranks)])
        table, first = order.to(self.device), int(self.positions[0])
        is_run = self.plan.layout == "contiguous"
        offset = self.rank * self.plan.tokens

        def local(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            if is_run:
                return self.mask_mod(b, h, q_idx + first, kv_idx)
            return self.mask_mod(b, h, table[q_idx + offset], table[kv_idx])

        # PyTorch's own creation of a mask needs a compilation at these lengths.
        sizes = (self.plan.tokens, len(order))
        made = flexhop.create_block_mask(
            local, None, None, *sizes, self.device, BLOCK_SIZE=self.block
        )
        mask = intree.BlockMask.from_kv_blocks(
            made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices,
            BLOCK_SIZE=self.block, mask_mod=local, seq_lengths=sizes,
        )  # fmt: skip
        assert experimental.context_parallel  # its module registers this operator
        group, gather = self.group, torch.ops.cplib.flex_cp_allgather

        def attend(query: Any, key: Any, value: Any) -> Any:
            keys, values = gather(key, value, 2, group)
            return intree.flex_attention(query, keys, values, block_mask=mask, enable_gqa=True)

        return self.compiled(attend)

    def operands(self, where: str, layer: int) -> list[torch.Tensor]:
        """Query, key and value of a layer, which are leaves, and a gradient of the output."""
        shape, length = make_shape(self.job), self.job.length
        torch.manual_seed(layer)
        found: list[torch.Tensor] = []
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads):
            size = (1, heads, length, shape.head_dim)
            whole = torch.randn(size, device=self.device, dtype=torch.bfloat16)
            found.append(whole if where == "one" else self.plan.shard(whole, 2, self.rank))
        return [*(t.requires_grad_() for t in found[:3]), found[3]]

    # Steps of the job.

    def prepare(self) -> None:
        """Compile both passes, and check their results."""
        started = time.perf_counter()
        mesh = self.once("mesh")
        seconds = [time.perf_counter() - started]
        self.check_rows(mesh[0], self.positions, "mesh")
        if self.job.who == "flexhop":
            one = self.once("one")
            seconds.append(time.perf_counter() - started - seconds[0])
            self.check_rows(one[0], torch.arange(self.job.length, device=self.device), "one")
            self.compare(mesh, one)
            del one
        self.results["compiled"] = seconds
        del mesh
        if self.job.device == "cuda":
            torch.cuda.empty_cache()
        self.host.gather()

    def once(self, where: str) -> list[torch.Tensor]:
        """Output and gradients of one layer."""
        *leaves, grad = self.operands(where, 0)
        with self.attention(where) as attend:
            self.calls[where] = attend
            out = attend(*leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def check_rows(self, out: torch.Tensor, positions: torch.Tensor, where: str) -> None:
        """Compare the output of some queries with its definition in float64."""
        generator = torch.Generator().manual_seed(7)
        rows = torch.randperm(out.size(2), generator=generator)[:SAMPLED].to(self.device)
        rows = rows[positions[rows] < self.job.length]
        query, key, value, _ = (t.detach() for t in self.operands("one", 0))
        place = positions[rows]
        keys = torch.arange(self.job.length, device=self.device)
        zero = place.new_zeros(())
        keep = self.mask_mod(zero, zero, place[:, None], keys)
        largest = 0.0
        for head in range(query.size(1)):
            shared = head // (query.size(1) // key.size(1))
            scores = query[0, head, place].double() @ key[0, shared].double().mT
            scores = scores / query.size(3) ** 0.5
            weights = torch.softmax(scores.masked_fill(~keep, -torch.inf), -1)
            exact = weights @ value[0, shared].double()
            error = (out[0, head, rows].double() - exact).norm() / exact.norm()
            largest = max(largest, float(error))
        self.judge(f"{where}: output", largest, out.dtype)

    def compare(self, mesh: list[torch.Tensor], one: list[torch.Tensor]) -> None:
        """Compare all results of a layer with those of one process."""
        names = ("out", "dq", "dk", "dv")
        for name, part, whole in zip(names, mesh, one, strict=True):
            right = self.plan.shard(whole, 2, self.rank).double()
            error = float((part.double() - right).norm() / right.norm())
            self.judge(f"{name} against one process", error, part.dtype)

    def judge(self, what: str, error: float, dtype: torch.dtype) -> None:
        """Two roundings of equal numbers differ by at most eps of them."""
        self.results.setdefault("errors", {})[what] = error
        if not error <= torch.finfo(dtype).eps:
            raise AssertionError(f"{self.job.name}, rank {self.rank}, {what}: error {error:.3g}")

    def measure(self) -> None:
        """Time and profile; answer after each step, in case that the next one is not reached."""
        for where in ("mesh", "one") if self.job.who == "flexhop" else ("mesh",):
            if not self.agreed(time.time() < self.job.until):
                break
            self.measure_one(where)
            answer({"ranks": self.host.gather(self.results)})

    def measure_one(self, where: str) -> None:
        """A row of layers: time, bytes, and where the time goes."""
        layers = [self.operands(where, layer) for layer in range(self.job.layers)]
        leaves = [t for layer in layers for t in layer[:3]]
        grads = [layer[3] for layer in layers]
        attend = self.calls[where]

        def row() -> None:
            outs = [attend(*layer[:3]) for layer in layers]
            torch.autograd.grad(outs, leaves, grads)

        with self.context(where):
            RECEIVED.clear()
            row()
            moved = dict(RECEIVED)
            found = steady(row, self.job.rounds, ROW_SECONDS, self.device, self.agreed)
            found |= {"moved": {name: count / len(layers) for name, count in moved.items()}}
            if self.device.type == "cuda":
                path = f"{self.job.who}-{self.job.name}-{where}-{self.rank}.json"
                trace = Path(self.job.trace) / path if self.job.trace else None
                found |= profiled(row, len(layers), trace)
        for name in ("row", "host"):
            found[name] = found[name] / len(layers)
        self.results[where] = found

    def context(self, where: str) -> Any:
        """The context of the layers."""
        if where == "one" or self.job.who == "in-tree":
            return contextlib.nullcontext()
        return sharded.context_parallel(self.plan, self.mesh)

    def agreed(self, value: Any) -> Any:
        """The first rank's value, on all ranks."""
        return self.host.gather(value)[0]


class Host:
    """Words between the ranks of a job, through torchrun's store."""

    def __init__(self, name: str, rank: int, ranks: int) -> None:
        """Connect to the store."""
        port = int(os.environ["MASTER_PORT"])
        # Public names, which PyTorch does not list.
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            os.environ["MASTER_ADDR"], port, is_master=False
        )
        self.store = dist.PrefixStore(  # pyright: ignore[reportPrivateImportUsage]
            f"flexhop/{name}", store
        )
        self.rank, self.ranks = rank, ranks
        self.turn = 0

    def gather(self, value: Any = None) -> list[Any]:
        """The values of all ranks, which wait for each other."""
        self.turn += 1
        self.store.set(f"{self.turn}/{self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"{self.turn}/{rank}")) for rank in range(self.ranks)]


def describe(device: torch.device) -> str:
    """The machine, for the head of the table."""
    on_gpu = device.type == "cuda"
    return torch.cuda.get_device_name() if on_gpu else "CPU, tiny shapes: not a measurement"


def main(request: str) -> None:
    """Prepare a job, wait, measure."""
    job = Job(**json.loads(request))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "triton")
        worker = Worker(job)
        worker.prepare()
        wait_for_turn()
        worker.measure()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
