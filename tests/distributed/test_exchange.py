"""What is sent: units of keys and values, side by side."""

import pytest
import torch

from flexhop.distributed.exchange import _pack, _units
from flexhop.distributed.routes import NOWHERE

UNIT = 16


@pytest.mark.parametrize("widths", [(16, 8), (8, 6), (4, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["plain", "transposed", "odd offset", "unfinished unit"])
def test_packed_units(widths, dtype, form):
    length = 61 if form == "unfinished unit" else 64
    shift = int(form == "odd offset")

    def draw(width):
        found = torch.randn(2, 3, length, width + shift).to(dtype)[..., shift:]
        return (
            found.transpose(1, 2).contiguous().transpose(1, 2) if form == "transposed" else found
        )

    key, value = map(draw, widths)
    places = torch.tensor([2, 0, NOWHERE, 3])
    expected = torch.cat((_units(key, UNIT), _units(value, UNIT)), -1)[places.clamp(min=0)]
    expected[2] = 0
    found = _pack(key, value, places, UNIT)
    assert found.dtype == dtype and found.is_contiguous()
    assert torch.equal(found, expected)
