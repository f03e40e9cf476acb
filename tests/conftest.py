"""How often laws are tried: the same examples in every run, or more of them under a seed.

`python -m pytest tests/laws tests/serving --laws-times 100 --hypothesis-seed 7` tries a hundred times as many.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

# Objects made between two looks for dead cycles. Records of a prediction and items of a collection live long: to look
# at them every 700 objects takes a tenth of a run. A command line has as large a number of its own (shardwise.cli).
gc.set_threshold(100_000, *gc.get_threshold()[1:])
# No answer of a test rests on what an earlier run kept, and none is written to the user's folders.
os.environ["SHARDWISE_CACHE"] = "off"
# Where Python is told to keep no compiled module, every process that a test starts would compile all of them anew: they
# are kept for the run, in a folder that ends with it.
_COMPILED = tempfile.mkdtemp(prefix="shardwise-") if os.environ.pop("PYTHONDONTWRITEBYTECODE", "") else ""
if _COMPILED:
    os.environ["PYTHONPYCACHEPREFIX"] = _COMPILED
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.load_profile("same")
# Hypothesis also draws constants that stand in the modules loaded so far, so that a law's examples would depend on
# the tests that ran before it in the same process: a law could fail in one order and pass in another.
providers._get_local_constants = lambda: providers._local_constants
# Where Hypothesis keeps the settings of a law.
_SETTINGS = "_hypothesis_internal_use_settings"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take how many times as many examples of each law are tried, and whether every row is predicted."""
    parser.addoption("--laws-times", type=int, default=1, help="so many times as many examples of each law")
    parser.addoption("--every-row", action="store_true", help="predict every published row too, which takes minutes")


def pytest_configure(config: pytest.Config) -> None:
    """Register what tests are marked with."""
    config.addinivalue_line("markers", "every_row: predicts whole tables of published runs, for --every-row alone")


def pytest_unconfigure() -> None:
    """Drop what was compiled for the run, in the process that began it."""
    if _COMPILED:
        shutil.rmtree(_COMPILED, ignore_errors=True)


def pytest_collection_finish() -> None:
    """Let no collection of garbage walk through the tests themselves and what they imported."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what predicts every row; let every law try more examples, other ones under each seed."""
    if not config.getoption("--every-row"):
        items[:] = [item for item in items if item.get_closest_marker("every_row") is None]
    times = config.getoption("--laws-times")
    # Items of one law with several parameters share its function.
    laws = {id(item.obj): item.obj for item in items if hasattr(getattr(item, "obj", None), _SETTINGS)}
    for law in laws.values() if times > 1 else ():
        own = getattr(law, _SETTINGS)
        setattr(law, _SETTINGS, settings(own, max_examples=own.max_examples * times, derandomize=False))
