"""A search that is interrupted answers with what it found by then."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from command_line import run
from shardwise.search import SerialExecutor

pty = pytest.importorskip("pty")
PROGRAM = [sys.executable, "-c", "import sys; from shardwise.answers import run; sys.exit(run())"]
# Precisions and optimizers are searched too, so that most of it is left when the first part is done.
SEARCH = shlex.split(
    "plan train mixtral-8x22b --on 1024xh100 --seq-len 4096 --global-batch 2048 --no-prune --json --top 2"
    " --precision bf16,fp8 --optimizer adam,muon,lion,sgd"
)
ALONE = "--seq-len 4096 --precision bf16,fp8 --json --top 2 --workers 1"
PROGRESS = re.compile(r"([\d.]+)% of [\d,]+ plans, [\d,]+ a second, best so far [\d.]+ \w+")


def _interrupted(words: list[str]) -> tuple[int, dict[str, Any], str]:
    """Return exit status, answer and progress of a search that is sent SIGINT, with its workers, as Ctrl-C does."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, *SEARCH, *words], stdout=subprocess.PIPE, stderr=theirs, start_new_session=True, text=True
    )
    os.close(theirs)
    said, end = "", time.monotonic() + 240
    while PROGRESS.search(said) is None and time.monotonic() < end and process.poll() is None:
        if select.select([ours], [], [], 1)[0]:
            said += os.read(ours, 4096).decode()
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    while select.select([ours], [], [], 0)[0]:
        try:
            said += os.read(ours, 4096).decode()
        except OSError:
            break
    os.close(ours)
    return process.returncode, json.loads(out), said


def _holds(tree: dict[str, Any]) -> bool:
    """Whether an answer is of a part of its search, and has what that found."""
    return 0 < tree["search"]["covered"] < 1 and bool(tree["best"]) and bool(tree["best"][0]["fits"])


def test_an_interrupt_answers_with_what_was_found() -> None:
    """Ctrl-C ends a search with the best so far, the share of the space that was covered and exit status 130."""
    status, tree, said = _interrupted(["--workers", "2"])
    assert status == 130
    assert _holds(tree)
    assert PROGRESS.search(said)
    assert "Traceback" not in said


def test_an_interrupt_of_one_process_answers_with_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where the process that is interrupted evaluates by itself, after the first part."""
    whole = SerialExecutor.run

    def interrupted(self: SerialExecutor, work: Any, parts: Any) -> Iterator[Any]:
        yield next(whole(self, work, parts))
        raise KeyboardInterrupt

    monkeypatch.setattr(SerialExecutor, "run", interrupted)
    done = run(*shlex.split(f"plan train llama-3.1-8b --on 32xh100 --global-batch 128 {ALONE}"))
    assert done.status == 130
    assert _holds(done.tree)
    assert "Traceback" not in done.err
