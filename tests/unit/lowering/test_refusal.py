"""What a lowering refuses is raised by the compiled graph, as our class and not as Inductor's."""

import pytest
import torch

from flexhop import AuxRequest, errors, flex_attention
from flexhop.lowering import cpu

ERROR = errors.OptionConflictError(first="one", second="another", reason="they differ")


def refuse(*operands):
    raise ERROR


@pytest.fixture(autouse=True)
def _without_caches():
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


def call(query, key, value):
    out, aux = flex_attention(query, key, value, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def operands(needs_grad=False):
    return [torch.randn(1, 2, 40, 8, requires_grad=needs_grad) for _ in range(3)]


@pytest.mark.parametrize("wanted", [0, 1])
def test_in_the_forward_pass(monkeypatch, wanted):
    monkeypatch.setattr(cpu, "lower_attention", refuse)
    compiled = torch.compile(lambda *tensors: call(*tensors)[wanted], fullgraph=True)
    for _ in range(2):  # the second call finds the compiled graph
        with pytest.raises(errors.OptionConflictError) as caught:
            compiled(*operands())
        assert str(caught.value) == str(ERROR)
        assert caught.value.facts == ERROR.facts


def test_in_the_backward_pass(monkeypatch):
    monkeypatch.setattr(cpu, "lower_attention_backward", refuse)
    tensors = operands(needs_grad=True)
    out, _ = torch.compile(call, fullgraph=True)(*tensors)
    with pytest.raises(errors.OptionConflictError, match="they differ"):
        out.sum().backward()


def test_ahead_of_time_it_is_raised_while_compiling(monkeypatch):
    """There will be no Python to raise it."""
    monkeypatch.setattr(cpu, "lower_attention", refuse)
    exported = torch.export.export(_Module(), tuple(operands()))
    with pytest.raises(Exception, match=r"OptionConflictError: .*they differ"):
        torch._inductor.aoti_compile_and_package(exported)


class _Module(torch.nn.Module):
    def forward(self, query, key, value):
        return call(query, key, value)[0]


@torch.library.custom_op("flexhop_tests::doubled", mutates_args=())
def doubled(score: torch.Tensor) -> torch.Tensor:
    return score * 2


doubled.register_fake(torch.empty_like)


def test_an_operator_that_can_only_be_traced_once_per_score():
    """Its graph would have a node for each score: compilation did not end."""

    def attend(*tensors):
        return flex_attention(*tensors, lambda score, b, h, q, k: doubled(score))

    with pytest.raises(errors.ModLoweringError, match=r"flexhop_tests\.doubled at .*test_refusal"):
        torch.compile(attend, fullgraph=True)(*operands())
