"""How often laws are tried: the same examples in every run, or more of them under a seed.

`python -m pytest tests/laws tests/serving --laws-times 100 --hypothesis-seed 7` tries a hundred times as many.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take how many times as many examples of each law are tried."""
    parser.addoption("--laws-times", type=int, default=1, help="so many times as many examples of each law")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let every law try more examples, other ones under each seed."""
    times = config.getoption("--laws-times")
    for item in items if times > 1 else ():
        law = getattr(item, "obj", None)
        own = getattr(law, "_hypothesis_internal_use_settings", None)
        if own is not None:
            more = settings(own, max_examples=own.max_examples * times, derandomize=False)
            law._hypothesis_internal_use_settings = more  # type: ignore[union-attr]
