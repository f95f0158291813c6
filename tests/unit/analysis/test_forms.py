"""Forms, coordinates, growth and stretches: one answer for all spellings of a mod."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from flexhop.analysis import Forms, analyse, find_span, trace
from flexhop.compat.mods.indexing import IndexMode
from tests.spellings import DISTANCES, LENGTH, WIDTH, WINDOWS

CPU = torch.device("cpu")
TABLE = torch.arange(2.0 * (2 * LENGTH - 1)).view(2, -1)


def forms_of(mask, batch=1, heads=1):
    sizes = {"b": batch, "h": heads, "q": LENGTH, "k": LENGTH}
    return Forms(trace(mask, CPU), sizes)


@pytest.mark.parametrize("mask", WINDOWS.values(), ids=WINDOWS)
def test_spellings_of_a_window(mask):
    span = find_span(forms_of(mask), CPU)
    q = torch.arange(LENGTH)
    assert torch.equal(span.end[0, 0], q + 1)
    assert torch.equal(span.first[0, 0], (q - WIDTH + 1).clamp(min=0))


def graph_of(score_mod):
    scalars = [torch.zeros((), dtype=torch.float32)]
    scalars += [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    with IndexMode(), torch.no_grad():
        return make_fx(score_mod, tracing_mode="fake", _allow_non_fake_inputs=True)(*scalars)


@pytest.mark.parametrize("distance", DISTANCES.values(), ids=DISTANCES)
def test_spellings_of_a_distance(distance):
    graph = graph_of(lambda s, b, h, q, k: s + TABLE[h, distance(q, k)])
    sizes = {"b": 2, "h": 2, "q": LENGTH, "k": LENGTH}
    found = analyse(graph, ("score", "b", "h", "q", "k"), sizes)
    (read,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor)
    index = read.args[1][-1]
    facts = found[index]
    q, k = found.mod.inputs["q"], found.mod.inputs["k"]
    assert facts.form.terms == {q: 1, k: -1} and facts.form.offset == LENGTH - 1
    assert (facts.low, facts.high) == (0, 2 * LENGTH - 2)
    (coordinate,) = facts.seen.coordinates
    assert coordinate.terms == ((q, 1), (k, -1)) and coordinate.size == 2 * LENGTH - 1
    assert found[read].depends == {"h", "q", "k"}
    assert found[read].seen.coordinates == {coordinate} and found[read].seen.others == {"h"}


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (lambda b, h, q, k: q * 2000003 < k * 1999993, False),  # wraps around
        (lambda b, h, q, k: (q >= k) | (q - k > 90), True),
        (lambda b, h, q, k: (q - k > 90) | (k > q), False),  # two stretches
        (lambda b, h, q, k: TABLE[0, q] >= TABLE[0, k], False),  # nobody looks at tables
        (lambda b, h, q, k: q // 16 >= k // 16, True),
        (lambda b, h, q, k: torch.where(h == 0, q >= k, (q - k).abs() < 9), True),
        (lambda b, h, q, k: k < q.to(torch.int8), True),
        (lambda b, h, q, k: q.to(torch.int8) + 1 > k, True),
        (lambda b, h, q, k: q > k.to(torch.int8), False),  # falls where it wraps around
    ],
)
def test_stretches_are_proven_or_not_claimed(mask, expected):
    from flexhop import create_mask

    length = 40_000 if "2000003" in str(mask.__code__.co_consts) else LENGTH
    sizes = {"b": 1, "h": 2, "q": length, "k": length}
    span = find_span(Forms(trace(mask, CPU), sizes), CPU)
    assert (span is not None) == expected
    if span is not None:
        k = torch.arange(LENGTH)
        found = (k >= span.first[..., None]) & (k < span.end[..., None])
        keep = create_mask(mask, 1, 2, LENGTH, LENGTH, "cpu")
        assert torch.equal(found.expand_as(keep), keep)


def test_coordinates_of_images():
    """A bias by rows and columns of an image is one integer of both positions."""
    side = 8

    def mask(b, h, q, k):
        down, right = q // side - k // side, q % side - k % side
        return TABLE[h, down * (2 * side - 1) + right + 112] > 3

    forms = forms_of(mask, heads=2)
    (coordinate,) = forms.seen(forms.mod.result).coordinates
    assert forms.seen(forms.mod.result).others == {"h"}
    assert coordinate.size == (2 * (LENGTH // side) - 1) * (2 * side - 1)


def test_growth():
    forms = forms_of(lambda b, h, q, k: (k // 3 - (-k).clamp(max=5) >= q) & (TABLE[0, k] > 0))
    by_name = {str(node.target): node for node in forms.mod.operators}
    assert forms.grows(by_name["aten.sub.Tensor"], "k") == 1
    assert forms.grows(by_name["aten.neg.default"], "k") == -1
    assert forms.grows(by_name["aten.index.Tensor"], "k") is None
    assert forms.grows(by_name["aten.sub.Tensor"], "q") == 0
