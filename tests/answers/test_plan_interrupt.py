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
from typing import Any

import pytest

pty = pytest.importorskip("pty")
PROGRAM = [sys.executable, "-c", "import sys; from shardwise.answers import run; sys.exit(run())"]
# Precisions and optimizers are searched too, so that most of a minute is left when the first part is done.
SEARCH = shlex.split(
    "plan train deepseek-v3 --on 2048xh800 --seq-len 4096 --global-batch 15360 --no-prune --json --top 2"
    " --precision bf16,fp8 --optimizer adam,muon,lion,sgd"
)
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


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_interrupt_answers_with_what_was_found(workers: str) -> None:
    """Ctrl-C ends a search with the best so far, the share of the space that was covered and exit status 130."""
    status, tree, said = _interrupted(["--workers", workers])
    assert status == 130
    assert 0 < tree["search"]["covered"] < 1
    assert tree["best"]
    assert tree["best"][0]["fits"]
    assert PROGRESS.search(said)
    assert "Traceback" not in said
