"""How much would fit on one replica: tokens of cache, requests at once, largest batches, longest context.

Each is the largest whole number that fits by the very bytes of which `fits` is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardwise.serving._cache import Cache
from shardwise.serving._case import Case, most_tokens
from shardwise.serving._evaluate import Evaluation
from shardwise.serving._memory import blocks_of, stage_cache, stage_memories
from shardwise.serving._pages import Pages, pages_of
from shardwise.serving._sizes import Sizes, Stage

_MOST = 2**40
_PATIENCE = 4  # steps on one side before an interval is halved


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What fits on one replica: tokens of cache, requests at full length, batches of each phase, and context.

    2**40 stands where nothing bounds a number.
    """

    kv_cache_tokens: int
    max_concurrency: int
    largest_prefill_batch: int
    largest_decode_batch: int
    longest_context: int


def largest_that(short: Callable[[int], float], most: int = _MOST) -> int:
    """Return the largest whole number up to `most` that is short of nothing, 0 where even 1 is; `short` never falls.

    Illinois' variant of the false position: few steps where `short` is made of straight lines.

    >>> largest_that(lambda n: n * n - 50)
    7
    """
    low, high = 1, most
    at_low, at_high = short(low), short(high)
    if at_low > 0 or at_high <= 0:
        return 0 if at_low > 0 else most
    kept = 0
    while high - low > 1:
        step = int((high - low) * at_low / (at_low - at_high)) if abs(kept) < _PATIENCE else (high - low) // 2
        at = low + min(max(step, 1), high - low - 1)
        found = short(at)
        if found > 0:
            high, at_high, kept = at, found, max(kept, 0) + 1
            at_low /= 2.0 ** (kept > 1)
        else:
            low, at_low, kept = at, found, min(kept, 0) - 1
            at_high /= 2.0 ** (kept < -1)
    return low


def short_by(case: Case, z: Sizes[float], phases: tuple[bool, bool] = (True, True), **job: Any) -> float:
    """Return bytes that the fullest stage lacks for a changed job on a replica that runs (prefill, decode)."""
    case = replace(case, job=replace(case.job, **job))
    stages = stage_memories(case, replace(z, batch=case.job.batch), *phases)
    return max(m.kv_cache - m.cache_budget for m in stages)


def capacity_of(case: Case, e: Evaluation[float]) -> Capacity:
    """Return what fits on one replica under the engine's budget.

    `kv_cache_tokens` is what the batch that was asked leaves room for. `largest_prefill_batch` is of a replica that
    generates nothing, `largest_decode_batch` of one whose prompts come with their cache; `longest_context` keeps batch
    and output, and ends at the positions of the model. Without a cache activations alone bound a batch.
    """
    job, z, past = case.job, e.sizes, case.job.prefix_tokens
    most = largest_that(lambda n: short_by(case, z, batch=n))
    alone = case.job.use_kv_cache and job.output_tokens
    beyond = past + job.output_tokens
    positions = most_tokens(case.model)
    new = largest_that(lambda n: short_by(case, z, input_tokens=past + n), positions - beyond if positions else _MOST)
    return Capacity(
        kv_cache_tokens=_cache_tokens(case, e),
        max_concurrency=most,
        largest_prefill_batch=largest_that(lambda n: short_by(case, z, (True, False), batch=n, output_tokens=0)),
        largest_decode_batch=largest_that(lambda n: short_by(case, z, (False, True), batch=n)) if alone else most,
        longest_context=new and new + beyond,
    )


def _pages(case: Case, stage: Stage[float], caches: tuple[tuple[Cache[float], ...], ...]) -> Pages | None:
    """Return the engine's pages for layers that keep different things, None where it has none or layers are alike."""
    if not case.engine.page_groups:
        return None
    held: Counter[Cache[float]] = Counter()
    for layers, own in zip(stage.layers, caches, strict=True):
        if len({c.limit for c in own}) > 1:
            return None
        if own and layers:
            held[max(own, key=lambda c: (c.token_bytes, c.constant_bytes))] += int(layers)
    return pages_of(held, case.engine.block_tokens)


def _cache_tokens(case: Case, e: Evaluation[float]) -> int:
    """Return tokens of cache beside the working memory of the batch that was asked.

    Whole blocks for models whose cache grows with every token, what vLLM prints for its groups of mixed layers, and
    elsewhere what requests of the asked length hold together.
    """
    stages, block, full = e.sizes.stages, case.engine.block_tokens, case.job.total_tokens
    budgets = [max(0.0, m.cache_budget) for m in e.memory]
    pages = [_pages(case, s, e.caches) for s in stages]
    if all(pages):
        return min(p.capacity_tokens(b) for p, b in zip(pages, budgets, strict=True) if p)
    mixed = any(c.limit or c.constant_bytes for caches in e.caches for c in caches)
    unit: float = blocks_of(full, block) if mixed else block
    each = [stage_cache(e.caches, s, unit) for s in stages]
    counts = [int(budget // one) for budget, one in zip(budgets, each, strict=True) if one]
    return min(counts, default=0) * int(full if mixed else block)
