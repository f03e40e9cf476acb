"""Batches of a pipeline that take from one waiting list, in turns: how V1 of vLLM, SGLang and TensorRT-LLM run stages.

Which batch is next is fixed: batches are made in turns, and end in the order in which they were made. The next one is
made as the oldest of those that may be under way at once has ended: as many as stages, or one more where a step is
scheduled ahead. It goes on with its own sequences, whose last tokens are known by then, and takes whoever waits,
wherever there is room: sequences, cache and the pieces of prompts are those of all batches. A batch that has nothing to
run ends as the one before it does. So a single batch keeps all that comes where none is scheduled ahead, until a step
is too small for its prompts: whoever arrives while it runs is seen as it ends.

github.com/vllm-project/vllm v0.33.0 vllm/v1/engine/core.py step_with_batch_queue, vllm/config/vllm.py
max_concurrent_batches, vllm/v1/core/sched/async_scheduler.py next_decode_eligible_step; github.com/sgl-project/sglang
0.5.23 python/sglang/srt/managers/scheduler_pp_mixin.py event_loop_pp; github.com/NVIDIA/TensorRT-LLM
tensorrt_llm/_torch/pyexecutor/py_executor.py _executor_loop_pp.
"""

from __future__ import annotations

import math
from collections import deque

from shardwise.serving._policy import Policy
from shardwise.serving.load._requests import Step
from shardwise.serving.load._rounds import go_round
from shardwise.serving.load._simulate import Scheduler


class Rotation:
    """Batches in turns: `run` makes the next one. Who waits is with the first of them between two turns.

    The sequences of `policy` are those of all together, those of a batch's own policy its part of them: SGLang's
    get_num_allocatable_reqs is the lesser of both (python/sglang/srt/managers/scheduler.py).
    """

    def __init__(self, batches: list[Scheduler], policy: Policy) -> None:
        self.batches, self.policy = batches, policy
        self.front, self.capacity = batches[0], batches[0].capacity
        self.turn, self.seen, self.launched = 0, 0.0, 0.0
        self.free = [0.0] * len(batches)
        """When each stage is free again."""
        under_way = len(batches) + policy.batches_ahead
        self.ended = deque([0.0] * under_way, under_way)
        """When the batches that were made last have ended, in order."""
        self.most = (0, 0, 0.0)
        """The most that ran and waited, and the most tokens of cache, of all batches together."""
        self.kept = [(0.0, 0, 0.0)] * len(batches)
        """When the last step of each batch ends, and the places and tokens of cache that it keeps until then."""
        self.noted, self.refused_until = False, -math.inf
        """Whether `most` is that of all batches now, and until when who waits finds no more than at the last turn."""
        self.alike = 0
        """Turns since anything but contexts changed."""
        self.causes = [0] * len(batches)
        """Why who waits did so at the last turn of each batch."""
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

    @property
    def next_seconds(self) -> float:
        """When the next batch is made, infinite where all is done."""
        at = self.ended[0]
        if self.launched > at:
            at = self.launched
        if self.busy:
            return at
        return max(at, self.front.pending[0].ready) if self.front.pending else math.inf

    def advance(self, at: float, horizon: float) -> float:
        """Make the next batch at a time, or many that are alike and begin before another; return when the last was."""
        # Who ended is known to all a round later, and who waits is asked by all in another.
        if self.alike >= len(self.batches) + len(self.ended) and self.batches[self.turn].decoding:
            go_round(self, horizon)
            self.alike = len(self.ended)
            if self.next_seconds >= horizon:
                return self.seen
            at = self.next_seconds
        waits, batch, index = len(self.front.waiting), self.batches[self.turn], self.turn
        runs, ended = batch.decoding, len(batch.trace.finished)
        self.run(at)
        same = runs == batch.decoding and ended == len(batch.trace.finished) and not self.front.prompts
        self.alike = self.alike + 1 if same and waits == len(self.front.waiting) else 0
        self.causes[index] = self.front.cause
        return at

    def run(self, at: float) -> None:
        """Make the next batch at a time, that of `next_seconds`, and book its step through all stages."""
        front, index, ended = self.front, self.turn, self.ended
        if at > ended[-1]:
            ended.extend([at] * len(ended))
        if front.waiting:
            front.clocks[front.cause] += at - self.seen
        batch, self.seen = self.batches[index], at
        self.turn = (index + 1) % len(self.batches)
        if not batch.decoding and self._is_idle(at):
            self._pass_on(batch, at)
            return
        begin, now = batch.now if batch.decoding else at, front.now
        if front.pending or front.waiting:
            front.take_in(at)
            front.now = now
        own = batch.waiting, batch.prompts, batch.pending
        batch.waiting, batch.prompts, batch.pending = front.waiting, front.prompts, front.pending
        self._share(index, at)
        batch.now, batch.decided = begin, at
        done, step = at, batch.next_step(at, single=True)
        front.cause = batch.cause
        self._note()
        if step.steps:
            self.launched = at + front.table.launching_seconds
            done = self._pass_stages(step.seconds, begin)
            self._book(index, step, begin, done)
        elif front.waiting:
            self.refused_until = min([until for until, _, _ in self.kept if until > at], default=math.inf)
        ended.append(done if done > ended[-1] else ended[-1])
        front.allocated = batch.allocated
        if batch is not front:
            batch.waiting, batch.prompts, batch.pending = own

    def _is_idle(self, at: float) -> bool:
        """Whether an empty batch finds nobody to take: none waits, or nothing has changed since the last turn."""
        front = self.front
        if front.prompts or not self.noted or (front.pending and front.pending[0].ready <= at + 1e-12):
            return False
        return not front.waiting or at < self.refused_until

    def _pass_on(self, batch: Scheduler, at: float) -> None:
        """Make an empty batch, which ends as the one before it does."""
        batch.now = batch.decided = at
        self.ended.append(at if at > self.ended[-1] else self.ended[-1])
        if self.front.waiting:
            batch.cause = self.front.cause
        else:
            self.front.cause = batch.cause

    def _book(self, index: int, step: Step, begin: float, done: float) -> None:
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

    def _pass_stages(self, seconds: float, begin: float) -> float:
        """Return when a step that begins at a time is through all stages, each as it becomes free."""
        done, free = begin, self.free
        each = seconds / len(free)
        for stage, before in enumerate(free):
            free[stage] = done = (done if done > before else before) + each
        return done

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
