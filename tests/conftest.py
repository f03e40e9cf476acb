"""How often laws are tried: the first half of their examples, the same in every run, or more of them under a seed.

`python -m pytest tests/laws tests/serving --laws-times 100 --hypothesis-seed 7` tries a hundred times as many as they
state, and no other test.
"""

from __future__ import annotations

import gc
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.errors import StopTest, UnsatisfiedAssumption
from hypothesis.internal.conjecture import providers
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.internal.conjecture.engine import ConjectureRunner, ExitReason

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
    words = "so many times the examples that each law states; above 1 laws alone, of other examples each time"
    parser.addoption("--laws-times", type=float, default=0.5, help=words)
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
    if times > 1:
        items[:] = [item for item in items if hasattr(getattr(item, "obj", None), _SETTINGS)]
    # Items of one law with several parameters share its function.
    laws = {id(item.obj): item.obj for item in items if hasattr(getattr(item, "obj", None), _SETTINGS)}
    for law in laws.values():
        own = getattr(law, _SETTINGS)
        if times > 1:
            examples = math.ceil(own.max_examples * times)
            setattr(law, _SETTINGS, settings(own, max_examples=examples, derandomize=False))
        elif times < 1:
            some = math.ceil(own.max_examples * times)
            law.hypothesis.inner_test = _first_examples(law.hypothesis.inner_test, some)


# How many more examples each law of which some are tried is asked of, and how many at first.
_LEFT: dict[Any, float] = {}
_FIRST: dict[Any, int] = {}
# The laws that were asked of their part in the item that runs.
_ASKED: set[Any] = set()
_ASK = ConjectureRunner.test_function


def _ask(runner: ConjectureRunner, data: ConjectureData) -> None:
    """End a run whose law was asked of its part: further examples would be drawn for nothing."""
    if _ASKED:
        runner.exit_with(ExitReason.finished)
    _ASK(runner, data)


ConjectureRunner.test_function = _ask


def _first_examples(law: Callable[..., None], most: int) -> Callable[..., None]:
    """Return a law that is asked of the first examples of a run: fewer `max_examples` would be others, not a part."""

    @wraps(law)
    def asked(*args: Any, **kwargs: Any) -> None:
        try:
            law(*args, **kwargs)
        except (UnsatisfiedAssumption, StopTest):
            # What a law does not speak of is none of its examples.
            raise
        except BaseException:
            # What breaks it is tried again and made smaller.
            _LEFT[asked] = math.inf
            raise
        _LEFT[asked] -= 1
        if _LEFT[asked] <= 0:
            _ASKED.add(asked)

    _FIRST[asked] = most
    return asked


def pytest_runtest_call(item: pytest.Item) -> None:
    """Let each item of a law have its first examples."""
    _ASKED.clear()
    law = getattr(getattr(getattr(item, "obj", None), "hypothesis", None), "inner_test", None)
    if law in _FIRST:
        _LEFT[law] = _FIRST[law]
