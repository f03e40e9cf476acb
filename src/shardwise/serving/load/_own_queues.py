"""Batches of a pipeline that have a waiting list each, as V0 of vLLM runs stages: each goes on as its step has ended.

Those of groups of attention that share experts step together, each batch with its like of the other groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.serving.load._rotation import together
from shardwise.serving.load._simulate import Scheduler


class OwnQueues:
    """The batches in flight, of each group as many as there are stages: `run` takes the next step."""

    def __init__(self, groups: Sequence[Sequence[Scheduler]]) -> None:
        self.index, self.groups = 0, [_Counted(batches) for batches in groups]
        self.lanes = list(zip(*groups, strict=True))
        """The batches that step together, one of each group."""
        self.free = [0.0] * len(self.lanes)
        """When each stage is free again."""

    @property
    def next_seconds(self) -> float:
        """When a batch next begins a step, infinite where all is done."""
        index, at = 0, math.inf
        for other, lane in enumerate(self.lanes):
            start = _starts(lane)
            if start < at:
                index, at = other, start
        self.index = index
        return at

    def run(self, at: float) -> None:
        """Run the step that begins at a time, that of `next_seconds`, through one stage after another.

        The next piece of a prompt follows as the first stage is free: it reads what the stages before it have written
        (github.com/vllm-project/vllm v0.26.0 vllm/v1/core/sched/scheduler.py _update_after_schedule; SGLang's chunks,
        docs/advanced_features/pipeline_parallelism.md).
        """
        lane = self.lanes[self.index]
        if len(lane) == 1:
            (batch,), (group,) = lane, self.groups
            batch.take_in(at)
            step = batch.next_step(at, single=True)
            group.count(self.index, batch)
            group.note()
            batch.run(step, 1, self._pass_stages(at, step.seconds, batch.goes_on(step)))
            group.count(self.index, batch)
            return
        pairs = [(batch, batch.next_step(at, single=True)) for batch in lane if batch.take_in(at)]
        for group, batch in zip(self.groups, lane, strict=True):
            group.count(self.index, batch)
            group.note()
        seconds = together([step for _, step in pairs], lane[0].table, len(lane))
        seconds = self._pass_stages(at, seconds, all([batch.goes_on(step) for batch, step in pairs]))
        for batch, step in pairs:
            batch.run(step, 1, seconds)
        for group, batch in zip(self.groups, lane, strict=True):
            group.count(self.index, batch)

    def _pass_stages(self, at: float, seconds: float, follows: bool) -> float:
        """Return seconds until a step is through all stages; through the first where its next piece follows it."""
        done, free = at, self.free
        each = seconds / len(free)
        for stage, before in enumerate(free):
            free[stage] = done = (done if done > before else before) + each
        return (free[0] if follows else done) - at


def _starts(lane: Sequence[Scheduler]) -> float:
    """Return when the batches of a lane next begin a step."""
    if len(lane) == 1:
        batch = lane[0]
        if batch.decoding or batch.prompts or batch.waiting:
            return batch.now
        return max(batch.now, batch.pending[0].ready) if batch.pending else math.inf
    at, comes, busy = 0.0, math.inf, False
    for batch in lane:
        if batch.now > at:
            at = batch.now
        if batch.decoding or batch.prompts or batch.waiting:
            busy = True
        elif batch.pending and batch.pending[0].ready < comes:
            comes = batch.pending[0].ready
    return at if busy else max(at, comes)


class _Counted:
    """What the batches of a group have, and the most that they had together."""

    def __init__(self, batches: Sequence[Scheduler]) -> None:
        self.most = (0, 0, 0.0)
        """The most that ran and waited, and the most tokens of cache, of all batches in flight together."""
        self.running, self.waiting = [0] * len(batches), [0] * len(batches)
        self.used = [batch.used for batch in batches]

    def count(self, index: int, batch: Scheduler) -> None:
        """Look at a batch whose step it is: the others are looked at again when it is theirs."""
        self.running[index], self.waiting[index] = batch.decoding + len(batch.prompts), len(batch.waiting)
        self.used[index] = batch.used

    def note(self) -> None:
        """Note what all batches have now, if it is more than before."""
        running, waiting, used, most = sum(self.running), sum(self.waiting), sum(self.used), self.most
        if running > most[0] or waiting > most[1] or used > most[2]:
            self.most = max(most[0], running), max(most[1], waiting), max(most[2], used)
