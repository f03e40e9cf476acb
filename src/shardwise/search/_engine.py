"""Who evaluates the parts of a space: this process, or several at once. The answer is the same."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

Part = tuple[int, int]


class Task(Protocol):
    """A function over parts of a space that can take in what others of its kind found, to leave out more by it."""

    @property
    def known(self) -> Any:
        """What was found so far, to be told to others."""
        ...

    def learn(self, known: Any) -> None:
        """Take in what others found."""
        ...

    def __call__(self, parts: Sequence[Part]) -> Any:
        """Return what became of the parts; it has a `known` of its own."""
        ...


class Engine(Protocol):
    """Runs a task over the parts of a space and yields what it returns, in any order."""

    def run(self, work: Task, parts: Sequence[Part]) -> Iterator[Any]:
        """Yield the result of each portion of the parts."""
        ...


@dataclass(frozen=True, slots=True)
class Here:
    """Evaluates in this process, a few parts at a time so that progress can be shown."""

    def run(self, work: Task, parts: Sequence[Part]) -> Iterator[Any]:
        """Yield the result of each part."""
        for part in parts:
            yield work([part])


_WORK: list[Task] = []


def _begin(work: Task) -> None:
    # A terminal interrupts all of its processes; the one that asked answers with what was found by then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _WORK[:] = [work]


def _one(part: Part, known: Any) -> Any:
    _WORK[0].learn(known)
    return _WORK[0]([part])


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
class Processes:
    """Evaluates in several processes; each part is told what was found before it."""

    count: int

    def run(self, work: Task, parts: Sequence[Part]) -> Iterator[Any]:
        """Yield the results as they come."""
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("fork" if "fork" in methods else None)
        left, waiting = list(reversed(parts)), set[Future[Any]]()
        pool = ProcessPoolExecutor(self.count, mp_context=context, initializer=_begin, initargs=(work,))
        with _held_interrupts() as raise_interrupt:
            try:
                while left or waiting:
                    while left and len(waiting) < 2 * self.count:
                        waiting.add(pool.submit(_one, left.pop(), work.known))
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in done:
                        work.learn(future.result().known)
                        yield future.result()
                        raise_interrupt()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
