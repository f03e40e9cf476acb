"""Up to which rate batches of a pipeline that take from one list keep as many sequences each as the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.arrays import np
from shardwise.serving.load._batches import EQUAL

if TYPE_CHECKING:
    from shardwise.serving.load._steady import Replicas

# A batch that has gathered sequences is told from one that has as many as others where a cycle is so much longer.
_CLEARLY = 1.1
# The share of the rate from which they gather up to which numbers that spread do not. Of 27 points that this leaves of
# 32 pipelines of SGLang and TensorRT-LLM at random (2 to 8 stages, six models, 2026-12-01) time per token is within
# 10 % of the simulation in 23; of 53 up to the rate itself in 38.
_ROOM = 0.75
# Shares of the capacity up to which batches that are made ahead are even: of equal answers, of others. Simulated with
# Llama-3.1-8B in 2 and 4 stages of vLLM, 2026-12-01.
_AHEAD = (0.5, 0.8)


def gathering_rate(form: Replicas) -> Any:
    """Return requests a second of a group from which one batch of a pipeline may take in most of who comes: [layout].

    Let a step of n sequences, with the prompts that took the places of those that ended, have stages of t(n) seconds.
    The batch with the longest is back as it has passed all B, a cycle of B t(m); the others come right behind it, each
    a stage of its own after the one before. Who comes in the rest of the cycle is the first one's: of r sequences a
    second n = r t(n) are in each other, and m = r (B t(m) - (B - 1) t(n)). That has the solution m = n, which is
    stable while B r t' < 1, and where seconds grow faster than sequences another, which keeps what it has: m sequences
    that get r (B t(m) - (B - 1) t(n)) >= m. Infinite where no number of them does; batches made ahead of those in the
    stages take what came in the step of another.
    """
    batches, policy, p = form.batches, form.policy, form.prices
    n, steps, lanes = np.asarray(p.counts, float), max(form.moments.steps, 1e-9), batches.lanes[:, None]
    own = batches.piped & (policy.shared_waiting and not policy.batches_ahead)
    cycle = np.asarray(p.decode, float) + np.asarray(p.added, float)[0] * n / steps
    gathers = np.zeros_like(n) > 0
    for k in range(n.shape[-1] if own.any() else 0):
        longer = cycle[:, k : k + 1] / cycle
        gathers = gathers | ((n * (1 + lanes * (longer - 1)) >= n[:, k : k + 1]) & (longer >= _CLEARLY))
    return np.where(own & gathers, lanes * n / (steps * cycle), np.inf).min(axis=-1)


def even_share(form: Replicas) -> Any:
    """Return the share of its capacity up to which the closed form knows what runs in each batch: [layout]."""
    if form.policy.batches_ahead and form.policy.shared_waiting:
        return np.where(form.batches.piped[:, 0], _AHEAD[0 if form.moments.overlap > EQUAL else 1], 1.0)
    return np.minimum(_ROOM * gathering_rate(form) / form.capacity, 1.0)


def gathering_notes(form: Replicas, many: int) -> list[str]:
    """Return what is said of the capacity of so many groups whose batches gather sequences before it, if they do."""
    rate = float(gathering_rate(form)[0])
    if not rate < float(form.capacity[0]):
        return []
    note = f"from about {rate * many:,.3g} requests/s on one batch of the pipeline may take in most that come"
    return [f"{note}: the capacity is that of equal batches, latencies are simulated"]
