"""Settings of the kernel tests."""

import pytest
import torch._inductor.config as inductor_config


@pytest.fixture(autouse=True)
def padded_strides():
    """Pad every stride that Inductor may choose; by default, only those above 1024."""
    with inductor_config.patch(padding_stride_threshold=0):
        yield
