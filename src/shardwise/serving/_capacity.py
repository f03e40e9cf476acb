"""How much would fit on one replica: tokens of cache, requests at once, largest batches, longest context.

Each is the largest whole number whose bytes stay within the budget, found by bisection.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.serving._cache import Cache
from shardwise.serving._case import Case
from shardwise.serving._evaluate import Evaluation
from shardwise.serving._memory import blocks_of, budget_bytes, stage_cache
from shardwise.serving._pages import Pages, pages_of
from shardwise.serving._sizes import Stage

_MOST = 2**40


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of one stage as they grow with batch and tokens; plain numbers."""

    case: Case
    stage: Stage[float]
    caches: tuple[tuple[Cache[float], ...], ...]
    weights: float
    beside: float
    prefill_token_bytes: float
    decode_token_bytes: float
    sampling_bytes: float

    @property
    def pages(self) -> Pages | None:
        """The engine's pages for layers that keep different things, None where it has none or layers are alike."""
        if not self.case.engine.page_groups:
            return None
        held: Counter[Cache[float]] = Counter()
        for layers, caches in zip(self.stage.layers, self.caches, strict=True):
            if len({c.limit for c in caches}) > 1:
                return None
            if caches and layers:
                held[max(caches, key=lambda c: (c.token_bytes, c.constant_bytes))] += int(layers)
        return pages_of(held, self.case.engine.block_tokens)

    def sequence_bytes(self, tokens: float) -> float:
        """Return bytes of the cache of one sequence, in whole blocks."""
        return stage_cache(self.caches, self.stage, blocks_of(tokens, self.case.engine.block_tokens))

    def working_bytes(self, batch: int, new_tokens: int) -> float:
        """Return the peak of a forward pass or of sampling for a batch."""
        limit = self.case.job.max_batched_tokens
        step = min(batch * new_tokens, limit) if limit else batch * new_tokens
        forward = max(step * self.prefill_token_bytes, batch * self.decode_token_bytes)
        return max(forward, max(batch, self.case.job.max_sequences) * self.sampling_bytes)

    def room_bytes(self, batch: int, new_tokens: int, tokens: float) -> float:
        """Return what the budget leaves beside a batch of sequences; negative where they do not fit."""
        budget = budget_bytes(self.case, self.weights, self.working_bytes(batch, new_tokens), self.beside)
        return budget - batch * self.sequence_bytes(tokens)


def footprints(case: Case, e: Evaluation[float]) -> tuple[Footprint, ...]:
    """Return the footprints of the stages of an evaluated plan."""
    limit, new = case.job.max_batched_tokens, e.sizes.batch * case.new_input_tokens
    step = _step_tokens(case, new, limit)
    sequences = max(e.sizes.batch, case.job.max_sequences)
    return tuple(
        Footprint(
            case=case, stage=s, caches=e.caches, weights=m.weights, beside=m.context + m.communicators,
            prefill_token_bytes=e.prefill.live_bytes / step, decode_token_bytes=e.decode.live_bytes / e.sizes.batch,
            sampling_bytes=m.sampling / sequences,
        )
        for s, m in zip(e.sizes.stages, e.memory, strict=True)
    )  # fmt: skip


def _step_tokens(case: Case, new: float, limit: int) -> float:
    """Return the tokens of the prefill step that was evaluated."""
    if not limit:
        return new
    if limit >= case.new_input_tokens:
        together = limit // case.new_input_tokens
        return new / math.ceil(new / case.new_input_tokens / together)
    return case.new_input_tokens / -(-case.new_input_tokens // limit)


def largest_that(fits: Callable[[int], bool], most: int = _MOST) -> int:
    """Return the largest whole number up to `most` that fits, 0 where not even 1 does; `fits` must be monotone.

    >>> largest_that(lambda n: n * n <= 50)
    7
    """
    if not fits(1):
        return 0
    low = 1
    while low < most and fits(min(2 * low, most)):
        low = min(2 * low, most)
    if low == most:
        return most
    high = min(2 * low, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What fits on one replica: tokens of cache, requests at full length, batches of each phase, and context."""

    kv_cache_tokens: int
    max_concurrency: int
    largest_batch: int
    largest_prefill_batch: int
    largest_decode_batch: int
    longest_context: int


def capacity_of(case: Case, e: Evaluation[float]) -> Capacity:
    """Return what fits on one replica under the engine's budget.

    `kv_cache_tokens` counts whole blocks for models whose cache grows with every token, what vLLM prints for its groups
    of mixed layers, and elsewhere what requests of the asked length hold together. `largest_prefill_batch` is bound by
    activations and the prompts' cache, `largest_decode_batch` by that of requests at full length; `longest_context`
    keeps batch and output. Without a cache activations alone bound a batch.
    """
    job, stages = case.job, footprints(case, e)
    new, full, batch = case.new_input_tokens, job.total_tokens, int(e.sizes.batch)

    def fits(b: int, fresh: int, tokens: int) -> bool:
        return all(s.room_bytes(b, fresh, tokens) >= 0 for s in stages)

    budgets = [max(0.0, budget_bytes(case, s.weights, s.working_bytes(batch, new), s.beside)) for s in stages]
    cached = any(s.sequence_bytes(full) for s in stages)
    most = largest_that(lambda b: fits(b, new, full))
    requests = min(_count(b, s.sequence_bytes(full)) for b, s in zip(budgets, stages, strict=True)) if cached else most
    extra = largest_that(lambda n: fits(batch, n + new, n + full)) if fits(batch, new, full) else 0
    shorter = largest_that(lambda n: fits(batch, n, n + job.output_tokens + job.prefix_tokens), new)
    return Capacity(
        kv_cache_tokens=_tokens(case, stages, budgets, requests) if cached else 0,
        max_concurrency=requests,
        largest_batch=most,
        largest_prefill_batch=largest_that(lambda b: fits(b, new, job.input_tokens)),
        largest_decode_batch=largest_that(lambda b: fits(b, 1, full)) if cached else most,
        longest_context=full + extra if fits(batch, new, full) else (shorter and shorter + full - new),
    )


def _count(budget: float, each: float) -> int:
    return int(budget // each) if each else _MOST


def _tokens(case: Case, stages: tuple[Footprint, ...], budgets: list[float], requests: int) -> int:
    block = case.engine.block_tokens
    pages = [s.pages for s in stages]
    if all(pages):
        return min(p.capacity_tokens(b) for p, b in zip(pages, budgets, strict=True) if p)
    held = [c for caches in stages[0].caches for c in caches]
    if any(c.limit or c.constant_bytes for c in held):
        return requests * case.job.total_tokens
    each = [s.sequence_bytes(block) for s in stages]
    return min(_count(b, one) for b, one in zip(budgets, each, strict=True)) * block
