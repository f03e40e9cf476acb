"""How much would fit on one replica: tokens of cache, requests at once, largest batches, longest context.

Each is the largest whole number that fits by the very bytes of which `fits` is asked. vLLM V1 hands out caches of mixed
layers in pages of one size (github.com/vllm-project/vllm vllm/v1/core/kv_cache_utils.py, 2026-01): layers that keep the
same things form groups of equal numbers of layers, and a block of the pool serves one group, whose bytes are those of
a page of every layer of the group. Layers with fewer bytes a token have more tokens in a page; the page of recurrent
layers is padded to that of attention, whose block grows until a state fits (vllm/model_executor/models/config.py,
HybridAttentionMambaModelConfig). What the engine prints counts every group as if it grew with the context; a sequence
takes no more blocks of a window than it sees, and one of a state (get_max_concurrency_for_kv_cache_config).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

from shardwise.records import dataclass, replace
from shardwise.serving._batch import BatchCost, reserved_bytes
from shardwise.serving._cache import SequenceCache, keeps_states
from shardwise.serving._case import ServingCase
from shardwise.serving._ledger import StepLedger
from shardwise.serving._memory import StageBytes, blocks_of, caches_of, pool_token_bytes, reserved_cache
from shardwise.serving._sizes import PipelineStage, ServingSizes, sizes_of, take_rows
from shardwise.serving._stated_cache import overstates

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

    Illinois' variant of the false position: few steps where `short` is made of straight lines. On a stair, as blocks of
    a cache make them, steps grow until they leave it.

    >>> largest_that(lambda n: n * n - 50)
    7
    >>> asked = []
    >>> largest_that(lambda n: asked.append(n) or n // 16 * 16 - 4000), len(asked)
    (4015, 10)
    """
    low, high = 1, most
    at_low, at_high = short(low), short(high)
    if at_low > 0 or at_high <= 0:
        return 0 if at_low > 0 else most
    kept, stair = 0, 1
    while high - low > 1:
        step = int((high - low) * at_low / (at_low - at_high)) if abs(kept) < _PATIENCE else (high - low) // 2
        step = max(step, stair) if 2 * stair < high - low else (high - low) // 2
        at = low + min(max(step, 1), high - low - 1)
        missing = short(at)
        stair = 4 * stair if missing == at_low else stair
        if missing > 0:
            high, at_high, kept = at, missing, max(kept, 0) + 1
            at_low /= 2.0 ** (kept > 1)
        else:
            low, at_low, kept = at, missing, min(kept, 0) - 1
            at_high /= 2.0 ** (kept < -1)
    return low


@dataclass(kw_only=True, slots=True)
class _Room:
    """What changed jobs of one case lack on a replica: steps that come again are laid out once."""

    case: ServingCase
    sizes: ServingSizes[float]
    ledgers: dict[object, StepLedger[float]] = field(default_factory=dict)

    def short_by(self, phases: tuple[bool, bool] = (True, True), **job: Any) -> float:
        """Return bytes that the fullest stage lacks for a changed job on a replica that runs (prefill, decode)."""
        case = replace(self.case, job=replace(self.case.job, **job))
        stages = reserved_bytes(case, replace(self.sizes, batch=case.job.batch), phases, self.ledgers)
        return max(m.kv_cache - m.cache_budget for m in stages)


def most_requests(case: ServingCase, cost: BatchCost[float]) -> int:
    """Return the requests at full length that fit on one replica at once."""
    room = _Room(case=case, sizes=cost.sizes)
    return largest_that(lambda n: room.short_by(batch=n))


def capacity_of(case: ServingCase, cost: BatchCost[float], most: int) -> Capacity:
    """Return what fits on one replica under the engine's budget, beside its `most_requests`.

    `kv_cache_tokens` is what the batch that was asked leaves room for. `largest_prefill_batch` is of a replica that
    generates nothing, `largest_decode_batch` of one whose prompts come with their cache; `longest_context` keeps batch
    and output, and ends at the positions of the model. Without a cache activations alone bound a batch.
    """
    job, room, past = case.job, _Room(case=case, sizes=cost.sizes), case.job.prefix_tokens
    alone = case.job.use_kv_cache and job.output_tokens
    beyond = past + job.output_tokens
    positions = case.model.most_tokens
    new = largest_that(lambda n: room.short_by(input_tokens=past + n), positions - beyond if positions else _MOST)
    return Capacity(
        kv_cache_tokens=cache_tokens(case, cost),
        max_concurrency=most,
        largest_prefill_batch=largest_that(lambda n: room.short_by((True, False), batch=n, output_tokens=0)),
        largest_decode_batch=largest_that(lambda n: room.short_by((False, True), batch=n)) if alone else most,
        longest_context=new and new + beyond,
    )


