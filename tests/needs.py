"""Marks of tests that need what not every supported installation has."""

import pytest

from flexhop.compat.kernels import gluon_versions

needs_hopper = pytest.mark.skipif(
    gluon_versions.obstacle() != "", reason=f"no Hopper kernels: {gluon_versions.obstacle()}"
)
