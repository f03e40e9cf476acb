"""The command line in this process: words in; status, output and errors out."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from shardwise.answers import _main, _train
from shardwise.answers._answer import Answer
from shardwise.answers._inputs import Inputs
from shardwise.cli import main
from shardwise.training import TrainReport


@dataclass(frozen=True)
class Done:
    """What a command line left behind."""

    status: int
    out: str
    err: str

    @property
    def tree(self) -> dict[str, Any]:
        """What was printed, read as JSON."""
        return dict(json.loads(self.out))

    @property
    def fields(self) -> list[str]:
        """The fields of the problems that were printed as JSON."""
        return [problem["field"] for problem in self.tree["error"]["problems"]]


def run(*words: str) -> Done:
    """Return what a command line prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(words))
    return Done(status, out.getvalue(), err.getvalue())


def both(*words: str) -> tuple[Done, Done]:
    """Return what a command line prints and what it prints with --json, of one answer: it is asked once."""
    answers: list[Answer] = []
    ask = _main.answer

    def once(given: Sequence[str]) -> Answer:
        answers.extend([] if answers else [ask(given)])
        return answers[0]

    with mock.patch.object(_main, "answer", once):
        return run(*words), run(*words, "--json")


def trained(*words: str) -> TrainReport:
    """Return the report that a `train` command line is answered from.

    The answer itself takes ten times as long: it says what changes and savers would do.
    """
    reports: list[TrainReport] = []
    ask = _train.trained

    def once(given: Inputs) -> TrainReport:
        reports.append(ask(given))
        return reports[0]

    with mock.patch.object(_train, "trained", once):
        _main.answer(words)
    return reports[0]


def figures(report: TrainReport) -> tuple[int, float]:
    """Return the bytes and the seconds of a report as JSON has them."""
    return round(report.device_bytes), report.step_seconds


# Work without a bound takes hours or does not end, bounded work a second or two: the line between them is drawn where
# no busy machine reaches it, since a machine's speed is no claim of a test.
BOUNDED_CPU_SECONDS = 60


@contextlib.contextmanager
def bounded_work() -> Iterator[None]:
    """Fail where what is done inside takes so long that nothing can have bounded it."""
    begin = time.process_time()
    yield
    assert time.process_time() - begin < BOUNDED_CPU_SECONDS


@contextlib.contextmanager
def inside_a_folder() -> Iterator[None]:
    """Work in a folder of its own, gone at the end, whose name is always the same: models are named after it."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "probe").mkdir()
        os.chdir(Path(folder) / "probe")
        try:
            yield
        finally:
            os.chdir(before)
