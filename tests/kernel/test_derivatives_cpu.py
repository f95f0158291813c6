"""Derivatives that Inductor compiles for the CPU, with loops over queries, against dense ones."""

import pytest
import torch

from flexhop import flex_attention
from flexhop.lowering import chunked
from tests.unit.ops.support import quiet
from tests.unit.ops.test_derivatives import DERIVATIVES, dense, flexible, inputs

pytestmark = [
    quiet,
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    # Inductor's own lowering of the diagonal of a basis.
    pytest.mark.filterwarnings("ignore:.*_prims_common.check.*:FutureWarning"),
]


# A hessian adds to rows of a table; the gradient of a tangent has rows and sums.
@pytest.mark.parametrize(("name", "chunk"), [("hessian", 1 << 18), ("grad of jvp", 1)])
def test_compiled_derivatives(name, chunk, monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(chunked, "LEAST_ROWS", 4)
    derivative = DERIVATIVES[name]
    found = torch.compile(derivative(flexible), fullgraph=True)(*inputs())
    torch.testing.assert_close(found, derivative(dense)(*inputs()), rtol=1e-9, atol=1e-9)


def test_a_tangent_of_one_operand_alone():
    """PyTorch's zero tangents of the others have no memory: compiled code read address 0."""
    query, key, value, along = (torch.randn(1, 1, 16, 8, dtype=torch.float64) for _ in range(4))

    def loss(key, along):
        def attend(key):
            return flex_attention(query, key, value, lambda s, b, h, q, k: s + 0.1 * (q - k))

        return sum(t.sin().sum() for t in torch.func.jvp(attend, (key,), (along,)))

    gradient = torch.func.grad(loss, argnums=(0, 1))
    found = torch.compile(gradient, fullgraph=True)(key, along)
    torch.testing.assert_close(found, gradient(key, along))
