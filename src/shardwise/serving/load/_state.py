"""What a scheduler holds between two steps: who is to come, who waits and runs, the cache, and clocks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from shardwise.serving._burst import MatrixClock
from shardwise.serving._policy import Policy
from shardwise.serving.load._requests import CAUSES, STEP, PrefixCache, Request, Trace
from shardwise.serving.load._steps import StepTable

Stage = Literal["both", "prefill", "decode"]
"""What a replica runs of a request: all of it, or what its pool is for."""
Follow = Callable[[Request], Request | None]


def share_clock(batches: Sequence[SchedulerState]) -> None:
    """Let batches that follow each other through as many stages have the clock of these."""
    first = batches[0].clock
    shared = first and MatrixClock(first.burst, len(batches))
    for batch in batches:
        batch.clock = shared


class SchedulerState:
    """Queue, batch and cache of one group of ranks, and what has happened there."""

    def __init__(
        self,
        table: StepTable,
        policy: Policy,
        cache_tokens: float,
        follow: Follow | None = None,
        stage: Stage = "both",
    ) -> None:
        self.table, self.policy, self.capacity, self.follow = table, policy, cache_tokens, follow
        self.stage = stage
        self.now, self.step, self.horizon = 0.0, 0, math.inf
        self.pending: deque[Request] = deque()
        self.waiting: deque[Request] = deque()
        self.prompts: list[Request] = []
        self.ends: list[tuple[int, int, Request]] = []
        self.order: list[Request] = []
        self.decoding = 0
        self.contexts: int | float = 0
        self.used, self.reserved = 0.0, 0.0
        self.allocated: int | float = 0
        self.admitted = 0
        self.clocks = [0.0] * len(CAUSES)
        self.spent = (0.0, 0.0)
        """Seconds that steps took longer for prompts in them, and for other groups or batches in flight."""
        self.cause = STEP
        self.barred = False
        self.unseen = 0
        """Decode steps since the scheduler last looked for new requests."""
        self.decided = 0.0
        """When the next step was scheduled: as the step before it began, where scheduling is asynchronous."""
        self.overshot = 0.0
        """When the step ends in which all sequences have had their last token already."""
        self.places = policy.max_sequences
        """Sequences that may run at once, of those that all batches of a pipeline have together what is left."""
        self.others = 0
        """Sequences of other batches that have the same cache."""
        self.behind: Sequence[SchedulerState] = ()
        """Other batches whose requests wait here."""
        self.half, self.found, self.made = policy.block_tokens // 2, policy.found_block, table.made
        self.clock = MatrixClock(table.burst) if table.burst else None
        """That of its devices, which batches of a pipeline share; None where none is known."""
        self.trace, self.prefixes = Trace(), PrefixCache()

    @property
    def outstanding(self) -> int:
        """Requests that were sent here and have not ended."""
        running = self.decoding + sum(batch.decoding for batch in self.behind) if self.behind else self.decoding
        return running + len(self.prompts) + len(self.waiting) + len(self.pending)

    def begin(self, first: Sequence[Request], follow: Follow) -> None:
        """Expect the first requests of users, whose next ones follow on those of the batches behind, too."""
        for request in first:
            self.expect(request)
        for batch in (self, *self.behind):
            batch.follow = follow

    def take_in(self, now: float) -> bool:
        """Take in who has arrived by a time; False where nothing runs or waits."""
        self.now = now
        pending, waiting = self.pending, self.waiting
        # SGLang python/sglang/srt/managers/scheduler_recv_skipper.py: decode steps count one, others a thousand.
        if pending and pending[0].ready <= now + 1e-12 and (not self.unseen or not self.decoding):
            seen = tuple(self.clocks)
            while pending and pending[0].ready <= now + 1e-12:
                request = pending.popleft()
                # A step under way counts from the arrival to its end.
                request.seen = seen
                waiting.append(request)
        if waiting and len(waiting) > self.trace.most_waiting:
            self.trace.most_waiting = len(waiting)
        return bool(self.decoding or self.prompts or waiting)

    def _pass_time(self, seconds: float, last: float) -> None:
        """Move the clock over steps in which the same sequences run, the last of them of so many seconds."""
        trace, running = self.trace, self.decoding + len(self.prompts)
        now = self.now
        self.decided = now + (seconds - last)
        self.now = now + seconds
        trace.busy_seconds += seconds
        trace.running_seconds += seconds * running
        trace.cache_token_seconds += seconds * self.used
        if running > trace.most_running:
            trace.most_running = running
        if self.waiting:
            self.clocks[self.cause] += seconds

    def expect(self, request: Request) -> None:
        """Add a request that will arrive, in the order of arrivals."""
        pending = self.pending
        if not (pending or self.trace.iterations):
            # The first step is scheduled as the first comes, with all who come with it.
            self.decided = request.ready
        if not pending or pending[-1].ready <= request.ready:
            pending.append(request)
            return
        at = len(pending) - 1
        while at and pending[at - 1].ready > request.ready:
            at -= 1
        pending.insert(at, request)
