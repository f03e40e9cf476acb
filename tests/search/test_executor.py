"""ProcessExecutor of a search: none is left behind, none that dies loses a plan, and Ctrl-C ends them all at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

from shardwise.hardware import Cluster
from shardwise.models import MLP, Attention, Block, Model
from shardwise.plans import Training
from shardwise.search import ProcessExecutor, SearchOptions, SearchSpace, SerialExecutor, searched, upto, work_of

BLOCK = Block(mixers=(Attention(heads=16, kv_heads=4, head_dim=128),), feed_forward=MLP(ffn=8192))
MODEL = Model(name="dense", family="llama", hidden=2048, vocab=32000, layers=(BLOCK,) * 8)
JOB = Training(seq_len=1024, global_batch=48)
ON = Cluster.parse("16xa100-sxm-80gb")
SPACE = SearchSpace(layout=("1d",), cp=upto(2), recompute=("none", "full"), micro_batch=upto(4))


class Echo:
    """A task that says which process had each part; one part ends its process, or waits in it for ever."""

    known: Any = None

    def __init__(self, dies: int = -1, stays: int = -1) -> None:
        self.dies, self.stays, self.parent = dies, stays, os.getpid()

    def learn(self, known: Any) -> None:
        """Take nothing in."""

    def __call__(self, parts: Sequence[tuple[int, int]]) -> Any:
        """Return the part and the process."""
        start = parts[0][0]
        if start == self.dies and os.getpid() != self.parent:
            os._exit(9)
        while start == self.stays:
            time.sleep(0.05)
        result = Echo()
        result.known = (start, os.getpid())
        return result


PARTS = [(i, i + 1) for i in range(20)]


def test_every_part_comes_once() -> None:
    """Each part is evaluated once, none of them in this process."""
    found = [result.known for result in ProcessExecutor(3).run(Echo(), PARTS)]
    assert sorted(part for part, _ in found) == list(range(20))
    assert os.getpid() not in {pid for _, pid in found}


def test_elsewhere_than_on_linux_processes_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere libraries do not survive a fork: a search spawns its processes, and finds what it finds here."""
    asked: list[str] = []
    start = multiprocessing.get_context
    monkeypatch.setattr("multiprocessing.get_context", lambda way: asked.append(way) or start(way))
    monkeypatch.setattr(sys, "platform", "darwin")
    task = work_of(MODEL, ON, JOB, SPACE, SearchOptions(top=3, rows=12))
    assert len(task.parts()) > 1
    found = searched(task, ProcessExecutor(2))
    assert set(asked) == {"spawn"}
    alone = searched(work_of(MODEL, ON, JOB, SPACE, SearchOptions(top=3)), SerialExecutor())
    assert (found.counts.fitting, found.best[0].plan) == (alone.counts.fitting, alone.best[0].plan)


@pytest.mark.parametrize("count", [1, 3])
def test_a_process_that_dies_loses_no_part(count: int) -> None:
    """A part that ends every process it is given to is evaluated here at last, with all that is left."""
    found = [result.known for result in ProcessExecutor(count).run(Echo(dies=4), PARTS)]
    assert sorted(part for part, _ in found) == list(range(20))
    assert dict(found)[4] == os.getpid()


def test_an_interrupt_is_held_until_no_pipe_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while processes are waited for raises nothing there, and ends the search with what had come."""
    inside: list[str] = []
    from multiprocessing.connection import wait

    def interrupted_wait(*args: Any, **words: Any) -> Any:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            inside.append("raised")
        return wait(*args, **words)

    monkeypatch.setattr("multiprocessing.connection.wait", interrupted_wait)
    before = signal.getsignal(signal.SIGINT)
    found = searched(work_of(MODEL, ON, JOB, SPACE, SearchOptions(top=1, rows=20)), ProcessExecutor(2))
    assert not inside
    assert found.covered < 1
    assert signal.getsignal(signal.SIGINT) is before


# Under nohup a process ignores SIGHUP, and so would the one that is started here.
SCRIPT = """
import signal, sys; sys.path.insert(0, {folder!r})
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from test_executor import Echo, PARTS
from shardwise.answers._answer import OutputClosed, stop_when_closed
from shardwise.search import ProcessExecutor
try:
    with stop_when_closed():
        for result in ProcessExecutor(2).run(Echo(stays=6), PARTS):
            print(result.known[1], flush=True)
    print("whole")
except OutputClosed:
    sys.exit(74)
except KeyboardInterrupt:
    print("interrupted")
"""


def _running() -> tuple[subprocess.Popen[str], set[int]]:
    """Return a process that searches in two others, one of which never answers, and both of those."""
    script = SCRIPT.format(folder=os.path.dirname(__file__))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    # All parts but the one that never answers.
    return process, {int(process.stdout.readline()) for _ in PARTS[1:]}


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_no_process_outlives_the_search(number: signal.Signals) -> None:
    """However the process that searches is ended, those that it started end too, and its pipe is closed."""
    process, workers = _running()
    process.send_signal(number)
    assert process.communicate(timeout=240)[0] == ""
    end = time.monotonic() + 240
    while any(map(_alive, workers)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(_alive, workers))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_search_that_nobody_reads_ends_with_its_processes() -> None:
    """Where the reader of the output goes away a search ends, though a part of it never does."""
    process, workers = _running()
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=240) == 74
    assert not any(map(_alive, workers))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_interrupt_does_not_wait_for_what_runs() -> None:
    """Ctrl-C ends a search in which a part never ends."""
    process, workers = _running()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    assert out.endswith("interrupted\n")
    assert not any(map(_alive, workers))
