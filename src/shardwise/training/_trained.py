"""What trains on a stage, by class of parameters, and the largest of its layers and tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from shardwise.ledger.number import X, above, largest, maximum
from shardwise.records import dataclass
from shardwise.training._blocks import BlockCost
from shardwise.training._parts import ModelBlocks, Recipe, owned, tied_copy, trained
from shardwise.training._stages import Stages


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedShare(Generic[X]):
    """What trains alike on a stage: recipe and blocks, parameters of each kind of `owned`, those of the largest."""

    recipe: Recipe
    parts: ModelBlocks[X]
    params: tuple[X, X, X, X]
    largest: X


def shares_of(recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]) -> tuple[TrainedShare[X], ...]:
    """Return what trains on a stage: parameters of the model, and those of adapters."""
    return tuple(
        TrainedShare(recipe=own, parts=some, params=owned(some, stage), largest=_biggest_tensor(some, stage))
        for own, some in trained(recipe, parts)
    )


def largest_layer(parts: ModelBlocks[X], stage: Stages[X], pick: Callable[[BlockCost[X]], X]) -> X:
    """Return a number of the layer of a stage that has most of it."""
    layers = [n + m for n, m in zip(stage.layers, stage.mirrored, strict=True)]
    return largest([above(n, 0, pick(k), 0 * stage.count) for n, k in zip(layers, parts.kinds, strict=True)])


def _biggest_tensor(parts: ModelBlocks[X], stage: Stages[X]) -> X:
    """Return the parameters of the largest weight of a stage."""
    table = above(stage.embeddings + tied_copy(parts, stage), 0, parts.embedding.elements.largest, 0 * stage.count)
    ends = maximum(table, above(stage.heads, 0, parts.head.elements.largest, 0 * stage.count))
    return maximum(largest_layer(parts, stage, lambda k: k.elements.largest), ends)
