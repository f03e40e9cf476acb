"""What batches take in a cycle by the prompts in it: what the tables of cycles are made of."""

from __future__ import annotations

from typing import Any

from shardwise.records import dataclass
from shardwise.serving.load._pipeline import LanePrices

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
    """What experts add, or take, with the tokens of all batches; 0 in a pipeline."""
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
    together: Any = 1.0
    """Prompts that begin at once in a batch: what tables call a prompt is so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piled:
    """Prices where prompts pile up in some batches, and how often these are as unlike as that: [layout, place]."""

    prices: CyclePrices
    share: Any
