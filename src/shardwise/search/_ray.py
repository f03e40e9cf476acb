"""Studies on Ray, whose driver is a process of its own: a node that dies ends that process, not the study."""

from __future__ import annotations

import gc
import math
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from shardwise._version import __version__
from shardwise.errors import InputError, Problem
from shardwise.records import dataclass
from shardwise.search._executor import (
    MOMENT,
    PartRange,
    PartTask,
    ProcessExecutor,
    end_with_parent,
    held_interrupts,
    portable,
    started_process,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# Parts in flight for each core: one runs while the next one is on its way.
_AHEAD = 2
# Times that a part is given out where workers or nodes die under it, and that Ray is started where its node dies.
_TRIES, _STARTS = 10, 5
# Seconds after which a cluster that does not answer is given up: joining one whose nodes are gone waits for ever.
_JOINED = 120.0
_INSTALL = f"install shardwise {__version__} on every node"
_CANNOT = "has workers that cannot answer"
_AGAIN = "run the study again, which goes on, or with --engine processes"


@dataclass(frozen=True, slots=True)
class RayExecutor:
    """Evaluates on Ray, with `count` cores of this machine or, with an address, on the cluster that is there.

    A part whose worker or node died is given out again; where the node of the driver died, Ray is started anew. While
    Ray starts on this machine, processes as of a `ProcessExecutor` evaluate.
    """

    count: int
    address: str = ""

    def run(self, work: PartTask, parts: Sequence[PartRange]) -> Iterator[Any]:
        """Yield the results as they come."""
        left, problem = list(reversed(parts)), None
        with held_interrupts() as raise_interrupt:
            for _ in range(_STARTS):
                if not left or (problem and self.address):
                    break
                driver = started_process(_drive, (self, work))
                try:
                    if not self.address:
                        yield from _until(driver.pipe, raise_interrupt, self.count, work, left)
                    problem = yield from self._driven(driver.pipe, raise_interrupt, left)
                finally:
                    _end_group(driver.process.pid)
                    driver.end()
        if left:
            raise InputError([problem or self.problem(f"ended {_STARTS} times before the study did")])

    def _driven(
        self, pipe: Connection, raise_interrupt: Callable[[], None], left: list[PartRange]
    ) -> Generator[Any, None, Problem | None]:
        """Yield the results of what is left as the driver sends them, until it has ended: that is left then.

        Returns why Ray did not start, if it did not.
        """
        waiting, latest = dict.fromkeys(left), time.monotonic() + _JOINED
        try:
            while waiting:
                raise_interrupt()
                if not pipe.poll(MOMENT):
                    if time.monotonic() > latest:
                        return self.no_start(f"nothing for {_JOINED:g} s")
                    continue
                part, result = pipe.recv()
                if isinstance(result, Problem):
                    return result
                if isinstance(result, Exception):
                    raise result
                if part is None:
                    latest = math.inf
                    pipe.send([*waiting])
                    continue
                del waiting[part]
                yield result
        except (EOFError, OSError):
            pass
        finally:
            left[:] = waiting
        return None

    def no_start(self, reason: str) -> Problem:
        """Return that Ray did not start here, or that its cluster was not joined."""
        return self.problem(f"{'is no cluster to join' if self.address else 'does not start'} ({reason})")

    def problem(self, rule: str, remedy: str = _AGAIN) -> Problem:
        """Return what is wrong with Ray."""
        field, value = ("address", self.address) if self.address else ("engine", "ray")
        return Problem(field, value, rule, remedy)


def _end_group(leader: int = 0) -> None:
    """End the processes of Ray, which are in the group of their driver: left to themselves they take seconds."""
    if sys.platform != "win32":
        with suppress(OSError):
            os.killpg(leader, signal.SIGKILL)


def _until(
    pipe: Connection, raise_interrupt: Callable[[], None], count: int, work: PartTask, left: list[PartRange]
) -> Iterator[Any]:
    """Yield the results of processes until Ray has started."""

    def stopped() -> bool:
        raise_interrupt()
        return pipe.poll()

    yield from ProcessExecutor(count).until(stopped, work, left)


def _drive(task: tuple[RayExecutor, PartTask], pipe: Connection) -> None:
    """Send what becomes of a study on Ray, whose processes are in the group of this one and end with it.

    What comes over the pipe is a part and its result; of no part, that Ray is there, or what is wrong.
    """
    if sys.platform != "win32":
        os.setsid()
    end_with_parent(_end_group)
    # No process of Ray holds the caller's pipes, nor says itself which of them died.
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        for answer in _sent(*task, pipe):
            pipe.send(answer)
    except Exception as error:  # raised anew by the process that asked
        pipe.send((None, portable(error)))


def _sent(executor: RayExecutor, work: PartTask, pipe: Connection) -> Iterator[tuple[Any, Any]]:
    """Start Ray or join its cluster, and yield what is sent."""
    own: dict[str, Any] = {} if executor.address else {"num_cpus": executor.count, "include_dashboard": False}
    try:
        import ray

        ray.init(address=executor.address or "local", log_to_driver=False, logging_level="ERROR", **own)
    except Exception as error:  # the class itself is what Ray raises where a node does not start in time
        yield None, executor.no_start(str(error).strip().partition("\n")[0])
        return
    yield None, None
    yield from _answers(ray, executor, work, pipe.recv())


def _answers(ray: Any, executor: RayExecutor, work: PartTask, left: list[PartRange]) -> Iterator[tuple[Any, Any]]:
    """Yield each part with its result as Ray has it, or the exception that ends the study."""
    name, task = uuid4().hex, ray.put(pickle.dumps((gc.get_threshold(), work)))
    remote, tries = ray.remote(max_retries=0)(_called), dict.fromkeys(left, 0)
    running: dict[Any, PartRange] = {}
    most = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", executor.count)))
    while left or running:
        while left and len(running) < most:
            part = left.pop()
            running[remote.remote((__version__, name), task, part)] = part
        ready, _ = ray.wait(list(running), timeout=MOMENT)
        for one in ready:
            part = running.pop(one)
            try:
                yield part, ray.get(one)
            except ray.exceptions.RayTaskError as error:
                yield part, InputError([executor.problem(f"{_CANNOT} ({_reason(error.cause)})", _INSTALL)])
            except ray.exceptions.RayError as error:
                tries[part] += 1
                left.append(part)
                if tries[part] >= _TRIES:
                    rule = f"lost the worker of a question {_TRIES} times ({type(error).__name__})"
                    yield part, InputError([executor.problem(rule)])


def _reason(error: object) -> str:
    """Return what an error says that has the traceback of another one inside.

    >>> _reason("Cannot be imported. Traceback:")
    'Cannot be imported. Traceback:'
    """
    lines = [line.strip() for line in str(error).strip().splitlines()] or ["no reason given"]
    return next((line for line in reversed(lines) if "Error:" in line), lines[0])


# The task of this worker of Ray under the name that its driver gave it, read once.
_TASKS: dict[str, PartTask] = {}


def _called(known_as: tuple[str, str], packed: bytes, part: PartRange) -> Any:
    """Return the result of a part, or the exception that it ends with.

    `known_as` is the release of the driver and the name of its task. A worker looks for dead cycles as seldom as the
    process that asks does.
    """
    release, name = known_as
    if release != __version__:
        raise ImportError(f"they have shardwise {__version__}")
    try:
        if name not in _TASKS:
            _TASKS.clear()
            threshold, _TASKS[name] = pickle.loads(packed)
            gc.set_threshold(*threshold)
        return _TASKS[name]([part])
    except Exception as error:  # raised anew by the process that asked
        return portable(error)
