"""Derivatives that Inductor compiles for the CPU, with loops over queries, against dense ones."""

import pytest
import torch

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
