"""Several processes that leave interrupts to the one that asked, so that it can answer with what was found by then."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.search._engine import Part, Processes


@dataclass(frozen=True, slots=True)
class _Deaf:
    """Work that is not interrupted."""

    work: Callable[[Sequence[Part]], Any]

    def __call__(self, parts: Sequence[Part]) -> Any:
        """Return what the work returns, interrupts ignored from now on."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return self.work(parts)


@dataclass(frozen=True, slots=True)
class QuietProcesses:
    """Evaluates in several processes that ignore interrupts; a terminal sends them to all of its processes."""

    count: int

    def run(self, work: Callable[[Sequence[Part]], Any], parts: Sequence[Part]) -> Iterator[Any]:
        """Yield the results as they come."""
        yield from Processes(self.count).run(_Deaf(work), parts)
