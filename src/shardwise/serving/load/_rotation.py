"""Batches of a pipeline that take from one waiting list, in turns: how V1 of vLLM, SGLang and TensorRT-LLM run stages.

Which batch is next is fixed: batches are made in turns, and end in the order in which they were made. The next one is
made as the oldest of those that may be under way at once has ended: as many as stages, or one more where a step is
scheduled ahead. It goes on with its own sequences, whose last tokens are known by then, and takes whoever waits,
wherever there is room: sequences, cache and the pieces of prompts are those of all batches. A batch that has nothing to
run ends as the one before it does. So a single batch keeps all that comes where none is scheduled ahead, until a step
is too small for its prompts: whoever arrives while it runs is seen as it ends.

Groups of attention that share experts have a waiting list, places and a cache each, and make their next batches
together: a turn is a step of all groups, as long as that of the slowest, in which a group without work takes part
(`_pad_attention_dp_dummy_request` of TensorRT-LLM, `execute_dummy_batch` of vLLM's DPEngineCoreProc).

github.com/vllm-project/vllm v0.33.0 vllm/v1/engine/core.py step_with_batch_queue, vllm/config/vllm.py
max_concurrent_batches, vllm/v1/core/sched/async_scheduler.py next_decode_eligible_step; github.com/sgl-project/sglang
0.5.23 python/sglang/srt/managers/scheduler_pp_mixin.py event_loop_pp; github.com/NVIDIA/TensorRT-LLM
tensorrt_llm/_torch/pyexecutor/py_executor.py _executor_loop_pp.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from shardwise.serving._policy import Policy
from shardwise.serving.load._hold import PromptHold
from shardwise.serving.load._requests import Request, Step
from shardwise.serving.load._rounds import go_round
from shardwise.serving.load._simulate import Scheduler
from shardwise.serving.load._steps import StepTable


class Rotation:
    """Turns of the batches of groups of attention, or of the only one: `advance` makes the next ones.

    Each step passes all stages, as many as a group has batches.
    """

    def __init__(self, groups: list[GroupBatches], policy: Policy) -> None:
        self.groups, self.policy, self.table = groups, policy, groups[0].front.table
        self.many = len(groups[0].batches)
        self.turn, self.seen, self.launched = 0, 0.0, 0.0
        self.free = [0.0] * self.many
        """When each stage is free again."""
        under_way = self.many + policy.batches_ahead
        self.ended = deque([0.0] * under_way, under_way)
        """When the batches that were made last have ended, in order."""
        self.alike = 0
        """Turns since anything but contexts changed."""
        self.hold = PromptHold(policy.balance_steps if len(groups) > 1 else 0)

    @property
    def next_seconds(self) -> float:
        """When the next batch is made, infinite where all is done."""
        at = self.ended[0]
        if self.launched > at:
            at = self.launched
        comes = math.inf
        for group in self.groups:
            if group.busy:
                return at
            if group.front.pending:
                comes = min(comes, group.front.pending[0].ready)
        return max(at, comes)

    def advance(self, at: float, horizon: float) -> float:
        """Make the next batch at a time, or many that are alike and begin before another; return when the last was."""
        groups, index = self.groups, self.turn
        # Who ended is known to all a round later, and who waits is asked by all in another.
        if self.alike >= self.many + len(self.ended) and any([one.batches[index].decoding for one in groups]):
            go_round(self, horizon)
            self.alike = len(self.ended)
            if self.next_seconds >= horizon:
                return self.seen
            at, index = self.next_seconds, self.turn
        before = [one.running(index) for one in groups] if len(groups) > 1 else groups[0].running(index)
        self.run(at)
        if len(groups) > 1:
            same = before == [one.running(index) for one in groups] and not any([one.front.prompts for one in groups])
        else:
            same = before == groups[0].running(index) and not groups[0].front.prompts
        self.alike = self.alike + 1 if same else 0
        for one in groups:
            one.causes[index] = one.front.cause
        return at

    def run(self, at: float) -> None:
        """Make the next batches at a time, that of `next_seconds`, and book their step through all stages."""
        index, ended, since = self.turn, self.ended, at - self.seen
        if at > ended[-1]:
            ended.extend([at] * len(ended))
        self.seen, self.turn = at, (index + 1) % self.many
        done = self._together(index, at, since) if len(self.groups) > 1 else self._alone(index, at, since)
        ended.append(done if done > ended[-1] else ended[-1])

    def _alone(self, index: int, at: float, since: float) -> float:
        """Run the step of the only group, and return when it has ended; now where there is none."""
        (group,), done = self.groups, at
        if not group.wakes(index, at, since):
            return at
        batch = group.batches[index]
        begin = batch.now if batch.decoding else at
        group.open(index, at, begin)
        step = group.plan(index, at)
        if step.steps:
            self.launched = at + self.table.launching_seconds
            done = self._pass_stages(step.seconds, max(begin, at))
            group.book(index, step, begin, done)
        group.close(index)
        return done

    def _together(self, index: int, at: float, since: float) -> float:
        """Run the step of all groups, as long as that of the slowest, and return when it has ended."""
        busy, done = [one for one in self.groups if one.wakes(index, at, since)], at
        batches = [one.batches[index] for one in self.groups]
        begin = max([batch.now for batch in batches if batch.decoding], default=at)
        for one in busy:
            one.open(index, at, begin)
        waits = self.hold.waits(batches) if self.hold.steps else False
        steps = [(one, step) for one in busy if (step := one.plan(index, at, waits)).steps]
        if steps:
            self.launched = at + self.table.launching_seconds
            seconds = together([step for _, step in steps], self.table, len(self.groups))
            done = self._pass_stages(seconds, max(begin, at))
            for one, step in steps:
                one.book(index, step, begin, done)
        for one in busy:
            one.close(index)
        return done

    def _pass_stages(self, seconds: float, begin: float) -> float:
        """Return when a step that begins at a time is through all stages, each as it becomes free.

        A step does not begin before it is made: batches of short steps wait for the host that launches them.
        """
        done, free = begin, self.free
        each = seconds / len(free)
        for stage, before in enumerate(free):
            free[stage] = done = (done if done > before else before) + each
        return done


def together(steps: Sequence[Step], table: StepTable, groups: int) -> float:
    """Return seconds of a step of so many groups: of the slowest, but that experts take the tokens of all prompts."""
    if not any([step.pieces for step in steps]):
        return max([step.seconds for step in steps])
    own = max(step.seconds - table.experts[step.tokens] for step in steps)
    return own + table.experts[round(sum(step.tokens for step in steps) / groups)]


class GroupBatches:
    """The batches of one group of attention, which take turns. Who waits is with the first of them between two.

    The sequences of `policy` are those of all together, those of a batch's own policy its part of them: SGLang's
    get_num_allocatable_reqs is the lesser of both (python/sglang/srt/managers/scheduler.py).
    """

    def __init__(self, batches: list[Scheduler], policy: Policy) -> None:
        self.batches, self.policy = batches, policy
        self.front, self.capacity = batches[0], batches[0].capacity
        self.most = (0, 0, 0.0)
        """The most that ran and waited, and the most tokens of cache, of all batches together."""
        self.kept = [(0.0, 0, 0.0)] * len(batches)
        """When the last step of each batch ends, and the places and tokens of cache that it keeps until then."""
        self.noted, self.refused_until = False, -math.inf
        """Whether `most` is that of all batches now, and until when who waits finds no more than at the last turn."""
        self.causes = [0] * len(batches)
        """Why who waits did so at the last turn of each batch."""
        self.lent: tuple[deque[Request], list[Request], deque[Request]] | None = None
        """What a batch has of its own while who waits is with it."""
        self.front.behind = batches[1:]
        for batch in batches[1:]:
            batch.prefixes, batch.clocks = self.front.prefixes, self.front.clocks

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        front = self.front
        if front.decoding or front.prompts or front.waiting:
            return True
        return any([batch.decoding for batch in self.batches])

    def running(self, index: int) -> tuple[int, int, int]:
        """Return what a turn may change: sequences of a batch, those it has ended, and who waits."""
        batch = self.batches[index]
        return batch.decoding, len(batch.trace.finished), len(self.front.waiting)

    def wakes(self, index: int, at: float, since: float) -> bool:
        """Return whether a batch has anything to run or to ask for; an empty one ends as the one before it."""
        front, batch = self.front, self.batches[index]
        if front.waiting:
            front.clocks[front.cause] += since
        if batch.decoding or not self._is_idle(at):
            return True
        batch.now = batch.decided = at
        if front.waiting:
            batch.cause = front.cause
        else:
            front.cause = batch.cause
        return False

    def open(self, index: int, at: float, begin: float) -> None:
        """Let a batch have who waits, for a step that begins at a time."""
        front, batch, now = self.front, self.batches[index], self.front.now
        if front.pending or front.waiting:
            front.take_in(at)
            front.now = now
        self.lent = batch.waiting, batch.prompts, batch.pending
        batch.waiting, batch.prompts, batch.pending = front.waiting, front.prompts, front.pending
        self._share(index, at)
        batch.now, batch.decided = begin, at

    def plan(self, index: int, at: float, waits: bool = False) -> Step:
        """Return the step of a batch, which has no iteration where there is nothing that it may run."""
        front, batch = self.front, self.batches[index]
        step = batch.next_step(at, waits, single=True)
        front.cause = batch.cause
        self._note()
        if not step.steps and front.waiting:
            self.refused_until = min([until for until, _, _ in self.kept if until > at], default=math.inf)
        return step

    def close(self, index: int) -> None:
        """Let the first batch have who waits again."""
        front, batch = self.front, self.batches[index]
        front.allocated = batch.allocated
        if batch is not front and self.lent is not None:
            batch.waiting, batch.prompts, batch.pending = self.lent
        self.lent = None

    def _is_idle(self, at: float) -> bool:
        """Whether an empty batch finds nobody to take: none waits, or nothing has changed since the last turn."""
        front = self.front
        if front.prompts or not self.noted or (front.pending and front.pending[0].ready <= at + 1e-12):
            return False
        return not front.waiting or at < self.refused_until

    def book(self, index: int, step: Step, begin: float, done: float) -> None:
        """Book a step of a batch between two times, and what it keeps of places and cache until it ends."""
        batch, self.noted, self.refused_until = self.batches[index], False, -math.inf
        before, finished = batch.used + batch.reserved, batch.trace.finished
        if step.pieces:
            before += sum([tokens for _, tokens in step.pieces])
        had, waiting = len(finished), batch.waiting
        if waiting:
            # Who waits has a clock of its own.
            batch.waiting = deque()
        batch.run(step, 1, done - begin)
        batch.waiting = waiting
        after = batch.used + batch.reserved
        self.kept[index] = done, batch.decoding + len(finished) - had, before if before > after else after

    def _share(self, index: int, at: float) -> None:
        """Tell a batch what the others leave of places and cache; who has ended keeps both until that is known."""
        places, used, running = 0, 0.0, 0
        for batch, (until, had, tokens) in zip(self.batches, self.kept, strict=True):
            running += batch.decoding
            if at < until:
                places, used = places + had, used + tokens
            else:
                places, used = places + batch.decoding, used + (batch.used + batch.reserved)
        batch = self.batches[index]
        batch.others = running - batch.decoding
        batch.capacity = self.capacity - used + batch.used + batch.reserved
        # A prompt that is cut may end in a batch that is full, but not beyond the places of all.
        batch.places = min(batch.policy.max_sequences, self.policy.max_sequences - places + batch.decoding)
        batch.allocated = self.front.allocated

    def _note(self) -> None:
        """Note what all batches have now, if it is more than before."""
        self.noted = True
        running, used = len(self.front.prompts), 0.0
        for batch in self.batches:
            running, used = running + batch.decoding, used + batch.used
        waiting, most = len(self.front.waiting), self.most
        if running > most[0] or waiting > most[1] or used > most[2]:
            self.most = max(most[0], running), max(most[1], waiting), max(most[2], used)
