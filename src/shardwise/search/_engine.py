"""Who evaluates the parts of a space: this process, or several at once. The answer is the same."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Protocol

Part = tuple[int, int]


class Engine(Protocol):
    """Runs one function over the parts of a space and yields what it returns, in any order."""

    def run(self, work: Callable[[Sequence[Part]], Any], parts: Sequence[Part]) -> Iterator[Any]:
        """Yield the result of each portion of the parts."""
        ...


@dataclass(frozen=True, slots=True)
class Here:
    """Evaluates in this process, a few parts at a time so that progress can be shown."""

    def run(self, work: Callable[[Sequence[Part]], Any], parts: Sequence[Part]) -> Iterator[Any]:
        """Yield the result of each part."""
        for part in parts:
            yield work([part])


_WORK: list[Callable[[Sequence[Part]], Any]] = []


def _begin(work: Callable[[Sequence[Part]], Any]) -> None:
    _WORK[:] = [work]


def _one(part: Part) -> Any:
    return _WORK[0]([part])


@dataclass(frozen=True, slots=True)
class Processes:
    """Evaluates in several processes, each with the space of its own."""

    count: int

    def run(self, work: Callable[[Sequence[Part]], Any], parts: Sequence[Part]) -> Iterator[Any]:
        """Yield the results as they come."""
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("fork" if "fork" in methods else None)
        with ProcessPoolExecutor(self.count, mp_context=context, initializer=_begin, initargs=(work,)) as pool:
            try:
                for future in as_completed([pool.submit(_one, part) for part in parts]):
                    yield future.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
