"""The shipped measurements with their predictions, once for all tests."""

from __future__ import annotations

import pytest

from accuracy.files import shipped
from accuracy.published import measured
from shardwise.measured import Validation


@pytest.fixture(scope="session")
def release() -> Validation:
    """Return the shipped measurements with their predictions."""
    return measured(shipped())
