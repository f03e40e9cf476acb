"""The shipped measurements with their predictions, once for all tests."""

from __future__ import annotations

import pytest

from accuracy.published import released
from shardwise.measured import Validation


@pytest.fixture(scope="session")
def release() -> Validation:
    """Return the shipped measurements with their predictions."""
    return released()
