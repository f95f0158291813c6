"""The cost of a layout and a key exchange, in seconds, on the slowest rank.

This is a model, not a measurement: it ranks alternatives. docs/distributed.md lists its
assumptions and compares it with measurements.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from flexhop.distributed.grids import Demand

Method = Literal["gather", "blocks", "stages"]
METHODS: tuple[Method, ...] = ("gather", "blocks", "stages")
# Forward and backward have 2 + 5 matrix products; a multiply-add counts as 2 flops.
_PASSES = 3.5
# Candidate numbers of head groups; the exchange of one overlaps with the computation of the one
# before.
_GROUPS = (1, 2, 4, 8)
_TILE = 128  # queries, and keys, of one tile


class AttentionShape(NamedTuple):
    """Sizes of one layer's attention; the default is that of an 8B model."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    value_dim: int = 128
    batch: int = 1
    itemsize: int = 2

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys and values of one token, over all batches."""
        width = self.head_dim + self.value_dim
        return self.batch * self.kv_heads * width * self.itemsize

    @property
    def query_bytes(self) -> int:
        """Bytes of the queries and results of one token, over all batches."""
        width = self.head_dim + self.value_dim
        return self.batch * self.heads * width * self.itemsize

    @property
    def pair_flops(self) -> int:
        """Operations per pair of query and key, forward, over all heads."""
        return 2 * (self.head_dim + self.value_dim) * self.heads * self.batch


class Machine(NamedTuple):
    """Speeds; the default is nodes of eight H100 or H200, and InfiniBand between nodes.

    flops: attention's operations per second. node: ranks that the fast link connects. fast, slow:
    bytes per second, rank and direction, within a node and between nodes. fast_latency,
    slow_latency: seconds per collective. launch: seconds of one more exchange, with the small
    kernels around it. memory: bytes per second. processors: multiprocessors that share `flops`.
    """

    flops: float = 550e12
    node: int = 8
    fast: float = 360e9
    slow: float = 45e9
    fast_latency: float = 30e-6
    slow_latency: float = 60e-6
    launch: float = 150e-6
    memory: float = 3.5e12
    processors: int = 132


class Cost(NamedTuple):
    """The cost of one mask and layout, for one layer.

    visits: (query, key) pairs in visited blocks, by rank. received: units of keys that each rank
    receives, forward. method, groups: how keys are exchanged, and in how many groups of heads.
    bytes: bytes that the slowest rank receives forward. seconds: forward and backward.
    """

    visits: tuple[float, ...]
    received: tuple[int, ...]
    method: Method
    groups: int
    bytes: int
    seconds: float


class Traffic(NamedTuple):
    """Units of keys that one rank receives, from its own node and from others."""

    fast: int
    slow: int


def find_cost(
    demand: Demand, unit: int, own: tuple[Tensor, ...], heads: int,
    shape: AttentionShape, machine: Machine, methods: tuple[Method, ...] = METHODS,
) -> Cost:  # fmt: skip
    """The cheapest exchange of the keys of one mask.

    Args:
        demand, unit: the mask's demand, and tokens per unit.
        own: units of each group of ranks.
        heads: ranks per group, which split its tokens by heads.
        shape, machine: sizes of attention, and the hardware.
        methods: the methods to choose from.
    """
    work, needs = demand.work, demand.needs
    parts = [work[_existing(units, work)] for units in own]
    sums = [(part.sum(1).double(), part.sum(0).double()) for part in parts]
    visits = tuple(float(rows.sum()) / heads for rows, _ in sums)
    sums = [(rows, columns[columns > 0]) for rows, columns in sums]
    per_head = shape._replace(heads=shape.heads // heads, kv_heads=max(1, shape.kv_heads // heads))
    node = max(1, machine.node // heads)
    wanted = [_traffic(needs, own, rank, node) for rank in range(len(own))]
    everything = [_all_traffic(own, rank, node) for rank in range(len(own))]
    compute = max(visits) * per_head.pair_flops * _PASSES / machine.flops
    tokens = len(own[0]) * unit
    swap = _swap_seconds(tokens // heads, heads, shape, machine)
    found = []
    for method in methods:
        traffic = everything if method == "gather" else wanted
        most = max(traffic, key=lambda t: _move_seconds(t, unit, per_head, machine))
        move = _move_seconds(most, unit, per_head, machine)
        units = tuple(t.fast + t.slow for t in traffic)
        size = max(units) * unit * per_head.key_bytes
        for groups in _groups(method, per_head, move):
            copied = 6 * (tokens * per_head.key_bytes + size) / machine.memory
            calls = 2 if method == "stages" and move else groups
            ends = max(_end_seconds(*each, unit, groups, per_head, machine) for each in sums)
            seconds = _seconds(method, groups, compute, move, tokens, per_head, machine)
            seconds += copied + calls * ends
            found.append(Cost(visits, units, method, groups, size, seconds + swap))
    return min(found, key=lambda cost: (cost.seconds, METHODS.index(cost.method)))


def _end_seconds(
    rows: Tensor, columns: Tensor, unit: int, groups: int, shape: AttentionShape, machine: Machine
) -> float:
    """Seconds at the ends of a call's two kernels, when multiprocessors run out of tiles.

    One more call means one more such end, which is long if the last tiles are: half of the time of
    a tile, on average, that runs when the first multiprocessor finds none.

    Args:
        rows, columns: pairs of each unit of a rank's queries, and of each unit of their keys.
        unit: tokens of a unit; tiles have 128.
        groups: in how many groups of heads the exchange is.
    """
    key_heads = max(1, shape.batch * shape.kv_heads // groups)
    last = -(-machine.processors * _TILE // (key_heads * unit))  # units that run at the end
    # Kernels begin with the last queries and with the first keys: most work if causal.
    sharers = shape.heads / shape.kv_heads  # of a tile of keys
    pairs = _mean_rest(rows[:last]) + (_PASSES - 1) * sharers * _mean_rest(columns[-last:])
    flops = shape.pair_flops / (shape.heads * shape.batch) * pairs * _TILE / unit
    return flops * machine.processors / machine.flops


def _mean_rest(lengths: Tensor) -> float:
    """Mean time until a task ends, seen from a random moment: longer ones are met more often."""
    total = float(lengths.sum())
    return float((lengths**2).sum()) / (2 * total) if total else 0.0


def _existing(units: Tensor, work: Tensor) -> Tensor:
    return units[units < work.size(0)]


def _traffic(needs: Tensor, own: tuple[Tensor, ...], rank: int, node: int) -> Traffic:
    wanted = needs[_existing(own[rank], needs)].any(0)
    amounts = [0, 0]
    for owner, units in enumerate(own):
        if owner != rank:
            amounts[owner // node != rank // node] += int(wanted[_existing(units, needs)].sum())
    return Traffic(*amounts)


def _all_traffic(own: tuple[Tensor, ...], rank: int, node: int) -> Traffic:
    """Traffic of an all-gather; between nodes, the ranks of a node share what arrives."""
    near = sum(other // node == rank // node for other in range(len(own))) - 1
    far = len(own) - 1 - near
    each = len(own[0])
    return Traffic((near + far) * each, -(-far * each // node))


def _move_seconds(traffic: Traffic, unit: int, shape: AttentionShape, machine: Machine) -> float:
    """Seconds of one exchange of all heads; 0 if nothing is sent."""
    if not traffic.fast + traffic.slow:
        return 0.0
    size = unit * shape.key_bytes
    latency = machine.slow_latency if traffic.slow else machine.fast_latency
    moving = max(traffic.fast * size / machine.fast, traffic.slow * size / machine.slow)
    return latency + moving


def _groups(method: Method, shape: AttentionShape, move: float) -> tuple[int, ...]:
    """Candidate numbers of head groups for the exchange."""
    if method == "stages" or not move:
        return (1,)
    return tuple(n for n in _GROUPS if shape.kv_heads % n == 0)


def _seconds(
    method: Method, groups: int, compute: float, move: float, tokens: int,
    shape: AttentionShape, machine: Machine,
) -> float:  # fmt: skip
    """Seconds forward and backward; key gradients travel back the same way."""
    forward, backward = compute / _PASSES, compute * (1 - 1 / _PASSES)
    if not move:
        return compute
    if method == "stages":
        # Keys travel while attention runs on the rank's own ones: at most that time is hidden.
        merge = 6 * tokens * shape.query_bytes / machine.memory + 2 * machine.launch
        return max(forward, move) + max(backward, move) + merge
    each = move / groups
    overlapped = each + (groups - 1) * max(forward / groups, each) + forward / groups
    returned = backward / groups + (groups - 1) * max(backward / groups, each) + each
    return overlapped + returned + groups * machine.launch


def _swap_seconds(tokens: int, heads: int, shape: AttentionShape, machine: Machine) -> float:
    """Seconds to swap tokens for heads and back, forward and backward."""
    if heads == 1:
        return 0.0
    size = tokens * (shape.query_bytes + shape.key_bytes) * (1 - 1 / heads)
    is_near = heads <= machine.node
    link = machine.fast if is_near else machine.slow
    return 2 * size / link + 4 * (machine.fast_latency if is_near else machine.slow_latency)


def imbalance(cost: Cost) -> float:
    """Work of the slowest rank divided by the mean; 1 is perfect."""
    mean = sum(cost.visits) / len(cost.visits)
    return max(cost.visits) / mean if mean else 1.0