def _pages(
    case: ServingCase, stage: PipelineStage[float], caches: tuple[tuple[SequenceCache[float], ...], ...]
) -> CachePages | None:
    """Return the engine's pages for layers that keep different things, None where it has none or layers are alike."""
    if not case.engine.memory.hybrid_kv_cache_groups:
        return None
    counts: Counter[SequenceCache[float]] = Counter()
    for layers, own in zip(stage.layers, caches, strict=True):
        if len({c.limit for c in own}) > 1:
            return None
        if own and layers:
            counts[max(own, key=lambda c: (c.token_bytes, c.constant_bytes))] += int(layers)
    return pages_of(counts, case.engine.memory.block_tokens)


def state_block(case: ServingCase) -> int:
    """Return the tokens of a block whose end a recurrent state is cached at, 0 where blocks are as in other models."""
    sizes = sizes_of(case.model, case.plan, case.job, case.domains)
    caches = caches_of(case, sizes)
    pages = (_pages(case, stage, caches) for stage in sizes.stages)
    return max((pool.tokens for pool in pages if pool), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _CacheRoom:
    """What bounds the cache of a replica: of every stage its layers, the bytes left for the cache, and its pages."""

    case: ServingCase
    block: int
    stages: Sequence[PipelineStage[float]]
    caches: tuple[tuple[SequenceCache[float], ...], ...]
    budgets: list[float]
    pages: list[CachePages | None]

    @property
    def mixed(self) -> bool:
        """Whether some layers keep less than every token."""
        return any(c.limit or c.constant_bytes for each in self.caches for c in each)

    @property
    def pool_tokens(self) -> int:
        """Tokens of the pool of layers that keep all, where pools have fixed shares: what SGLang prints; else 0."""
        memory, model = self.case.engine.memory, self.case.model
        windows = model.has_windows and memory.window_ratio(model.family)
        if not windows and not (memory.pool_of_states and keeps_states(model.kinds)):
            return 0
        sizes = [pool_token_bytes(self.case, self.caches, stage) for stage in self.stages]
        return int(min((b // size for b, size in zip(self.budgets, sizes, strict=True) if size), default=0))

    def sequences(self, tokens: float) -> int:
        """Return the sequences of so many tokens that fit together, in blocks of the engine."""
        counts = []
        for stage, budget, pages in zip(self.stages, self.budgets, self.pages, strict=True):
            if pages is not None:
                counts.append(pages.sequences(budget, tokens))
            elif one := reserved_cache(self.case, self.caches, stage, blocks_of(tokens, self.block)):
                counts.append(int(budget // one))
        return min(counts, default=0)


def _room_of(
    case: ServingCase,
    stages: Sequence[PipelineStage[float]],
    memory: Sequence[StageBytes[float]],
    caches: tuple[tuple[SequenceCache[float], ...], ...],
) -> _CacheRoom:
    starts = not any(overstates(case, m.cache_budget) for m in memory)
    budgets = [max(0.0, m.cache_budget) * starts for m in memory]
    pages = [_pages(case, stage, caches) for stage in stages]
    block = case.engine.memory.block_tokens
    return _CacheRoom(case=case, block=block, stages=stages, caches=caches, budgets=budgets, pages=pages)


def _cache_tokens(case: ServingCase, room: _CacheRoom) -> int:
    """Return tokens of cache beside the working memory of the batch that was asked.

    Whole blocks for models whose cache grows with every token, what vLLM prints for its groups of mixed layers, and
    elsewhere what requests of the asked length hold together.
    """
    if all(room.pages):
        return min(pool.capacity_tokens(b) for pool, b in zip(room.pages, room.budgets, strict=True) if pool)
    if pool := room.pool_tokens:
        return pool
    full = case.job.total_tokens if room.mixed else room.block
    return room.sequences(full) * int(full)


def _held_tokens(case: ServingCase, room: _CacheRoom, length: float) -> int:
    """Return tokens that sequences of a mean length hold together, 0 where the longest does not fit.

    They are all of the cache where it grows with every token. Windows and states take less of a longer sequence a
    token, so that what the mean of some lengths takes is no less than the mean of what they take.
    """
    if not room.mixed:
        return _cache_tokens(case, room)
    longest = int(case.job.total_tokens)
    if not room.sequences(longest):
        return 0
    return max(int(room.sequences(length) * length), longest)


def cache_tokens(case: ServingCase, cost: BatchCost[float]) -> int:
    """Return tokens of cache that fit on one replica."""
    return _cache_tokens(case, _room_of(case, cost.sizes.stages, cost.memory, cost.caches))


def held_tokens(case: ServingCase, cost: BatchCost[float], length: float) -> int:
    """Return tokens that sequences of a mean length hold together on one replica, 0 where the longest does not fit."""
    return _held_tokens(case, _room_of(case, cost.sizes.stages, cost.memory, cost.caches), length)


def state_blocks(case: ServingCase, cost: BatchCost[float]) -> int:
    """Return the blocks of the pool where layers keep states, 0 elsewhere.

    vLLM raises an error at its start where more sequences may run at once, each of which takes one
    (vllm/v1/worker/gpu_model_runner.py, _check_and_update_cudagraph_mode, 2026).
    """
    room = _room_of(case, cost.sizes.stages, cost.memory, cost.caches)
    if not keeps_states(case.model.kinds) or not all(room.pages):
        return 0
    return min(int(b // pool.block_bytes) for pool, b in zip(room.pages, room.budgets, strict=True) if pool)


def held_tokens_of(case: ServingCase, sizes: ServingSizes[Any], length: float) -> list[int]:
    """Return `held_tokens` of a replica of every layout of some columns, 0 where the model does not fit."""
    memory, caches, tokens = reserved_bytes(case, sizes), caches_of(case, sizes), []
    for row in range(len(sizes.tp)):
        with_cache = [
            (stage, m) for stage, m in zip(sizes.stages, memory, strict=True) if any(n[row] for n in stage.layers)
        ]
        stages, budgets = ([take_rows(part, row) for part in parts] for parts in zip(*with_cache, strict=True))
        tokens.append(_held_tokens(case, _room_of(case, stages, budgets, take_rows(caches, row)), length))
    return tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePages:
    """A pool for mixed layers: bytes of a block, tokens of its smallest page, and the groups that take blocks.

    `kinds` are those groups by what their layers keep: how many, the tokens of a page, and those after which a sequence
    takes no more of them (0: never); of states 0 tokens, and the states of a sequence, each of which takes a page.
    """

    block_bytes: float
    tokens: int
    groups: int
    kinds: tuple[tuple[int, int, int], ...] = ()

    def capacity_tokens(self, budget_bytes: float) -> int:
        """Return tokens of a pool as the engine prints them: blocks of one group, each of the smallest page.

        >>> CachePages(block_bytes=10.0, tokens=16, groups=3).capacity_tokens(95.0)
        48
        """
        return int(budget_bytes // self.block_bytes) // self.groups * self.tokens

    def sequences(self, budget_bytes: float, tokens: float) -> int:
        """Return the sequences of so many tokens that a pool holds.

        A window begins anywhere in its first block (vllm/v1/kv_cache_interface.py, SlidingWindowSpec).

        >>> windows = CachePages(block_bytes=10.0, tokens=16, groups=6, kinds=((1, 16, 0), (5, 16, 128)))
        >>> windows.sequences(10_000.0, 1600), windows.sequences(10_000.0, 16)
        (6, 166)
        """
        blocks = 0
        for groups, page, limit in self.kinds:
            each = math.ceil(tokens / page) if page else limit
            blocks += groups * (min(each, math.ceil((limit - 1) / page) + 1) if page and limit else each)
        return int(budget_bytes // self.block_bytes) // blocks


def group_layers(counts: list[int]) -> int:
    """Return layers of one group: those of the rarest kind, or of the commonest where kinds are nearly even.

    >>> group_layers([5, 25]), group_layers([13, 12])
    (5, 13)
    """
    least, most = min(counts), max(counts)
    return most if most < 1.5 * least else least


def pages_of(counts: Counter[SequenceCache[float]], block: int) -> CachePages | None:
    """Return the pool of so many layers of each cache, None where all layers keep the same kind of thing.

    >>> full, slides = (SequenceCache(token_bytes=4.0, limit=n, constant_bytes=0.0) for n in (0, 128))
    >>> pages_of(Counter({full: 5, slides: 25}), 16)
    CachePages(block_bytes=320.0, tokens=16, groups=6, kinds=((1, 16, 0), (5, 16, 128)))
    """
    growing = [c for c in counts if c.token_bytes]
    if len({(c.limit, bool(c.token_bytes)) for c in counts}) < 2 or not growing:
        return None
    widest = max(c.token_bytes for c in growing)
    state = max(c.constant_bytes for c in counts)
    tokens = block * max(1, math.ceil(state / widest / block))
    size = group_layers(list(counts.values()))
    kinds = tuple(
        (math.ceil(layers / size), int(tokens * widest / c.token_bytes), c.limit)
        if c.token_bytes
        else (math.ceil(layers / size), 0, c.states)
        for c, layers in counts.items()
    )
    groups = sum(each for each, *_ in kinds)
    return CachePages(block_bytes=widest * tokens * size, tokens=tokens, groups=groups, kinds=kinds)


def even_waves(batch: int, room: int) -> tuple[int, int]:
    """Return how many waves a batch takes where so many requests have room at once, and the requests of each.

    >>> even_waves(100, 40)
    (3, 34)
    """
    count = math.ceil(batch / room)
    return count, math.ceil(batch / count)
