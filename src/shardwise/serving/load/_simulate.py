"""Continuous batching, iteration by iteration, with macro steps: one scheduler a group of attention data parallelism.

Between two changes of the batch (an arrival that may be admitted, a piece of a prompt, the end of a request, a full
cache) every decode step has the same sequences and each context grows by one token: such a run of steps is priced at
its middle, since attention over a cache is linear in the context. So the work is a few events a request, not one an
iteration. Schedulers: vLLM vllm/v1/core/sched/scheduler.py, SGLang python/sglang/srt/managers/scheduler.py,
TensorRT-LLM _torch/pyexecutor/scheduler.py; what they differ in is a `Policy`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from operator import sub

from shardwise.serving.load._requests import CACHE, SLOTS, STEP, TOKENS, Request, Step
from shardwise.serving.load._state import SchedulerState


class Scheduler(SchedulerState):
    """Queue, batch and cache of one group of ranks: `next_step` decides what runs, `run` books that it ran.

    `follow` gives the next request of a user of a closed loop when one has ended, None when there is no more.
    """

    @property
    def first_end(self) -> float:
        """When the first of the sequences that decode ends if nobody else comes, or an earlier time."""
        seconds = self.table.decode(self.decoding, self.contexts / self.decoding)
        return self.now + (self.ends[0][0] - self.step) * seconds

    @property
    def starts(self) -> bool:
        """Whether prompts would run in the next step."""
        return bool(self.prompts or (self.waiting and self._refused(self.waiting[0], self._room(), 0) is None))

    def place_seconds(self, queued: float) -> float:
        """Return seconds by which a prompt runs later, elsewhere, for the place that its cache is given here.

        Half a step of who decodes now, where that is done between two steps, less what it has waited for others anyhow.
        """
        if not (self.policy.place_first and self.decoding):
            return 0.0
        return max(self.table.decode(self.decoding, self.contexts / self.decoding) / 2 - queued, 0.0)

    def next_step(self, horizon: float, waiting: bool = False, single: bool = False) -> Step:
        """Return what runs next, which is asked again by a time; prompts that are held do not run.

        Of a batch that waits for others after every step a single one is asked for.
        """
        self.horizon = horizon
        # No step takes more than this; only near the end of the cache is looked closer.
        if self.used + self.policy.step_tokens + self.decoding * self.made > self.capacity:
            while self._overflows():
                self._preempt()
        pieces = None
        if self.waiting or self.prompts or waiting:
            late = self.waiting and self.waiting[0].ready > self.decided and self.decoding and not self.prompts
            if waiting or (late and self.policy.async_scheduling):
                self.cause, waiting = STEP, True
            if (self.prompts or self.waiting) and not waiting:
                pieces = self._schedule()
        self.barred = False
        if not pieces:
            return self._decode_step(single)
        decoding = self.decoding if self.policy.mixed else 0
        context = self.contexts / decoding if decoding else 0.0
        each = [(tokens, request.past) for request, tokens in pieces]
        tokens, table = decoding * self.table.verified + sum([tokens for tokens, _ in each]), self.table
        spared = self.clock.left(self.now, table.linear[tokens]) * table.spared[tokens] if self.clock else 0.0
        return Step(pieces, 1, table.mixed(decoding, context, each, spared), tokens)

    def overshoot(self) -> bool:
        """Let a step pass whose sequences have all ended; False where none runs, or prompts were scheduled instead."""
        if self.overshot <= self.now or self.decoding or self.prompts or self.waiting[0].ready <= self.decided:
            return False
        self._pass_time(self.overshot - self.now, 0.0)
        return True

    def goes_on(self, step: Step) -> bool:
        """Return whether a step is pieces of prompts that go on, and no sequence waits for a token of it."""
        waits = self.policy.mixed and self.decoding
        return bool(step.pieces) and not waits and all(one.past + tokens < one.target for one, tokens in step.pieces)

    def repriced(self, step: Step, steps: int) -> float:
        """Return seconds of each of fewer decode steps than were planned."""
        if step.pieces or steps == step.steps or not self.decoding:
            return step.seconds
        return self.table.decode(self.decoding, self.contexts / self.decoding + (steps - 1) / 2)

    def run(self, step: Step, steps: int, seconds: float) -> None:
        """Book so many iterations, each of so many seconds."""
        if step.pieces:
            decoding = self.decoding if self.policy.mixed else 0
            alone = self.table.decode(decoding, self.contexts / decoding) if decoding else 0.0
            if self.clock:
                self.clock.ran(self.now, step.seconds)
            own = min(step.seconds, seconds)  # Experts that take the tokens of all groups spare the fullest some.
            self.spent = self.spent[0] + own - alone, self.spent[1] + seconds - own
            self._run_prompts(step.pieces, seconds)
            return
        if seconds != step.seconds:
            self.spent = self.spent[0], self.spent[1] + steps * (seconds - self.repriced(step, steps))
        trace, made = self.trace, self.made
        if trace.stalls:
            trace.decoded(seconds, self.decoding, steps, made)
        else:
            trace.gaps.append((seconds / made, round(self.decoding * steps * made)))
        self._pass_time(seconds * steps, seconds)
        trace.iterations += steps
        self.unseen = (self.unseen + steps) % self.policy.receive_steps
        self._decoded(steps)
        if self.policy.overshoots and not (self.decoding or self.prompts):
            self.overshot = self.now + seconds
        if self.used > trace.most_cache_tokens:
            trace.most_cache_tokens = self.used

    def _room(self) -> int:
        """Return the prompt tokens that a step has room for beside its decoding sequences."""
        return self.policy.step_tokens - (self.decoding * self.table.verified if self.policy.mixed else 0)

    def _overflows(self) -> bool:
        """Return whether the next step of all that runs finds no place in the cache."""
        if self.decoding + len(self.prompts) < 2:
            return False
        ahead, room = 0, self._room()
        for request in self.prompts:
            ahead += min(request.target - request.past, max(room - ahead, 0))
        return self.used + ahead + self.decoding * self.made > self.capacity

    def _preempt(self) -> None:
        """Send the youngest away; its blocks stay in the prefix cache until others take them."""
        if self.prompts:
            request = self.prompts.pop()
            self.used -= request.past + self.half
            request.kept = request.past
        else:
            while not self.order[-1].running:
                self.order.pop()
            request = self.order.pop()
            request.running = False
            # It may run on in another batch of a pipeline, whose end it then has.
            self.ends = [one for one in self.ends if one[2] is not request]
            heapify(self.ends)
            request.settle(self.spent, self.now)
            tokens = request.cache_tokens - self.made * (request.last_step - self.step)
            request.made = min(round(tokens) - request.input_tokens, request.output_tokens)
            self.decoding -= 1
            self.contexts -= tokens
            self.used -= tokens + self.half
            request.target = request.kept = round(tokens)
        self.reserved -= self.policy.reserved_share * (request.output_tokens - request.made)
        self.used += self.prefixes.give(request)
        request.preemptions += 1
        request.past, request.stamp = 0, self.allocated
        self.trace.preemptions += 1
        self.waiting.appendleft(request)
        self.barred = True

    def _hit_tokens(self, request: Request) -> int:
        """Return the tokens of a prompt that the prefix cache has, or that came from the pool that computed them."""
        if not (request.cached_tokens or request.preemptions or request.blocks or request.remote):
            return 0
        if request.remote and not request.preemptions:
            return request.target - self.policy.recomputed_tokens
        if not self.policy.prefix_cache:
            return 0
        cached = request.cached_tokens
        if request.preemptions:
            cached = max(0, int(request.kept - (self.allocated - request.stamp)))
        if request.blocks:
            self.prefixes.keep(self.capacity - self.used)
            blocks = self.prefixes.hits(request.blocks)[1]
            cached = max(cached, blocks) if request.preemptions else blocks
        if not cached:
            return 0
        return min(cached, request.target - 1) // self.found * self.found

    def _schedule(self) -> list[tuple[Request, int]]:
        """Return the pieces of prompts of the next step: those that run go on, then others are admitted in order."""
        pieces, whole = [], self._room()
        room = whole
        for request in self.prompts:
            if (tokens := min(request.target - request.past, room)) <= 0:
                break
            pieces.append((request, tokens))
            room -= tokens
        self.cause, planned = STEP, whole - room
        while self.waiting:
            request = self.waiting[0]
            if (tokens := self._admit(request, room, planned)) < 0:
                break
            if tokens:
                pieces.append((request, tokens))
                room, planned = room - tokens, planned + tokens
            else:
                self.prompts.remove(request)
                self._first_token(request)
                room -= self.policy.mixed * self.table.verified
        return pieces

    def _admit(self, request: Request, room: int, planned: int) -> int:
        """Admit a waiting request and return the tokens of its first piece; -1 with the cause where it has to wait.

        `planned` are the prompt tokens that the step has already, which will need a place in the cache.
        """
        cause = self._refused(request, room, planned)
        if cause is not None:
            self.cause = cause
            return -1
        hit = self._hit_tokens(request)
        need = request.target - hit
        tokens = room if self.policy.chunked and room < need else need
        self.waiting.popleft()
        self.prompts.append(request)
        begun = max(self.now, self.decided)
        if request.scheduled < 0:
            request.scheduled = begun
            slots, cache, tokens_full, step = map(sub, self.clocks, request.seen)
            # Clocks advance by whole steps; what a request did not see of the step that ran when it came goes off.
            step += begun - request.arrival - request.server_seconds - (slots + cache + tokens_full + step)
            request.waits, request.cached_tokens = (slots, cache, tokens_full, step), hit
            self.trace.hit_tokens += hit
        elif request.joined < 0:
            request.joined = begun
        else:
            self.trace.recomputed_tokens += need
        request.past = hit
        self.used += hit + self.half
        if request.blocks and self.policy.prefix_cache:
            self.used -= self.prefixes.take(request, self.prefixes.hits(request.blocks)[0])
        self.allocated += hit
        self.reserved += self.policy.reserved_share * (request.output_tokens - request.made)
        return tokens

    def _refused(self, request: Request, room: int, planned: int) -> int | None:
        """Return the cause for which a waiting request is not admitted, None where it is."""
        policy = self.policy
        if request.ready > self.decided and policy.async_scheduling and (self.decoding or self.prompts):
            return self.cause
        if self.barred or self.decoding + len(self.prompts) >= self.places:
            return CACHE if self.barred else SLOTS
        hit = self._hit_tokens(request)
        need = tokens = request.target - hit
        if need > room or room <= 0:
            if need and (room <= 0 or (not policy.chunked and (planned or need <= policy.step_tokens))):
                return TOKENS
            tokens = min(need, room) if policy.chunked else need
        future = policy.reserved_share * (request.output_tokens - request.made)
        whole = policy.reserved_share or policy.whole_prompts or request.remote
        needed = (request.target if whole else tokens + hit) + self.half
        if hit and request.blocks:
            needed -= min(self.prefixes.shared(request.blocks), hit)
        used = self.used + planned + self.decoding + self.reserved
        if (self.decoding or self.prompts or self.others) and used + needed + future > self.capacity:
            return CACHE
        return None

    def _run_prompts(self, pieces: Sequence[tuple[Request, int]], seconds: float) -> None:
        """Book a step with pieces of prompts, and a token of each decoding sequence where the engine mixes them."""
        trace = self.trace
        trace.prompted(seconds, self.decoding, self.made if self.policy.mixed else 0.0)
        self._pass_time(seconds, seconds)
        trace.iterations += 1
        self.unseen = 0
        if self.decoding and self.policy.mixed:
            self._decoded(1)
        for request, tokens in pieces:
            request.past += tokens
            self.used += tokens
            self.allocated += tokens
            trace.prompt_tokens += tokens
            if request.past >= request.target:
                self.prompts.remove(request)
                self._first_token(request)
        if self.used > trace.most_cache_tokens:
            trace.most_cache_tokens = self.used

    def _first_token(self, request: Request) -> None:
        """Hand out the token that the end of a prompt gives, and let the request decode from there."""
        if request.blocks and self.policy.prefix_cache:
            self.prefixes.keep(self.capacity - self.used)
            self.used -= self.prefixes.take(request, request.prompt_blocks)
        if self.stage == "prefill":
            self.used -= request.past + self.half
            request.prefilled = self.now
            self._end(request)
            return
        request.made += 1
        if request.first < 0:
            early = request.remote and self.policy.early_first_token
            request.first = max(self.decided, request.ready) if early else self.now
        self.reserved -= self.policy.reserved_share
        if request.made >= request.output_tokens:
            self.used -= request.past + self.half
            self._end(request)
            return
        self.decoding += 1
        context = request.input_tokens + request.made
        self.contexts += context
        self.used += 1
        request.running = True
        request.start(self.spent, self.now)
        steps = math.ceil((request.output_tokens - request.made) / self.made - 1e-9)
        request.last_step = last = self.step + steps
        request.cache_tokens = context + steps * self.made
        self.admitted += 1
        heappush(self.ends, (last, self.admitted, request))
        self.order.append(request)

    def _decode_step(self, single: bool) -> Step:
        """Return decode steps until a sequence ends, the cache is full, or somebody who may be admitted arrives."""
        ends, table, count = self.ends, self.table, self.decoding
        if not count:
            # All who were admitted came with their only token.
            return Step((), 0, 0.0, 0)
        last, _, request = ends[0]
        while not request.running or request.last_step != last:
            heappop(ends)
            last, _, request = ends[0]
        if single:
            return Step((), 1, table.decode(count, self.contexts / count), count)
        steps, free = last - self.step, self.capacity - self.used
        if steps * count * self.made > free:
            steps = max(int(free // (count * self.made)), 1)
        context = self.contexts / count
        seconds, middle = table.decode(count, context), 0.0
        if self.waiting and self.cause == STEP:
            steps = 1
        elif count + len(self.prompts) < self.policy.max_sequences and not self.waiting:
            until = self.horizon
            if self.pending and self.pending[0].ready < until:
                until = self.pending[0].ready
            until -= self.now
            # Steps grow with the context: over long answers by seconds, of which the first step tells nothing.
            middle = table.decode(count, context + (steps - 1) / 2)
            if until < steps * middle:
                every, middle = self.policy.receive_steps, 0.0
                after = self.unseen + table.steps_within(until, count, context, seconds)
                steps = min(steps, -(-after // every) * every - self.unseen)
        if steps > 1:
            seconds = middle or table.decode(count, context + (steps - 1) / 2)
        return Step((), steps, seconds, count)

    def _decoded(self, steps: int) -> None:
        """Book so many tokens of every decoding sequence, and let go those that have all of theirs."""
        tokens = self.decoding * steps * self.made
        self.step = now = self.step + steps
        self.contexts += tokens
        self.used += tokens
        self.allocated += tokens
        self.reserved -= self.policy.reserved_share * tokens
        if self.prefixes.idle:
            self.prefixes.keep(self.capacity - self.used)
        ends = self.ends
        while ends and ends[0][0] <= now:
            last, _, request = heappop(ends)
            if not request.running or request.last_step != last:
                continue
            request.running = False
            request.settle(self.spent)
            tokens = request.cache_tokens
            self.decoding -= 1
            self.contexts -= tokens
            self.used -= tokens + self.half
            self._end(request)

    def _end(self, request: Request) -> None:
        request.end = self.now
        if request.blocks and self.policy.prefix_cache:
            if self.stage != "prefill":
                self.used -= self.prefixes.take(request, len(request.blocks))
            self.used += self.prefixes.give(request)
        self.trace.finished.append(request)
        if self.follow is not None:
            after = self.follow(request)
            if after is not None:
                self.expect(after)
