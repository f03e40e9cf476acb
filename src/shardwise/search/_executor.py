"""Who evaluates the parts of a space: this process, or several at once. The answer is the same."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from shardwise.errors import InputError, Problem
from shardwise.records import dataclass

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PartRange = tuple[int, int]
# Seconds after which an interrupt is looked for.
MOMENT = 0.1
# Windows waits for 63 handles at once (WaitForMultipleObjects, of which CPython keeps one).
_MOST_WAITED = 60


class PartTask(Protocol):
    """A function over parts of a space that can take in what others of its kind found, to leave out more by it."""

    @property
    def known(self) -> Any:
        """What was found so far, to be told to others."""
        ...

    def learn(self, known: Any) -> None:
        """Take in what others found."""
        ...

    def __call__(self, parts: Sequence[PartRange]) -> Any:
        """Return what became of the parts; it has a `known` of its own."""
        ...


class Executor(Protocol):
    """Runs a task over the parts of a space and yields what it returns, in any order."""

    def run(self, work: PartTask, parts: Sequence[PartRange]) -> Iterator[Any]:
        """Yield the result of each portion of the parts."""
        ...


@dataclass(frozen=True, slots=True)
class SerialExecutor:
    """Evaluates in this process, a few parts at a time so that progress can be shown."""

    def run(self, work: PartTask, parts: Sequence[PartRange]) -> Iterator[Any]:
        """Yield the result of each part."""
        for part in parts:
            yield work([part])


def _end_with_parent() -> None:
    """End this process as soon as the one that started it is gone, however that ended."""
    import multiprocessing
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(1)


def _serve(work: PartTask, inbox: Connection) -> None:
    """Evaluate the parts that come until the other end closes."""
    # A terminal interrupts all of its processes; the one that asked answers with what was found by then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            part, known = inbox.recv()
        except EOFError:
            return
        work.learn(known)
        inbox.send(work([part]))


@contextmanager
def _held_interrupts() -> Iterator[Callable[[], None]]:
    """Hold back Ctrl-C and give a function that raises it, to be called where no lock is taken.

    Raised anywhere, it can come between the taking of a lock of the pool and its release, and the pool never ends.
    """
    came: list[int] = []

    def raised() -> None:
        if came:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        # Python hands signals to the main thread alone, and only it may say what they do.
        yield raised
        return
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield raised
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True, slots=True)
class _Worker:
    """A process, this end of the pipe to it, and the part that it works on."""

    process: Any
    pipe: Connection
    part: list[PartRange]

    def give(self, part: PartRange, known: Any) -> None:
        """Send it a part to work on."""
        self.part[:] = [part]
        # Where it has died, the answer that does not come gives the part back.
        with suppress(OSError):
            self.pipe.send((part, known))

    def end(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass(frozen=True, slots=True)
class ProcessExecutor:
    """Evaluates in several processes; each part is told what was found before it.

    A part whose process died is given to another, and evaluated here where none is left; up to `renewed` processes
    that died are started anew. No process outlives the search or the process that started it.
    """

    count: int
    renewed: int = 0

    def run(self, work: PartTask, parts: Sequence[PartRange]) -> Iterator[Any]:
        """Yield the results as they come."""
        left = list(reversed(parts))
        started = count = min(self.count, _MOST_WAITED) if sys.platform == "win32" else self.count
        with _held_interrupts() as raise_interrupt:
            workers = _busy([_started(work) for _ in range(min(count, len(left)))], left, work.known)
            try:
                while workers or left:
                    raise_interrupt()
                    results = list(_results(workers))
                    for result in results:
                        work.learn(result.known)
                    # They go on with the next parts while the caller takes what they found.
                    workers = _busy(workers, left, work.known)
                    yield from results
                    while left and len(workers) < count and started < count + self.renewed:
                        started += 1
                        workers += _busy([_started(work)], left, work.known)
                    if not workers and left:
                        yield work([left.pop()])
            finally:
                for worker in workers:
                    worker.end()


def _started(work: PartTask) -> _Worker:
    import multiprocessing

    # Forked processes share what is loaded and recorded. Elsewhere than on Linux, libraries do not survive a fork.
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(work, there), daemon=True)
    process.start()
    there.close()
    return _Worker(process, here, [])


def _results(workers: Sequence[_Worker]) -> Iterator[Any]:
    """Yield what is done within a moment."""
    from multiprocessing.connection import wait

    ready: Any = wait([worker.pipe for worker in workers if worker.part], timeout=MOMENT)
    for worker in workers:
        if worker.pipe in ready:
            try:
                result = worker.pipe.recv()
            except (EOFError, OSError):
                worker.process.join()
                continue
            worker.part.clear()
            yield result


def _busy(workers: Sequence[_Worker], left: list[PartRange], known: Any) -> list[_Worker]:
    """Return the processes that work on a part, each that was idle given another; the others have ended.

    What a process that died worked on is left again.
    """
    busy = []
    for worker in workers:
        if not worker.process.is_alive():
            left += worker.part
            worker.pipe.close()
            continue
        if not worker.part and left:
            worker.give(left.pop(), known)
        if worker.part:
            busy.append(worker)
        else:
            worker.end()
    return busy


# Parts in flight for each core: one runs while the next one is on its way.
_AHEAD = 2
# Times that a part is given out where workers or nodes die under it.
_TRIES = 10


def _called(work: PartTask, part: PartRange) -> Any:
    return work([part])


@dataclass(frozen=True, slots=True)
class RayExecutor:
    """Evaluates on Ray, with `count` cores of this machine or, with an address, on the cluster that is there.

    A part whose worker or node died is given out again.
    """

    count: int
    address: str = ""

    def run(self, work: PartTask, parts: Sequence[PartRange]) -> Iterator[Any]:
        """Yield the results as they come."""
        if not parts:
            return
        import ray

        own: dict[str, Any] = {} if self.address else {"num_cpus": self.count, "include_dashboard": False}
        try:
            ray.init(address=self.address or "local", log_to_driver=False, logging_level="ERROR", **own)
        except Exception as error:  # the class itself is what Ray raises where a node does not start in time
            rule = f"does not start ({str(error).strip().partition(chr(10))[0]})"
            remedy = "run the study again, or with --engine processes"
            raise InputError(
                [Problem("address" if self.address else "engine", self.address or "ray", rule, remedy)]
            ) from None
        try:
            yield from self._results(ray, work, parts)
        finally:
            ray.shutdown()

    def _results(self, ray: Any, work: PartTask, parts: Sequence[PartRange]) -> Iterator[Any]:
        remote, task = ray.remote(max_retries=0)(_called), ray.put(work)
        left, tries = list(reversed(parts)), dict.fromkeys(parts, 0)
        running: dict[Any, PartRange] = {}
        most = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", self.count)))
        while left or running:
            while left and len(running) < most:
                part = left.pop()
                running[remote.remote(task, part)] = part
            ready, _ = ray.wait(list(running), timeout=MOMENT)
            for one in ready:
                part = running.pop(one)
                try:
                    result = ray.get(one)
                except ray.exceptions.RayTaskError:
                    raise
                except ray.exceptions.RayError:
                    tries[part] += 1
                    if tries[part] >= _TRIES:
                        raise
                    left.append(part)
                    continue
                yield result
