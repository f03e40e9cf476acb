"""One engine: groups of attention that step together, and batches that pass pipeline stages one after another.

Groups of attention that share experts exchange tokens in every layer: they step together and the slowest decides.
Decode steps are padded to the fullest group (vLLM vllm/v1/worker/dp_utils.py coordinate_batch_across_dp, SGLang
srt/managers/scheduler_dp_attn_mixin.py); in steps with prompts experts take the tokens of all groups, unpadded.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from shardwise.plans import QUANTILES, Limit
from shardwise.serving._policy import Policy
from shardwise.serving.load._hold import PromptHold
from shardwise.serving.load._own_queues import OwnQueues
from shardwise.serving.load._requests import Request, Trace
from shardwise.serving.load._rotation import GroupBatches, Rotation, together
from shardwise.serving.load._simulate import Scheduler
from shardwise.serving.load._state import Follow, Stage, share_clock
from shardwise.serving.load._steps import StepTable

# Whether somebody keeps objects frozen, once that was seen: to count them walks through all of them.
_FROZEN: list[bool] = []


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave cycles to later: requests are in none, and looking for them takes an eighth of a simulation."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            # What was made meanwhile is old at once: the next collection of young objects has none of it.
            if not _FROZEN and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            elif not _FROZEN:
                _FROZEN.append(True)
            gc.enable()


class Replica:
    """One engine under load: the groups of its attention step together."""

    def __init__(
        self,
        table: StepTable,
        policy: Policy,
        cache_tokens: float,
        groups: int = 1,
        follow: Follow | None = None,
        stage: Stage = "both",
    ) -> None:
        self.table, self.balances = table, policy.balances
        self.batch_wait, self.waited = policy.batch_wait, 0
        self.groups = [Scheduler(table, policy, cache_tokens, follow, stage) for _ in range(groups)]
        self.now = 0.0
        self.horizon = math.inf
        self.stages = 1
        """Pipeline stages, through which batches of the groups pass one after another."""
        self.queues: OwnQueues | None = None
        """Batches that follow each other through stages and have a waiting list each."""
        self.hold = PromptHold(policy.balance_steps)
        self.rotation: Rotation | None = None
        """Batches that follow each other through stages and take from one waiting list."""

    def through_stages(self, policy: Policy, groups: int = 1) -> Replica:
        """Return it, its batches being as many for each of so many groups as there are stages that they pass."""
        self.stages = stages = len(self.groups) // groups
        each = [self.groups[first : first + stages] for first in range(0, len(self.groups), stages)]
        for batches in each:
            share_clock(batches)
        if policy.shared_waiting:
            self.rotation = Rotation([GroupBatches(batches, policy) for batches in each], policy)
        else:
            self.queues = OwnQueues(each)
        return self

    @property
    def entries(self) -> list[Scheduler]:
        """The groups that requests are sent to: of batches that take from one waiting list the first."""
        return self.groups if self.rotation is None else [group.front for group in self.rotation.groups]

    @property
    def cache_share(self) -> float:
        """Share of the cache that requests have."""
        if self.rotation is not None:
            return sum(group.used for group in self.groups) / sum(one.capacity for one in self.rotation.groups)
        return sum(group.used / group.capacity for group in self.groups) / len(self.groups)

    def run(self, requests: Iterable[Request]) -> list[Trace]:
        """Return what happens until every request has ended; they arrive in order, at one group after another."""
        with uncollected():
            entries = self.entries
            for index, request in enumerate(requests):
                entries[index % len(entries)].expect(request)
            return self.finish()

    def finish(self) -> list[Trace]:
        """Return what each group did when all that was sent here has ended."""
        self.advance(math.inf)
        self.now = max(group.now for group in self.groups) if self.stages > 1 else self.now
        for index, group in enumerate(self.groups):
            group.trace.seconds = self.now
            if several := self.rotation or self.queues:
                most = several.groups[index // self.stages].most
                group.trace.most_running, group.trace.most_waiting, group.trace.most_cache_tokens = most
        return [group.trace for group in self.groups]

    @property
    def next_seconds(self) -> float:
        """When something next runs here, infinite where all is done."""
        if self.rotation is not None:
            return self.rotation.next_seconds
        if self.queues is not None:
            return self.queues.next_seconds
        if any(g.decoding or g.prompts or g.waiting for g in self.groups):
            return self.now
        return max(self.now, min((g.pending[0].ready for g in self.groups if g.pending), default=math.inf))

    @property
    def next_end(self) -> float:
        """A time before which no request ends here: that of the first end, or when somebody comes whose end is near."""
        if any(g.prompts or g.waiting for g in self.groups):
            return self.next_seconds
        comes = min((g.pending[0].ready for g in self.groups if g.pending), default=math.inf)
        return min([comes, *(g.first_end for g in self.groups if g.decoding)])

    def advance(self, until: float) -> None:
        """Run to a time, or to the end of the step under way then; whoever is sent later may arrive from there on."""
        self.horizon = until
        if self.rotation is not None:
            while (at := self.rotation.next_seconds) < self.horizon:
                self.now = self.rotation.advance(at, self.horizon)
            return
        if self.queues is not None:
            while (at := self.queues.next_seconds) < self.horizon:
                self.queues.run(at)
                self.now = at
            return
        run = self._alone if len(self.groups) == 1 else self._together
        while self.now < self.horizon:
            if not run():
                at = self.next_seconds
                if at > self.horizon or at == math.inf:
                    return
                self.now = at

    def _alone(self) -> bool:
        """Run steps of the only group until it has no work, or to the horizon; False where it had none."""
        group, gathers = self.groups[0], self.batch_wait[0] > 0
        now, ran = self.now, False
        while now < self.horizon and group.take_in(now):
            if not group.overshoot():
                step = group.next_step(self.horizon, gathers and self._waits(group))
                group.run(step, step.steps, step.seconds)
            self.now = now = group.now
            ran = True
        return ran

    def _together(self) -> bool:
        """Run a step of every group that has work, each as long as that of the slowest; False where none has."""
        busy = [group for group in self.groups if group.take_in(self.now)]
        if not busy:
            return False
        arrivals = [group.pending[0].ready for group in self.groups if group.pending and not group.decoding]
        horizon = min(self.horizon, *arrivals, math.inf)
        waits = self.hold.waits(self.groups) if self.hold.steps else False
        steps = [(group, group.next_step(horizon, waits)) for group in busy]
        count = min(step.steps for _, step in steps)
        self.hold.go_on(count - 1)
        if any(step.pieces for _, step in steps):
            seconds = together([step for _, step in steps], self.table, len(self.groups))
        else:
            seconds = max(group.repriced(step, count) for group, step in steps)
        for group, step in steps:
            group.run(step, count, seconds)
        self.now = busy[0].now
        return True

    def _waits(self, group: Scheduler) -> bool:
        """Return whether prompts wait in this step until they fill a share of it, or have waited long enough.

        github.com/NVIDIA/TensorRT-LLM tensorrt_llm/_torch/pyexecutor/py_executor.py _waiting_requests: not where
        attention is split into groups.
        """
        steps, share = self.batch_wait
        prompts = sum(request.target - request.past for request in (*group.prompts, *group.waiting))
        tokens = prompts + group.decoding * self.table.verified
        full = self.waited >= steps or tokens >= share * group.policy.step_tokens
        if full or not group.decoding or not group.starts:
            self.waited = 0
            return False
        self.waited += 1
        return True


class LimitMissed(Exception):
    """A limit is missed whatever comes later."""


class LimitWatch:
    """Looks at requests as they end: raises `LimitMissed` once more of them are over a limit than it lets."""

    def __init__(self, limits: Iterable[Limit], count: int) -> None:
        self.limits = [limit for limit in limits if limit.quantile != "mean" and limit.metric != "itl" and not limit.of]
        self.left = [(1 - QUANTILES[limit.quantile]) * count + 1 for limit in self.limits]

    @property
    def missed(self) -> bool:
        """Whether a limit is missed whatever comes later."""
        return any(left < 0 for left in self.left)

    def __call__(self, ended: Request) -> None:
        """Count one."""
        for index, limit in enumerate(self.limits):
            if (getattr(ended, f"{limit.metric}_seconds") or 0.0) > limit.seconds:
                self.left[index] -= 1
                if self.left[index] < 0:
                    raise LimitMissed
