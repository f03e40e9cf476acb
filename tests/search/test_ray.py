"""RayExecutor without a Ray: what its driver may do is said, and ends no study that processes can end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest

from shardwise.errors import InputError
from shardwise.search import ProcessExecutor, RayExecutor
from shardwise.search import _ray as ray_module

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a stand-in of the driver is forked")


PARTS = [(i, i + 1) for i in range(20)]


class Echo:
    """A task that gives each part back; the part at `wrong` is a fault."""

    def __init__(self, known: Any = None, wrong: int = -1) -> None:
        self.known, self.wrong = known, wrong

    def learn(self, known: Any) -> None:
        """Take nothing in."""

    def __call__(self, parts: Sequence[tuple[int, int]]) -> Any:
        """Return the part."""
        if parts[0][0] == self.wrong:
            raise ZeroDivisionError("no such part")
        return Echo(parts[0][0])


def _dies(task: Any, pipe: Connection) -> None:
    time.sleep(0.2)
    os._exit(1)


def _says_no(task: Any, pipe: Connection) -> None:
    time.sleep(0.2)
    pipe.send((None, task[0].no_start("no such host")))


def _dies_after_each(task: Any, pipe: Connection) -> None:
    pipe.send((None, None))
    part = pipe.recv()[-1]
    pipe.send((part, task[1]([part])))
    os._exit(9)


@pytest.mark.parametrize(
    ("drive", "rule"),
    [
        (_dies, "ended 5 times before the study did; run the study again"),
        (_dies_after_each, "ended 5 times before the study did; run the study again"),
        (_says_no, "is no cluster to join [(]no such host[)]; run the study again"),
        (lambda task, pipe: pipe.poll(None), "is no cluster to join [(]nothing for 0.3 s[)]"),
    ],
)
def test_a_cluster_that_is_lost_is_said(drive: Any, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that dies is started anew up to a bound; one that joins no cluster is not."""
    monkeypatch.setattr(ray_module, "_drive", drive)
    monkeypatch.setattr(ray_module, "_JOINED", 0.3)
    results = RayExecutor(2, "host:6379").run(Echo(), PARTS)
    with pytest.raises(InputError, match=f"address = 'host:6379': {rule}"):
        list(results)


@pytest.mark.parametrize("drive", [_dies, _says_no, _dies_after_each])
def test_processes_answer_while_ray_starts(drive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine a Ray that does not start, or dies, loses no part; each is evaluated once."""
    monkeypatch.setattr(ray_module, "_drive", drive)
    monkeypatch.setattr(ray_module, "_STARTS", 100)
    found = [result.known for result in RayExecutor(2).run(Echo(), PARTS)]
    assert sorted(found) == list(range(20))


def test_a_fault_comes_back_from_processes() -> None:
    """An exception of a part ends the search at once with where it was raised, and kills no process after another."""
    with pytest.raises(ZeroDivisionError, match="no such part") as raised:
        list(ProcessExecutor(2, renewed=1000).run(Echo(wrong=7), PARTS))
    assert "in __call__" in raised.value.__notes__[0]
