"""The price of any iteration of an engine, looked up: tables made once from columns of `step_cost`.

A step holds n decoding sequences of a mean context, and pieces of prompts of c new tokens after p cached ones:

    seconds = linear(n + sum c) + decode attention(n, context) + sum prefill attention(c, p) + sampling + host

Where one kernel runs all sequences of a step with prompts, those that decode take what prompts of one token take.
Where a step runs as several ubatches, its tokens cost their sum (`Ubatches`).
Attention and the writes to the cache come from two or three meshes, the rest from two columns of whole steps, so no
second model of time appears. Interpolated steps are within 1 % of `step_cost` (tests/serving/test_load.py).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

from shardwise.arrays import np
from shardwise.cost import family_of
from shardwise.records import dataclass, replace
from shardwise.serving._burst import at_clock, burst_of
from shardwise.serving._case import ServingCase
from shardwise.serving._cost_model import engine_cost_model
from shardwise.serving._host import replayed_tokens
from shardwise.serving._ledger import EngineStep
from shardwise.serving._sizes import ServingSizes, sizes_of
from shardwise.serving._speculation import tokens_per_step
from shardwise.serving._step import decode_cost, step_cost
from shardwise.serving.load._ubatches import ubatches_of

# The largest head of FlashAttention 2.
_FLASH_HEAD = 256
StepPhase = Literal["prefill", "decode"]


def grid(most: float, each: int, first: int) -> list[int]:
    """Return whole numbers from 1 to `most`: all up to `first`, then so many to a doubling.

    >>> grid(100, 2, 4)
    [1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 100]
    """
    points, at = list(range(1, min(first, int(most)) + 1)), float(first)
    while at < most:
        at *= 2 ** (1 / each)
        points.append(min(round(at), int(most)))
    return sorted(set(points))


@dataclass(frozen=True, slots=True)
class _Prices:
    """Columns of steps: seconds of all, of what sequences have of their own, of sampling, of GEMMs of experts."""

    seconds: Any
    cached: Any
    sampling: Any
    experts: Any


def verified_tokens(case: ServingCase) -> int:
    """Return the tokens that a decode step runs of each sequence: its own, and those that were guessed."""
    return case.job.num_speculative_tokens + 1


def step_parts(case: ServingCase, sizes: ServingSizes[Any], step: EngineStep[Any]) -> tuple[Any, Any, Any, Any]:
    """Return seconds of steps, of what sequences have of their own, of sampling and of GEMMs of experts."""
    costs = replace(engine_cost_model(case, sizes), decoding=step.phase == "decode")
    if isinstance(step.clock, np.ndarray) or step.clock != 1:
        costs = at_clock(costs, step.clock)
    cost = (decode_cost if step.phase == "decode" else step_cost)(case, sizes, step, costs)
    return cost.seconds, cost.of_sequences, cost.sampling, cost.routed


def _prices(
    case: ServingCase, phase: StepPhase, sequences: Any, tokens: Any, context: Any, clock: Any = 1.0
) -> _Prices:
    sizes = sizes_of(case.model, case.plan, case.job, case.domains)
    step = EngineStep(phase=phase, sequences=sequences, tokens=tokens, context=context, clock=clock)
    parts, count = step_parts(case, sizes, step), len(context)
    return _Prices(*(np.broadcast_to(np.asarray(part, float), count) for part in parts))


def _prices_of_prompts(case: ServingCase, steps: Sequence[tuple[Any, ...]]) -> list[_Prices]:
    """Return the prices of several columns of steps with prompts: they are one column, whose operators are made once.

    A step is (sequences, tokens of each, context), and its clock where any has one of its own.
    """
    ends = [0, *accumulate(len(context) for _, _, context, *_ in steps)]
    whole = _prices(case, "prefill", *(np.concatenate(column) for column in zip(*steps, strict=True)))
    columns = (whole.seconds, whole.cached, whole.sampling, whole.experts)
    return [_Prices(*(column[start:end] for column in columns)) for start, end in pairwise(ends)]


def runs_as_prompts(case: ServingCase) -> bool:
    """Return whether sequences that decode beside prompts run the kernel of prompts, each as one of a single token.

    That is FlashAttention 2. Heads of more than 256 elements, sinks and caches of 8 bits go to other kernels, which
    split a step or let heads share what they read (github.com/vllm-project/vllm v0.33.0
    vllm/v1/attention/backends/flash_attn.py, supports_head_size, supports_sink and supports_kv_cache_dtype;
    vllm/platforms/cuda.py, _get_backend_priorities: FlashInfer, then Triton).
    """
    heads = [mixer.cached_heads() for block in case.model.kinds for mixer in block.mixers]
    if family_of(case.cluster.device) not in case.engine.attention.beside_prompts or case.cache_element_bytes < 2:
        return False
    return all(one and not one.sinks and one.head_dim <= _FLASH_HEAD for one in heads)


def beside_prompts(case: ServingCase) -> ServingCase:
    """Return a case whose prompts of one token run beside longer ones (`runs_as_prompts`)."""
    attention = replace(case.engine.attention, heads_apart=True)
    return replace(case, engine=replace(case.engine, attention=attention))


def never_replayed(case: ServingCase) -> ServingCase:
    """Return a case whose steps with prompts are never replayed from captured graphs."""
    return replace(case, engine=replace(case.engine, host=replace(case.engine.host, captured_tokens=0)))


def launched_ahead(case: ServingCase) -> ServingCase:
    """Return a case whose host is never behind its device: the price of one token holds what the host takes at least.

    Parts of a step add up to it so.
    """
    return replace(case, engine=replace(case.engine, host=replace(case.engine.host, eager_prompts=False)))


MOST_STEP_TOKENS = 1 << 22
"""Tokens of the largest step that is timed: the table has a row for every number of tokens."""


def launching_seconds(case: ServingCase) -> float:
    """Return seconds of the host to make and launch a step, before it makes another."""
    host = case.engine.host
    return 0.0 if case.efficiencies.ideal else host.step_seconds + host.between_seconds


class StepTable:
    """Seconds of an engine's iterations for up to so many sequences, step tokens and context."""

    def __init__(self, case: ServingCase, max_sequences: int, step_tokens: int, context: int) -> None:
        self.max_sequences, self.step_tokens = max_sequences, step_tokens
        host = case.engine.host.sequence_seconds * (0.0 if case.efficiencies.ideal else 1.0)
        self._host = host
        self.launching_seconds = launching_seconds(case)
        made = tokens_per_step(case.job)
        self.made: int | float = int(made) if made == int(made) else made
        """Tokens that a decode step makes for each sequence."""
        counts = np.array(grid(max_sequences, 12, 64), float)
        contexts = [n for n in grid(max(context, 128), 2, 1) if n >= 64]
        mesh = np.meshgrid(counts, np.array(contexts, float), indexing="ij")
        one = np.ones(mesh[0].size)
        prices = _prices(case, "decode", mesh[0].ravel(), one, mesh[1].ravel())
        shape = mesh[0].shape
        # What does not grow with the context is that of the shortest one: hosts of old engines copy lists of blocks.
        whole = prices.seconds.reshape(shape)
        rest = whole[:, 0] - prices.cached.reshape(shape)[:, 0]
        cached = whole - rest[:, None]
        self.verified = verified_tokens(case)
        plain = rest
        if case.draft:
            # Beside prompts a step verifies as many tokens more; what guesses take comes on top.
            alone = _prices(replace(case, draft=None), "decode", counts, 1 + 0 * counts, contexts[0] + 0 * counts)
            plain = alone.seconds - alone.cached
        every = np.arange(max_sequences + 1)
        asked = np.clip(every, 1, None)
        self._rest: list[float] = np.interp(asked, counts, rest).tolist()
        self._guesses: list[float] = np.interp(asked, counts, rest - plain).tolist()
        self._sampling: list[float] = np.interp(asked, counts, prices.sampling.reshape(shape)[:, 0]).tolist()
        columns = [np.interp(asked, counts, cached[:, i]) for i in range(len(contexts))]
        self._attention: list[list[float]] = np.array(columns).T.tolist()
        self._contexts, self._last_context = contexts, len(contexts) - 1
        self._between = contexts[1:-1]
        self._lines: list[list[tuple[float, float, float, float]]] = [[] for _ in every]
        # Every third number of sequences is priced beside prompts.
        few = np.concatenate([counts[:-1:3], counts[-1:]]) if runs_as_prompts(case) else counts[:0]
        wide = self._prompts(case, step_tokens, context, few)
        self._with_prompts = self._as_prompts(few, wide, columns) if len(few) else self._attention
        self._memo: dict[tuple[int, int], float] = {}

    def _prompts(self, case: ServingCase, step_tokens: int, context: int, few: Any) -> Any:
        """Tabulate prompts: all but attention by the tokens of a step, attention by new and past tokens of a piece.

        Return what a `few` numbers of sequences have of their own as prompts of one token, by their context.
        """
        one = np.ones(1)
        self.burst = burst = burst_of(case)
        """How prompts run before power limits the clock, where that is known."""
        self._launched = float(_prices(never_replayed(case), "prefill", one, one, 0 * one).seconds[0])
        self._replayed = replayed_tokens(case)
        cut = ubatches_of(launched_ahead(case), sizes_of(case.model, case.plan, case.job, case.domains))
        # Of one layout: the first is the only one.
        self._ubatches = replace(cut, later=np.reshape(np.asarray(cut.later, float), (-1,)).tolist()[0])
        tokens = np.array(grid(step_tokens, 12, 16), float)
        new = grid(min(step_tokens, self._ubatches.tokens or step_tokens), 4, 1)
        past = [0, *(n for n in grid(max(context, 256), 2, 1) if n >= 128)]
        mesh = np.meshgrid(np.array(new, float), np.array(past, float), indexing="ij")
        one_token = np.meshgrid(few, np.array(self._contexts, float), indexing="ij")
        alone = np.ones(len(tokens)), tokens, 0 * tokens
        steps: list[tuple[Any, ...]] = [alone, (np.ones(mesh[0].size), mesh[0].ravel(), mesh[1].ravel())]
        if burst:
            clocks = 1.0, 1.0, 1 + burst.share
            steps = [(*one, 0 * one[0] + clock) for one, clock in zip((*steps, alone), clocks, strict=True)]
        prices, flat, *faster = _prices_of_prompts(launched_ahead(case), steps)
        # A step that is replayed has no host behind its device, as none of those launched ahead.
        self._least = float(prices.seconds[0]) if self._replayed else self._launched
        every = np.arange(step_tokens + self.max_sequences * self.verified + 1)
        linear = prices.seconds - prices.cached - prices.sampling
        seconds = np.interp(np.clip(every, 1, step_tokens), tokens, linear)
        self.experts: list[float] = np.interp(every, tokens, prices.experts, left=0.0).tolist()
        """Seconds of GEMMs of experts by the tokens of a step."""
        half = max(step_tokens // 2, 1)
        slope = (seconds[step_tokens] - seconds[half]) / max(step_tokens - half, 1)
        beyond = np.maximum(every - step_tokens, 0)
        self.linear: list[float] = (seconds + slope * beyond).tolist()
        self._new, self._past = new, past
        self._prefill: list[list[float]] = flat.cached.reshape(mesh[0].shape).tolist()
        self._start = float(flat.cached.min())
        if cut.tokens:
            launched = self._start * self._ubatches.extra(every)
            self.linear = (self._by_ubatch(every, tokens, linear) + launched).tolist()
            self.experts = self._by_ubatch(every, tokens, prices.experts).tolist()
        self.spared: list[float] = []
        """Seconds by which products of a step of so many tokens are shorter at the highest clock, where it is known."""
        if faster:
            less = prices.seconds - faster[0].seconds
            less = self._by_ubatch(every, tokens, less) if cut.tokens else np.interp(every, tokens, less)
            self.spared = less.tolist()
        if not len(few):
            return few
        counts, at = one_token[0].ravel(), one_token[1].ravel()
        wide = _prices(launched_ahead(beside_prompts(case)), "prefill", counts, np.ones(len(counts)), at)
        return wide.cached.reshape(one_token[0].shape) - self._start

    def _by_ubatch(self, every: Any, tokens: Any, seconds: Any) -> Any:
        """Return seconds of steps of so many tokens, from those of single ubatches."""
        whole, rest, last = self._ubatches.split(every)
        one = np.interp(np.arange(self._ubatches.tokens + 1), tokens, seconds)
        return whole * one[-1] + last * one[rest.astype(int)]

    def _as_prompts(self, few: Any, wide: Any, alone: list[Any]) -> list[list[float]]:
        """Return seconds that sequences have of their own beside prompts: `wide` at a few numbers, or more alone."""
        every = np.clip(np.arange(self.max_sequences + 1), 1, None)
        columns = [np.maximum(np.interp(every, few, wide[:, i]), one) for i, one in enumerate(alone)]
        rows: list[list[float]] = np.array(columns).T.tolist()
        return rows

    def _attention_with_prompts(self, count: int, context: float) -> float:
        at, row = self._contexts, self._with_prompts[count]
        after = bisect_right(at, context, 1, self._last_context)
        start, first = at[after - 1], row[after - 1]
        return first + (context - start) / (at[after] - start) * (row[after] - first)

    def decode(self, count: int, context: float) -> float:
        """Return seconds of a step of `count` decoding sequences at a mean context."""
        lines = self._lines[count] or self._lines_of(count)
        start, width, first, more = lines[bisect_right(self._between, context)]
        return self._rest[count] + (first + (context - start) / width * more)

    def _lines_of(self, count: int) -> list[tuple[float, float, float, float]]:
        """Return the lines between known contexts of so many sequences: where each starts, how wide, and its values."""
        row, each, lines = self._attention[count], pairwise(self._contexts), self._lines[count]
        lines += [(at, to - at, row[i], row[i + 1] - row[i]) for i, (at, to) in enumerate(each)]
        return lines

    def steps_within(self, seconds: float, count: int, context: float, first: float) -> int:
        """Return how many decode steps from a context on reach so far; each is longer than the first, as given."""
        steps = max(1, math.ceil(seconds / first))
        while steps > 1:
            fewer = max(1, math.ceil(seconds / self.decode(count, context + (steps - 1) / 2)))
            if fewer >= steps:
                break
            steps = fewer
        return steps

    def _prefill_attention(self, new: int, past: int) -> float:
        key = (new, past >> 6)
        known = self._memo.get(key)
        if known is not None:
            return known
        # The middle of those that share a key: what came first must not matter.
        past = past - past % 64 + 32 if past >= 64 else 0
        if 0 < self._ubatches.tokens < new:
            self._memo[key] = seconds = self._attention_of_ubatches(new, past)
            return seconds
        a, b, rows = self._new, self._past, self._prefill
        i = min(max(bisect_right(a, new) - 1, 0), max(len(a) - 2, 0))
        j = min(max(bisect_right(b, past) - 1, 0), len(b) - 2)
        share = (new - a[i]) / (a[i + 1] - a[i]) if len(a) > 1 else 0.0
        over = (past - b[j]) / (b[j + 1] - b[j])
        low = rows[i][j] + over * (rows[i][j + 1] - rows[i][j])
        after = rows[min(i + 1, len(rows) - 1)]
        high = after[j] + over * (after[j + 1] - after[j])
        self._memo[key] = seconds = low + share * (high - low)
        return seconds

    def _attention_of_ubatches(self, new: int, past: int) -> float:
        """Return seconds of a piece of several ubatches; what the later ones launch is in those of the tokens."""
        start, each, cut = self._start, self._ubatches.tokens, self._ubatches
        seconds = start
        for i, at in enumerate(range(0, new, each)):
            own = self._prefill_attention(min(each, new - at), past + at) - start
            seconds += own * (cut.later if i % (cut.in_flight or new) else 1.0)
        return seconds

    def mixed(self, count: int, context: float, pieces: Sequence[tuple[int, int]], spared: float = 0.0) -> float:
        """Return seconds of a step of `count` decoding sequences beside pieces of prompts, each of (new, past) tokens.

        Launches that pieces share count once. Products are `spared` so many seconds by a clock that does not last.
        """
        start, memo = self._start, self._memo
        tokens, attention = count * self.verified, start
        for new, past in pieces:
            tokens += new
            known = memo.get((new, past >> 6))
            attention += (self._prefill_attention(new, past) if known is None else known) - start
        sequences = count + len(pieces)
        sampled = self._sampling[min(sequences, self.max_sequences)]
        seconds = self.linear[tokens] - spared + attention + sampled + self._host * max(sequences - 1, 0)
        least = self._least if tokens <= self._replayed else self._launched
        if not count:
            return max(seconds, least)
        own = self._attention_with_prompts(count, context)
        # No step is shorter for what it has more: waves of tiles are of tokens that are priced apart.
        return max(seconds + self._guesses[count] + own, least, self._rest[count] + own)
