"""Which of many engines runs next, looked up without asking each."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

from shardwise.serving.load._replica import Replica
from shardwise.serving.load._simulate import Scheduler


class EngineQueue:
    """Engines by when something next runs there, the first of equals first.

    That is later for an engine that has run, which is seen when its turn comes, and earlier only for one that was
    given a request: `look_again`.
    """

    def __init__(self, engines: list[Replica]) -> None:
        self.engines = engines
        self.known = [engine.next_seconds for engine in engines]
        self.queue = [(seconds, index) for index, seconds in enumerate(self.known)]
        heapify(self.queue)
        self.index = {id(group): index for index, engine in enumerate(engines) for group in engine.groups}

    def first(self) -> tuple[float, Replica]:
        """Return when something runs next, and the engine."""
        queue, known = self.queue, self.known
        while True:
            seconds, index = queue[0]
            if seconds != known[index]:
                heappop(queue)
                continue
            now = self.engines[index].next_seconds
            if now == seconds:
                return seconds, self.engines[index]
            known[index] = now
            heapreplace(queue, (now, index))

    def of(self, group: Scheduler) -> Replica:
        """Return the engine of a group."""
        return self.engines[self.index[id(group)]]

    def look_again(self, group: Scheduler) -> None:
        """Look at an engine again, of which a group was given a request."""
        index = self.index[id(group)]
        now = self.engines[index].next_seconds
        if now < self.known[index]:
            self.known[index] = now
            heappush(self.queue, (now, index))
