"""User functions where a GPU has other rules than a CPU, on machines without one."""

import pytest
import torch
import torch.nn.functional as F

from flexhop.compat.mods.indexing import IndexMode
from flexhop.ops.eager import over_elements
from tests.fuzz.devices import evaluate_mods, imagined
from tests.fuzz.masks import MASKS
from tests.fuzz.plan import Plan
from tests.fuzz.problem import make_problem
from tests.fuzz.scores import SCORES


def test_every_function_of_the_vocabulary():
    for name in SCORES:
        evaluate_mods(make_problem(Plan(scores=(name,)), 0))
    for name in MASKS:
        evaluate_mods(make_problem(Plan(masks=(name,)), 0))


def test_log_sigmoid_and_its_gradient_in_graphs_of_mods():
    def both(score, b, h, q, k, grad):
        result, buffer = torch.ops.aten.log_sigmoid_forward.default(score)
        return result, torch.ops.aten.log_sigmoid_backward.default(grad, score, buffer)

    with imagined():
        scores = torch.empty(2, 3, 5, 7, device="cuda")
        index = tuple(torch.arange(n, device="cuda", dtype=torch.int32) for n in scores.shape)
        found = over_elements(both, 1, (scores, scores), index, ())
    assert [t.shape for t in found] == [scores.shape] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_sigmoid_of_elements_is_exact(dtype):
    x = torch.tensor(
        [-800, -90, -39.9, -25, -3, -1e-9, 0, 1e-9, 2, 25, 39.9, 90, 800], dtype=dtype
    )
    first, second = (x.clone().requires_grad_() for _ in range(2))
    with IndexMode():
        found = torch.vmap(torch.vmap(F.logsigmoid))(first.view(1, -1))[0]
    expected = F.logsigmoid(second)
    torch.testing.assert_close(found, expected)
    slopes = [
        torch.autograd.grad(y.sum(), v, create_graph=True)[0]
        for y, v in ((found, first), (expected, second))
    ]
    torch.testing.assert_close(*slopes)
    bends = [
        torch.autograd.grad(g.sum(), v)[0] for g, v in zip(slopes, (first, second), strict=True)
    ]
    torch.testing.assert_close(*bends)
