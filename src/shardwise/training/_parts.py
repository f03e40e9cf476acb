"""What the memory of a stage is made of: the recipe, the blocks of a model, micro-batches in flight, and the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, get_args

from shardwise.ledger.number import X, above, maximum, total
from shardwise.ledger.traced import Part, Traced, named
from shardwise.plans import Optimizer, Precision, Sharding, Stack
from shardwise.training._blocks import BlockCost, Elements
from shardwise.training._stages import Stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What each parameter costs: precision, optimizer, sharding, and how the framework keeps and updates it.

    `splits_replicas` says that the optimizer is sharded over groups of replicas, not over all of them, `offload` which
    copies lie in the host's memory.
    """

    precision: Precision
    optimizer: Optimizer
    sharding: Sharding
    stack: Stack
    splits_replicas: bool = False
    offload: tuple[str, ...] = ()

    def offloads(self, what: str) -> bool:
        """Return whether a copy lies in the host's memory: one of `OFFLOADS`."""
        return what in self.offload

    @property
    def bucket_elements(self) -> float:
        """Elements of a bucket of gradients or weights: what the user set, else the framework's own."""
        return self.stack.settings.bucket_elements or self.stack.bucket_elements

    @property
    def shards_weights(self) -> bool:
        """Whether weights are gathered for each layer."""
        return self.sharding in ("zero3", "fsdp", "hsdp", "shard-grad-op")

    @property
    def keeps_gathered(self) -> bool:
        """Whether weights that forward gathered stay whole until backward (FSDP's reshard_after_forward=False)."""
        return self.sharding == "shard-grad-op"

    @property
    def replicates_shards(self) -> bool:
        """Whether several groups of replicas hold the same shards, which are summed over them (hybrid sharding)."""
        return self.sharding == "hsdp" or (self.sharding == "shard-grad-op" and self.splits_replicas)

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are kept sharded."""
        return self.shards_weights or self.sharding == "zero2"

    @property
    def shards_optimizer(self) -> bool:
        """Whether optimizer state is sharded."""
        return self.sharding != "none"

    @property
    def reduces_whole(self) -> bool:
        """Whether every replica gets the whole sum of the gradients, of which it updates a shard at most."""
        return not self.shards_optimizer or self.splits_replicas or self.stack.reduces_whole


MemoryCategory: TypeAlias = Literal[
    "weights", "gradients", "optimizer", "buffers", "activations", "logits", "recomputed", "temporaries"
]
MEMORY_CATEGORIES: tuple[str, ...] = get_args(MemoryCategory)


def held_as(category: MemoryCategory, size_bytes: X, name: str, source: str = "") -> X:
    """Return bytes under a name, of a category of memory."""
    found = named(size_bytes, name, source)
    if isinstance(found, Traced):
        found.category = category
    return found


def category_of(part: Part) -> str:
    """Return the category of memory of a contribution; what has none is temporaries."""
    return (part.node.category if part.node is not None else "") or "temporaries"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared(Generic[X]):
    """Weights that several layers run and a stage holds once: the kinds of layer that run them, one entry a use."""

    elements: Elements[X]
    kinds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBlocks(Generic[X]):
    """The blocks of a model, folded: one entry a kind of layer, and what stands before and after them.

    `stream_bytes` is one tensor of the residual stream. `shared_table` says that the last stage needs the input table
    too: as its head, or for multi-token prediction. `gather_buffer` holds the whole input of a split head,
    `mask` is that of attention where it comes with the data.
    """

    kinds: tuple[BlockCost[X], ...]
    embedding: BlockCost[X]
    head: BlockCost[X]
    loss: BlockCost[X]
    stream_bytes: X
    table: X
    gather_buffer: X
    mask: X
    shared_table: bool = False
    shared: tuple[Shared[X], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight(Generic[X]):
    """Micro-batches a stage holds at its fullest: of its own layers, of the mirrored stage's, and of the head."""

    own: X
    mirrored: X
    heads: X


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory(Generic[X]):
    """Bytes of one stage: what lives through the step, and the total at each moment.

    `beside` is what the framework keeps for the whole run beside the state, `widened` what its optimizer keeps
    until the next step, `late_block` what the allocator adds, `host` what lies in the host's memory for the rank.
    """

    weights: X
    gradients: X
    optimizer: X
    activations: X
    logits: X
    recomputed: X
    buffers: X
    in_flight: X
    beside: X
    widened: X
    late_block: X
    host: X
    moments: dict[str, X]
    peak: X


def owned(parts: ModelBlocks[X], s: Stages[X]) -> tuple[X, X, X, X]:
    """Return (dense matrices, other dense, expert matrices, other expert) parameters of a stage.

    Mirrored ones included; weights that layers share are held once.
    """
    return (
        _owned(parts, s, lambda e: e.dense_matrix),
        _owned(parts, s, lambda e: e.dense_other) + tied_copy(parts, s),
        _owned(parts, s, lambda e: e.expert_matrix),
        _owned(parts, s, lambda e: e.expert_other),
    )


def owned_states(parts: ModelBlocks[X], s: Stages[X]) -> tuple[X, X]:
    """Return bytes of optimizer state of a stage that single tensors decide, (dense, of experts)."""
    return _owned(parts, s, lambda e: e.dense_states), _owned(parts, s, lambda e: e.expert_states)


def _owned(parts: ModelBlocks[X], s: Stages[X], pick: Callable[[Elements[X]], X]) -> X:
    """Return a number of every block that a stage owns, added up."""
    zero = 0 * s.count
    layers = ((n + m) * pick(k.elements) for n, m, k in zip(s.layers, s.mirrored, parts.kinds, strict=True))
    own = total(layers, zero) + s.embeddings * pick(parts.embedding.elements) + s.heads * pick(parts.head.elements)
    for block in parts.shared:
        held = total((s.layers[i] + s.mirrored[i] for i in block.kinds), zero)
        own = own - maximum(held - 1, 0) * pick(block.elements)
    return own


def tied_copy(parts: ModelBlocks[X], s: Stages[X]) -> X:
    """Return the parameters of the second copy of a shared table: on a last stage that does not hold the first too.

    Megatron-LM core/models/common/embeddings and core/transformer/multi_token_prediction.py copy the table so.
    """
    zero = 0 * s.count
    if not parts.shared_table:
        return zero
    return above(s.heads, 0, above(s.embeddings, 0, zero, parts.table), zero)
