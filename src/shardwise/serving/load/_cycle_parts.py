"""What batches take in a cycle by the prompts in it: what the tables of cycles are made of."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from shardwise.arrays import np
from shardwise.records import dataclass
from shardwise.serving._policy import Policy
from shardwise.serving.load._batches import Batches
from shardwise.serving.load._pipeline import Come, LanePrices

# Prompts of a cycle that are priced; between them prices lie on lines.
PRICED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class CyclePrices:
    """Seconds of batches in a cycle: arrays [prompts, layout, place], of `PRICED` prompts in all of them."""

    longest: Any
    """What the longest prompts of a batch add, or take in a step of their own."""
    spread: Any
    """Its variance, since prompts differ."""
    mean: Any
    """The mean of each prompt of a batch with as many."""
    experts: Any
    """What experts add, or take, with the tokens of all batches; in a pipeline a part of what a batch adds."""
    decode: Any
    """A decode step of those without prompts, but for experts: [layout, place]."""
    with_prompts: Any
    """Batches that have prompts: [prompts, layout, 1]."""
    steps: Any
    """Steps that prompts fill which no step has room for, 1 where one has; sequences decode in each of them."""
    pieces: Any
    """Steps that a prompt is spread over: [layout, place]."""
    variance: Any
    """Of what a prompt adds, where groups do not wait for the longest of theirs: [layout, place]."""
    lanes: LanePrices | None
    """Steps of batches that follow each other through stages; None where none do."""
    apart: float
    """How far prompts are in any batch, not in one after another (`crowded`)."""
    come: Come = "apart"
    together: Any = 1.0
    """Prompts that begin at once in a batch: what tables call a prompt is so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piled:
    """Prices where prompts pile up in some batches, and how often these are as unlike as that: [layout, place]."""

    prices: CyclePrices
    share: Any


def sums_of(weights: Any, values: Any) -> Any:
    """Return sums over the first axis; threads of a GEMM would cost more than they bring."""
    return np.einsum("mk,kln->mln", weights, values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wholes:
    """Cycles with none and `PRICED` prompts: arrays [prompts, layout, place], squares of what they differ without."""

    whole: Any
    own: Any
    left: Any
    """What of it is left as the step of a prompt ends, where prompts of the only batch fill several, one by one."""
    square: Any
    spread: Any
    share: Any

    @staticmethod
    def of(prices: CyclePrices, decode: Any, every: Batches, policy: Policy) -> Wholes:
        """Return what cycles take, that of a prompt in them, and batches that run prompts alone."""
        batches, piped, k = every.many, every.piped, np.array(PRICED, float)[:, None, None]
        steps, none = prices.with_prompts / batches, np.zeros((1, *decode.shape))
        if policy.mixed:
            longest, stages = prices.longest, prices.mean * k / batches
            several = np.where(piped | (batches == 1), 1.0, prices.steps)
            joined = decode * several + prices.longest + prices.experts
            share = none + 1 - several + 0 * k
        else:
            longest = np.maximum(prices.longest, np.where(steps < 0.999, prices.decode, 0.0)) - prices.decode
            stages = prices.mean * k / batches - steps * prices.decode
            joined = prices.decode + longest + prices.experts
            share = none + steps
        # Of s steps a prompt runs in any: half of the others are left as its own ends.
        after = np.where((batches > 1) | policy.mixed, 0.0, (1 - 1 / prices.steps) / 2)
        behind = (1 - 1 / batches) * longest
        whole = np.concatenate([decode[None], np.where(piped, decode + stages + behind, joined)])
        # Steps that follow each other are through all stages as soon as if each was alone.
        own = np.concatenate([decode[None], joined])
        zero = none + 0.0 * decode
        return Wholes(
            whole=whole, own=own, left=np.concatenate([zero, joined * after + none]), square=whole**2,
            spread=np.concatenate([zero, prices.spread + none]), share=np.concatenate([zero, share]),
        )  # fmt: skip


def over_both(weights: Any, some: Wholes, other: tuple[Wholes, Any, Any] | None) -> Wholes:
    """Return sums of cycles over weights; where there are others, so likely at each mean and number of prompts."""
    every = {f.name: sums_of(weights, getattr(some, f.name)) for f in fields(Wholes)}
    if other is not None:
        wholes, likely, share = other
        for name in every:
            less = getattr(wholes, name) - getattr(some, name)
            every[name] = every[name] + share * np.einsum("mk,mkl,kln->mln", weights, likely, less)
    return Wholes(**every)
