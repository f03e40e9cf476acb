"""What data parallelism shards under each word that plans have for it; words with the same properties mean the same."""

from __future__ import annotations

from typing import Literal, TypeAlias

from shardwise.records import dataclass

Groups: TypeAlias = Literal["all", "some", "hybrid"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingRules:
    """Which state is sharded over replicas (arXiv:1910.02054 section 5, arXiv:2304.11277), and over which of them."""

    optimizer: bool = False
    gradients: bool = False
    weights: bool = False
    keeps_gathered: bool = False
    """Weights that forward gathered stay whole until backward (FSDP's reshard_after_forward=False)."""
    groups: Groups = "all"
    """Over all replicas; over some where a plan says how many; or always within groups that hold copies (HSDP)."""

    @property
    def shards(self) -> bool:
        """Whether replicas share any state out."""
        return self.optimizer or self.gradients or self.weights

    @property
    def hybrid(self) -> bool:
        """Whether groups of replicas hold copies of one another's shards whatever their size."""
        return self.groups == "hybrid"


_OPTIMIZER = ShardingRules(optimizer=True, groups="some")
_EVERYTHING = ShardingRules(optimizer=True, gradients=True, weights=True)
SHARDING_RULES: dict[str, ShardingRules] = {
    "none": ShardingRules(),
    "zero1": _OPTIMIZER,
    "distributed-optimizer": _OPTIMIZER,
    "zero2": ShardingRules(optimizer=True, gradients=True),
    "shard-grad-op": ShardingRules(optimizer=True, gradients=True, weights=True, keeps_gathered=True, groups="some"),
    "zero3": _EVERYTHING,
    "fsdp": _EVERYTHING,
    "hsdp": ShardingRules(optimizer=True, gradients=True, weights=True, groups="hybrid"),
}


def find_sharding(word: str) -> ShardingRules:
    """Return what a word of sharding means.

    >>> find_sharding("zero3") == find_sharding("fsdp"), find_sharding("zero2").weights
    (True, False)
    """
    return SHARDING_RULES[word]


def distinct_shardings() -> tuple[str, ...]:
    """Return one word for each way to shard over all replicas, the least sharded first.

    >>> distinct_shardings()
    ('none', 'zero1', 'zero2', 'shard-grad-op', 'zero3')
    """
    found = {rules: word for word, rules in reversed(SHARDING_RULES.items()) if not rules.hybrid}
    return tuple(reversed(found.values()))


def alike(one: str, other: str) -> bool:
    """Return whether two words of sharding mean the same.

    >>> alike("zero1", "distributed-optimizer"), alike("zero2", "zero3")
    (True, False)
    """
    rules = SHARDING_RULES.get(one)
    return rules is not None and rules == SHARDING_RULES.get(other)
