"""Small learned networks in a score_mod, as in FIRE's and DAPE's biases: an output per head."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flexhop
from flexhop.compat.operators.hop import isolated_trace
from flexhop.lowering.mods.loops import with_loops
from flexhop.offline import generate_code
from flexhop.ops.args import unpack_sites
from flexhop.ops.graphs.subgraphs import trace_joint
from tests.learned import check_kernels

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
HEADS, LENGTH = 2, 18


def learned(*sizes):
    return (torch.randn(sizes) * 0.5).requires_grad_()


def fire():
    """By hand, with a learned normaliser by query; nothing is a function of the distance."""
    w1, b1, w2, b2, c = learned(20), learned(20), learned(HEADS, 20), learned(HEADS), learned()

    def mod(score, b, h, q_idx, kv_idx):
        scale = c.abs() + 0.1
        x = torch.log(scale * (q_idx - kv_idx).abs() + 1) / torch.log(scale * (q_idx + 9) + 1)
        return score + (w2 @ F.relu(w1 * x + b1) + b2)[h]

    return mod, [w1, b1, w2, b2, c]


def dape():
    """Of a score and its bias."""
    network = nn.Sequential(nn.Linear(2, 18), nn.LeakyReLU(), nn.Linear(18, HEADS))
    slopes = learned(HEADS)

    def mod(score, b, h, q_idx, kv_idx):
        bias = slopes[h] * (q_idx - kv_idx).abs()
        return score + bias + network(torch.stack([score, bias]))[h]

    return mod, [*network.parameters(), slopes]


def points():
    """Of places in space, by query and by key; the rows of weights are long by two dimensions."""
    w, b, low = learned(HEADS, 3, 6), learned(6), learned(LENGTH, 24)
    places = torch.randn(LENGTH, 3)

    def mod(score, batch, h, q_idx, kv_idx):
        x = (places[q_idx] - places[kv_idx]) @ w[h] + b
        return score + torch.tanh(x).sum() + (low[q_idx] * low[kv_idx]).sum() / 24

    return mod, [w, b, low]


@pytest.mark.parametrize("make", [fire, dape, points])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_network_learns_in_kernels(make, deterministic, monkeypatch):
    monkeypatch.setenv("FLEXHOP_STRICT", "1")
    torch.manual_seed(3)
    mod, weights = make()
    tensors = [torch.randn(1, HEADS, LENGTH, 16).requires_grad_() for _ in range(3)]
    options = flexhop.KernelOptions(backend="triton", deterministic=deterministic)
    check_kernels(tensors, weights, mod, options)


def test_kernels_have_one_loop_for_each_row_of_weights(monkeypatch):
    """Written out, the gradients of 97 weights were 4000 lines, which took 70 s to compile."""
    monkeypatch.setenv("FLEXHOP_STRICT", "1")
    w1, b1, w2, b2 = learned(32), learned(32), learned(4, 32), learned(4)

    def mod(score, b, h, q_idx, kv_idx):
        x = torch.log1p((q_idx - kv_idx).abs() * 0.1) / torch.log1p(q_idx * 0.1 + 1)
        return score + (w2 @ F.relu(w1 * x + b1) + b2)[h]

    shape = (1, 4, 256, 64)
    tensors = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    code = generate_code(lambda q, k, v: flexhop.flex_attention(q, k, v, mod), *tensors, grad=True)
    sums = code.kernel_with("grad_query_blocks").function_text("scatter_captured_grads")
    assert sums.count("for element in tl.range(0, 32):") == 3
    assert sums.count("tl.atomic_add") == 3  # b2 is added to all scores of a row: it cancels
    assert len(sums.splitlines()) < 300


def test_elements_of_a_row_are_functions_of_their_number():
    """The functions of a loop yield what the functions of its sites do."""
    torch.manual_seed(4)
    query, weights = torch.randn(1, 2, 4, 8), torch.randn(2, 3, 7, requires_grad=True)

    def mod(score, b, h, q_idx, kv_idx, weights):
        row = torch.ops.aten.index.Tensor(weights, [h])
        return score + ((row * score).sin().sum(0) ** 2).sum()

    joint = trace_joint(mod, query, (weights,))
    graph, sites = joint.joint, unpack_sites(joint.sites)
    with isolated_trace(query, weights):
        looped, loops = with_loops(graph, sites)
    (loop,) = loops
    assert (loop.first, loop.sites) == (0, 21)
    inputs = [torch.tensor(0.4), *torch.tensor([0, 1, 2, 3]).int(), torch.tensor(0.7), weights]
    wanted = graph(*inputs)
    for number, site in enumerate(sites):
        found = looped(*inputs, torch.tensor(number, dtype=torch.int32))
        torch.testing.assert_close(found[loop.value], wanted[site.value])
        pairs = zip(loop.indices, site.indices, strict=True)
        assert all(found[mine] == wanted[its] for mine, its in pairs)
