"""Marks of tests that need what not every supported installation has."""

import pytest

from flexhop.lowering.hopper import versions

needs_hopper = pytest.mark.skipif(
    versions.obstacle() != "", reason=f"no Hopper kernels: {versions.obstacle()}"
)
