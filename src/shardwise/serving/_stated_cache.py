"""The KV cache that a job states in bytes or tokens, in place of what a share of the memory leaves for it.

Stated bytes are allocated at start-up, whatever requests come: where the rest does not leave as much, no server starts
(github.com/vllm-project/vllm v0.33.0 vllm/v1/worker/gpu_worker.py, kv_cache_memory_bytes). Tokens bound what the share
leaves (github.com/sgl-project/sglang 0.5.23 python/sglang/srt/mem_cache/kv_cache_configurator.py).
"""

from __future__ import annotations

from shardwise.ledger.number import X, above, maximum, minimum
from shardwise.ledger.traced import leaf, named
from shardwise.plans import Serving
from shardwise.serving._case import ServingCase
from shardwise.units import show_bytes

# By how much stated bytes may exceed those left: they are often what a log printed, rounded.
_ROUNDED = 1e-9


def states_bytes(job: Serving) -> bool:
    """Return whether a job's stated bytes are what its engine allocates, which a bound of tokens would lower."""
    return bool(job.kv_cache_memory and not job.max_total_tokens)


def left_bytes(case: ServingCase, beside_cache: X) -> X:
    """Return bytes of a device that those beside the cache leave."""
    return leaf("usable memory", case.cluster.device.usable_memory_bytes, "device", "bytes") - beside_cache


def stated_budget(case: ServingCase, budget: X, beside_cache: X, token_bytes: X) -> X:
    """Return the bytes of the cache: those stated, where there are as many, up to those of the most tokens stated."""
    job = case.job
    if job.kv_cache_memory:
        left = left_bytes(case, beside_cache)
        budget = minimum(left, 0 * left + job.kv_cache_memory)
    return minimum(budget, job.max_total_tokens * token_bytes) if job.max_total_tokens else budget


def allocated_cache(case: ServingCase, cache: X, beside_cache: X) -> X:
    """Return the bytes of the batch's `cache`, or those stated where a device has not as many left."""
    if not states_bytes(case.job):
        return cache
    stated = named(0 * cache + case.job.kv_cache_memory, "KV cache as stated")
    least = 0 * cache + (1 - _ROUNDED) * case.job.kv_cache_memory
    return above(least, left_bytes(case, beside_cache), maximum(cache, stated), cache)


def most_beside(case: ServingCase, limit: X, cache: X) -> X:
    """Return what bytes beside a batch's `cache` may come to at most, under a `limit` of both."""
    if not states_bytes(case.job):
        return limit - cache
    return left_bytes(case, maximum(cache, 0 * cache + case.job.kv_cache_memory))


def overstates(case: ServingCase, budget: float) -> bool:
    """Return whether the bytes that a job states are more than a `budget` of bytes has: no engine starts then."""
    return states_bytes(case.job) and budget < (1 - _ROUNDED) * case.job.kv_cache_memory


def overstated(case: ServingCase, budget: float) -> tuple[str, ...]:
    """Return in words that the bytes that a job states are more than a `budget` of bytes has."""
    if not overstates(case, budget):
        return ()
    stated, left = show_bytes(case.job.kv_cache_memory), show_bytes(max(budget, 0.0))
    return (f"kv_cache_memory {stated}: {left} are left for it, and {case.engine.brand} would not start",)
