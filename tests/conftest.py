"""How often laws are tried: the same examples in every run, or more of them under a seed.

`python -m pytest tests/laws tests/serving --laws-times 100 --hypothesis-seed 7` tries a hundred times as many.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

# No answer of a test rests on what an earlier run kept, and none is written to the user's folders.
os.environ["SHARDWISE_CACHE"] = "off"
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.load_profile("same")
# Hypothesis also draws constants that stand in the modules loaded so far, so that a law's examples would depend on
# the tests that ran before it in the same process: a law could fail in one order and pass in another.
providers._get_local_constants = lambda: providers._local_constants


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
