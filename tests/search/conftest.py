"""What modules ask that search one space again and again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardwise.search._recordings import VARIABLE


@pytest.fixture(scope="module")
def kept_recordings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Formulas of a space that is searched for one objective after the other are recorded once, as users have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("recordings")))
        yield
