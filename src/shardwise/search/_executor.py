"""Who evaluates the parts of a space: this process, or several at once. The answer is the same."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

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


def _follow_parent(end: Callable[[], Any]) -> None:
    import multiprocessing
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    end()
    os._exit(1)


def end_with_parent(end: Callable[[], Any] = bool) -> None:
    """Leave interrupts to the process that started this one, and end as soon as that is gone, however it ended."""
    # A terminal interrupts all of its processes; the one that asked answers with what was found by then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, args=(end,), daemon=True).start()


def _serve(work: PartTask, inbox: Connection) -> None:
    """Evaluate the parts that come until the other end closes."""
    end_with_parent()
    while True:
        try:
            part, known = inbox.recv()
        except EOFError:
            return
        work.learn(known)
        try:
            inbox.send(work([part]))
        except Exception as error:  # raised anew by the process that asked
            inbox.send(portable(error))


def portable(error: Exception) -> Exception:
    """Return an exception that travels to another process, with a note of where it was raised.

    >>> str(portable(KeyError("tp"))), str(portable(OSError(lambda: 0)))[:14]
    ("'tp'", 'OSError(<funct')
    """
    import pickle
    import traceback

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class raises
        error = RuntimeError(repr(error))
    error.add_note(traceback.format_exc())
    return error


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
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
class WorkerProcess:
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
        with held_interrupts() as raise_interrupt:
            yield from self.until(raise_interrupt, work, list(reversed(parts)))

    def until(self, stopped: Callable[[], Any], work: PartTask, left: list[PartRange]) -> Iterator[Any]:
        """Yield the results of what is left as they come, until told to stop: what is worked on then is left again."""
        started = count = min(self.count, _MOST_WAITED) if sys.platform == "win32" else self.count
        workers = _busy([_started(work) for _ in range(min(count, len(left)))], left, work.known)
        try:
            while (workers or left) and not stopped():
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
                left += worker.part
                worker.end()


def _started(work: PartTask) -> WorkerProcess:
    return started_process(_serve, work)


def started_process(target: Callable[[Any, Connection], None], work: Any) -> WorkerProcess:
    """Return a process that runs a function of some work and of its end of a pipe."""
    import multiprocessing

    # Forked processes share what is loaded and recorded. Elsewhere than on Linux, libraries do not survive a fork.
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(work, there), daemon=True)
    process.start()
    there.close()
    return WorkerProcess(process, here, [])


def _results(workers: Sequence[WorkerProcess]) -> Iterator[Any]:
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
            if isinstance(result, Exception):
                raise result
            worker.part.clear()
            yield result


def _busy(workers: Sequence[WorkerProcess], left: list[PartRange], known: Any) -> list[WorkerProcess]:
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
