"""What must hold of every input: an answer or a refusal, in time, in few words, as JSON where it was asked for."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from fuzz.inputs import Input, drawn
from shardwise.answers._run import asks_for_json
from shardwise.cli import main

MOST_SECONDS = 20.0
MOST_ERROR_CHARACTERS = 60_000
FAILURES = {
    "full": OSError(28, "No space left on device"),
    "closed": ValueError("I/O operation on closed file"),
    "gone": BrokenPipeError(32, "Broken pipe"),
    "invalid": OSError(22, "Invalid argument"),
}


class _Failing(io.StringIO):
    """A stream that takes nothing."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


def _late(*_: object) -> None:
    raise TimeoutError(f"more than {MOST_SECONDS:g} seconds of CPU")


@contextlib.contextmanager
def _timed() -> Iterator[None]:
    """Raise in what takes too long; the raised error becomes a fault like any other."""
    before = signal.signal(signal.SIGVTALRM, _late)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def wrong_of(given: Input) -> str:
    """Return what is wrong with the answer to an input, empty where nothing is; its files go into this folder."""
    for name, data in given.files.items():
        Path(name).write_bytes(data)
    out, err = io.StringIO(), io.StringIO()
    stdout = None if given.stream == "none" else _Failing(FAILURES[given.stream]) if given.stream else out
    begin = time.process_time()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(err), warnings.catch_warnings(), _timed():  # type: ignore[type-var]
        warnings.simplefilter("error")
        try:
            status = main(given.words)
        except BaseException as error:
            return f"raised {type(error).__name__}: {error}"
    seconds = time.process_time() - begin
    text, said = out.getvalue(), err.getvalue()
    rules = {
        f"status {status}: {(said or text)[:400]}": status not in (0, 1, 2, 74),
        f"status {status} though the stream {given.stream} failed": bool(given.stream)
        and status not in _allowed(given),
        "status 74 though nothing failed": status == 74 and not given.stream,
        f"took {seconds:.1f} s": seconds > MOST_SECONDS,
        f"said {len(said)} characters": len(said) > MOST_ERROR_CHARACTERS,
        "a traceback": "Traceback" in said + text,
        "no JSON": not given.stream and status != 74 and asks_for_json(given.words) and not _is_json(text),
        "memory": "needs more memory" in said + text,
    }
    return "; ".join(rule for rule, broken in rules.items() if broken)


def _allowed(given: Input) -> tuple[int, ...]:
    """Return the statuses of a stream that fails: what was found where the reader left or errors went elsewhere."""
    return (0, 1, 2) if given.stream == "gone" else (2, 74)


def _is_json(text: str) -> bool:
    def constant(word: str) -> None:
        raise ValueError(word)

    try:
        json.loads(text, parse_constant=constant)
    except ValueError:
        return False
    return True


def judged(seed: int, numbers: Iterator[int] | range) -> Iterator[tuple[int, str, Input, str]]:
    """Yield (number, kind, input, what is wrong) of inputs under a seed, in a folder of their own."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for number in numbers:
                kind, given = drawn(seed, number)
                yield number, kind, given, wrong_of(given)
                for path in Path().iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        finally:
            os.chdir(here)
