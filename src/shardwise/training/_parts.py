"""What the memory of a stage is made of: the recipe, the blocks of a model, micro-batches in flight, and the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Generic, Literal, TypeAlias, get_args

from shardwise.ledger.number import X, above, divide, maximum, minimum, total
from shardwise.ledger.traced import Contribution, Traced, named
from shardwise.ops.overlap import pairing
from shardwise.plans import Optimizer, Precision, Schedule, Sharding, Stack, find_rules, find_scaling, find_sharding
from shardwise.records import dataclass, replace
from shardwise.training._blocks import BlockCost
from shardwise.training._sizes import PlanSizes, micro_batches_a_run
from shardwise.training._stages import Stages
from shardwise.training._weights import FrozenWeights, ParameterCounts, elements
from shardwise.training.schedules import PipelineShape, find_schedule, in_flight


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What each parameter costs: precision, optimizer, sharding, and how the framework keeps and updates it.

    `splits_replicas` says that the optimizer is sharded over groups of replicas, not over all of them, `offload` which
    copies lie in the host's memory. `adapters` is the precision of adapters, None where there are none, `slack` the
    share of a step that it takes longer than a run tuned for a record, `waiting` that of its exposed messages beside
    it. `copies` are frozen copies of all weights beside them, `critics` models as large that train beside,
    `critic_adapters` adapters that do so on the same weights, `scorings` passes over a batch without gradients.
    `turns_weights` says that narrow GEMMs take a turned copy of a weight for the input gradient, `autocast` that GEMMs
    take 16-bit copies of fp32 weights (`TrainingCase.autocast`), `reenters` that checkpoints are reentrant.
    """

    precision: Precision
    adapters: Precision | None = None
    optimizer: Optimizer
    sharding: Sharding
    stack: Stack
    splits_replicas: bool = False
    offload: tuple[str, ...] = ()
    slack: float = 0.0
    waiting: float = 0.0
    copies: int = 0
    critics: int = 0
    critic_adapters: int = 0
    scorings: int = 0
    turns_weights: bool = False
    autocast: bool = False
    reenters: bool = False

    @property
    def narrow_bytes(self) -> float:
        """Bytes an element that the weights of narrow GEMMs take beyond those of the recipe; 0 of wide ones.

        Their copies last from the first micro-batch on (TransformerEngine pytorch/module/base.py quantize_weight,
        is_first_microbatch), but for sharded weights; they are the weights themselves where those are stored so.
        """
        settings = self.stack.settings
        scaling = find_scaling(self.precision.compute, settings.fp8_recipe)
        if scaling is None or not self.stack.copies_weights or self.shards_weights or self.precision.weight_bytes < 2:
            return 0.0
        copies = scaling.turned_bytes if self.turns_weights else scaling.weight_bytes
        return copies - self.precision.weight_bytes * settings.fp8_param_gather

    @property
    def narrow_gather_bytes(self) -> float:
        """Bytes of an element of weights that are stored in fewer than 16 bits when they travel; 0 of others."""
        scaling = find_scaling(self.precision.compute, self.stack.settings.fp8_recipe)
        return scaling.gather_bytes if scaling and self.stack.settings.fp8_param_gather else 0.0

    @property
    def unit_bytes(self) -> float:
        """Bytes of an element of a layer's gathered weights: as they travel (torchao float8/fsdp_utils.py)."""
        return self.narrow_gather_bytes or self.precision.activation_bytes

    @property
    def scatter_bytes(self) -> float:
        """Bytes of an element of sharded gradients when they are reduced: never fewer than those of compute."""
        own = self.stack.scatter_bytes
        return max(own, self.precision.activation_bytes) if own else self.precision.gradient_bytes

    @property
    def whole_gradient_bytes(self) -> float:
        """Bytes of an element of gradients that stay whole until the last micro-batch (no_sync): as made in FSDP1."""
        # torch v2.13 distributed/fsdp/_fully_shard/_fsdp_param.py to_accumulated_grad_if_needed: FSDP2's as reduced.
        made = self.precision.activation_bytes
        return made if self.stack.fsdp_padding == "flat" else max(made, self.scatter_bytes)

    @property
    def cast_bytes(self) -> float:
        """Bytes moved for an element of a narrow GEMM's weight behind its gather; 0 where none is gathered.

        16 bits are read and copies in fewer written, or a turned copy is made of weights that travel in fewer. XLA
        gathers what was cast before (github.com/NVIDIA/JAX-Toolbox docs/NATIVE_FP8.md: AllGather behind `convert`).
        """
        scaling = find_scaling(self.precision.compute, self.stack.settings.fp8_recipe)
        if scaling is None or not self.shards_weights or self.stack.gathers_tensors:
            return 0.0
        copies = scaling.turned_bytes if self.turns_weights else scaling.weight_bytes
        if self.unit_bytes < 2:
            return 2 * max(copies - self.unit_bytes, 0.0)
        return self.unit_bytes + copies

    def offloads(self, what: str) -> bool:
        """Return whether a copy lies in the host's memory: one of `OFFLOADS`."""
        return what in self.offload

    @property
    def uses_host(self) -> bool:
        """Whether anything may lie in the host's memory."""
        return bool(self.offload) or self.optimizer.paged

    @property
    def bucket_elements(self) -> float:
        """Elements of a bucket of gradients or weights: what the user set, else the framework's own."""
        return self.stack.settings.bucket_elements or self.stack.bucket_elements

    @property
    def shards_weights(self) -> bool:
        """Whether weights are gathered for each layer."""
        return find_sharding(self.sharding).weights

    @property
    def keeps_gathered(self) -> bool:
        """Whether weights that forward gathered stay whole until backward (FSDP's reshard_after_forward=False)."""
        return find_sharding(self.sharding).keeps_gathered

    @property
    def replicates_shards(self) -> bool:
        """Whether several groups of replicas hold the same shards, which are summed over them (hybrid sharding)."""
        return find_sharding(self.sharding).hybrid or (self.keeps_gathered and self.splits_replicas)

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are kept sharded."""
        return find_sharding(self.sharding).gradients

    @property
    def shards_optimizer(self) -> bool:
        """Whether optimizer state is sharded."""
        return find_sharding(self.sharding).optimizer

    @property
    def reduces_whole(self) -> bool:
        """Whether every replica gets the whole sum of the gradients, of which it updates a shard at most."""
        return not self.shards_optimizer or self.splits_replicas or self.stack.reduces_whole


MemoryCategory: TypeAlias = Literal[
    "weights", "gradients", "optimizer", "buffers", "activations", "logits", "recomputed", "temporaries"
]
MEMORY_CATEGORIES: tuple[str, ...] = get_args(MemoryCategory)

MemoryMoment: TypeAlias = Literal[  # of a step, at which a stage may be at its fullest
    "forward", "loss", "backward", "gradients complete", "ends reduced", "micro-batch complete", "optimizer step",
    "scoring",
]  # fmt: skip


def categorized(category: MemoryCategory, size_bytes: X, name: str, source: str = "") -> X:
    """Return bytes under a name, of a category of memory."""
    if isinstance(size := named(size_bytes, name, source), Traced):
        size.category = category
    return size


def category_of(part: Contribution) -> str:
    """Return the category of memory of a contribution; what has none is temporaries."""
    return (part.node.category if part.node is not None else "") or "temporaries"


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedWeights(Generic[X]):
    """Weights that several layers run and a stage holds once: the kinds of layer that run them, one entry a use."""

    elements: ParameterCounts[X]
    kinds: tuple[int, ...]
    adapters: ParameterCounts[X] | None = None
    frozen: FrozenWeights[X] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBlocks(Generic[X]):
    """The blocks of a model, folded: one entry a kind of layer, and what stands before and after them.

    `stream_bytes` is one tensor of the residual stream. `shared_table`: the last stage needs the input table too, as
    its head or for multi-token prediction. `gather_buffer` holds the input of a split head, `mask` attention's where
    layers share it, `rotary` what a layer of each kind holds of all positions, `caches` the keys and values it returns,
    `answer` the logits that a loop holds.
    """

    kinds: tuple[BlockCost[X], ...]
    embedding: BlockCost[X]
    head: BlockCost[X]
    loss: BlockCost[X]
    answer: X
    stream_bytes: X
    table: X
    gather_buffer: X
    mask: X
    rotary: tuple[X, ...]
    caches: tuple[X, ...]
    shared_table: bool = False
    shared: tuple[SharedWeights[X], ...] = ()
    frozen_table: X | float = 0

    def with_elements(self, own: Callable[[BlockCost[X] | SharedWeights[X]], ParameterCounts[X]]) -> ModelBlocks[X]:
        """Return the blocks with other parameters."""
        ends: dict[str, Any] = {name: replace(one, elements=own(one)) for name, one in self.ends.items()}
        kinds = tuple(replace(k, elements=own(k)) for k in self.kinds)
        return replace(self, kinds=kinds, shared=tuple(replace(one, elements=own(one)) for one in self.shared), **ends)

    @property
    def ends(self) -> dict[str, BlockCost[X]]:
        """What stands before and after the layers, by name."""
        return {"embedding": self.embedding, "head": self.head, "loss": self.loss}

    @property
    def tuned(self) -> bool:
        """Whether some weights do not train."""
        return any(one.frozen is not None for one in (*self.kinds, *self.ends.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight(Generic[X]):
    """Micro-batches a stage holds at its fullest: of its own layers, of the mirrored stage's, and of the head."""

    own: X
    mirrored: X
    heads: X


def in_flight_of(schedule: Schedule, stack: Stack, sizes: PlanSizes[X], stage: Stages[X]) -> InFlight[X]:
    """Return the micro-batches that a stage holds; of the p + 1 of DualPipe p - i are its own, i + 1 the opposite's.

    Counted from the order of tasks in github.com/deepseek-ai/DualPipe. Where messages of experts run beside the pass
    of another micro-batch, one more forward goes ahead (Megatron-LM core/pipeline_parallel/schedules.py
    get_pp_rank_microbatches, combined_1f1b.py).
    """
    num_micro = micro_batches_a_run(sizes, stack)
    shape = PipelineShape(
        num_stages=sizes.pp, num_chunks=sizes.vpp, num_micro=num_micro, send=0 * sizes.pp, overlap_send=False
    )
    micro_batches = in_flight(schedule, shape, stage.position)
    zero = 0 * micro_batches
    if stack.buffered_stages:
        deep = above(stage.heads, 0, micro_batches, minimum(num_micro, stack.buffered_stages * sizes.pp))
        micro_batches = above(sizes.pp, 1, deep, micro_batches)
    if pairing(stack, schedule) == "always" and not find_rules(schedule).paired:
        micro_batches = minimum(micro_batches + above(sizes.ep, 1, 1 / sizes.vpp, 0 * sizes.vpp), num_micro)
    if find_schedule(schedule).mirrored:
        mirrored = micro_batches * divide(stage.position + 1, sizes.pp + 1)
        return InFlight(own=micro_batches - mirrored, mirrored=mirrored, heads=zero + 1)
    return InFlight(
        own=micro_batches, mirrored=zero, heads=micro_batches if find_schedule(schedule).holds_heads else zero + 1
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory(Generic[X]):
    """Bytes of one stage: what lives through the step, and the total at each moment.

    `framework` is what the framework keeps for the whole run next to the state, `widened` what its optimizer keeps
    until the next step, `fragmented` the peak with what the allocator cannot use twice, `host` what lies in the host's
    memory for the rank, `paged` optimizer state that may lie there, and is in none of the others.
    """

    weights: X
    gradients: X
    optimizer: X
    activations: X
    logits: X
    recomputed: X
    buffers: X
    in_flight: X
    framework: X
    widened: X
    fragmented: X
    host: X
    paged: X
    moments: dict[MemoryMoment, X]
    peak: X

    @property
    def late_block(self) -> X:
        """What the allocator adds to the peak."""
        return self.fragmented - self.peak


def trained(recipe: Recipe, parts: ModelBlocks[X]) -> tuple[tuple[Recipe, ModelBlocks[X]], ...]:
    """Return what trains, each with the recipe of its parameters: those of the model, and those of adapters."""
    if recipe.adapters is None:
        return ((recipe, parts),)
    zero = 0 * parts.table
    adapters = parts.with_elements(lambda one: one.adapters or elements((), zero))
    return (replace(recipe, adapters=None), parts), (
        replace(recipe, precision=recipe.adapters, adapters=None),
        replace(adapters, table=zero, shared_table=False),
    )


def in_compute(recipe: Recipe, parts: ModelBlocks[X]) -> ModelBlocks[X]:
    """Return the parts with all weights as parameters as wide as compute's input: what sharded weights gather as.

    Narrow ones are gathered as they are stored.
    """
    return parts.with_elements(lambda one: all_elements(recipe, one)) if parts.tuned else parts


def all_elements(recipe: Recipe, one: BlockCost[X] | SharedWeights[X]) -> ParameterCounts[X]:
    """Return all weights of a block as parameters as wide as compute's input."""
    elements = one.elements
    for dense, expert, most in _other_parts(one, recipe.precision.activation_bytes):
        elements = replace(
            elements,
            dense_other=elements.dense_other + dense,
            expert_other=elements.expert_other + expert,
            largest=maximum(elements.largest, most),
        )
    return elements


def _other_parts(one: BlockCost[X] | SharedWeights[X], width: float) -> Iterator[tuple[X, X, X]]:
    """Yield (dense, of experts, largest) of the adapters and of the frozen weights of a block."""
    if one.adapters is not None:
        yield one.adapters.dense, one.adapters.expert, one.adapters.largest
    if (f := one.frozen) is not None:
        yield minimum(f.dense_bytes / width, f.dense), minimum(f.expert_bytes / width, f.expert), f.largest


def frozen_bytes(parts: ModelBlocks[X], stage: Stages[X]) -> tuple[X, X, X]:
    """Return the bytes of the frozen weights of a stage, (dense, of experts, beside both: what nothing shards)."""
    zero = 0 * stage.count
    if not parts.tuned:
        return zero, zero, zero

    def of(pick: Callable[[FrozenWeights[X]], X]) -> X:
        frozen = parts.with_elements(lambda one: _standing(one.frozen, pick, one.elements))
        return _owned(frozen, stage, lambda e: (e.largest,))[0]

    table = above(stage.heads, 0, above(stage.embeddings, 0, zero, zero + parts.frozen_table), zero)
    return of(lambda f: f.dense_bytes) + table, of(lambda f: f.expert_bytes), of(lambda f: f.apart_bytes)


def _standing(
    frozen: FrozenWeights[X] | None, pick: Callable[[FrozenWeights[X]], X], like: ParameterCounts[X]
) -> ParameterCounts[X]:
    return replace(like, largest=0 * like.largest if frozen is None else pick(frozen))


def owned(parts: ModelBlocks[X], stage: Stages[X]) -> tuple[X, X, X, X]:
    """Return (dense matrices, other dense, expert matrices, other expert) parameters of a stage.

    Mirrored ones included; weights that layers share are held once.
    """
    dense_matrix, dense_other, expert_matrix, expert_other = _owned(parts, stage, _PARAMETERS)
    return dense_matrix, dense_other + tied_copy(parts, stage), expert_matrix, expert_other


def owned_states(parts: ModelBlocks[X], stage: Stages[X]) -> tuple[X, X]:
    """Return bytes of optimizer state of a stage that single tensors decide, (dense, of experts)."""
    dense, expert = _owned(parts, stage, _STATES)
    return dense, expert


def owned_pages(parts: ModelBlocks[X], stage: Stages[X]) -> tuple[X, X]:
    """Return bytes of optimizer state of a stage in paged memory, (dense, of experts)."""
    dense, expert = _owned(parts, stage, _PAGES)
    return dense, expert


_PARAMETERS = attrgetter("dense_matrix", "dense_other", "expert_matrix", "expert_other")
_STATES = attrgetter("dense_states", "expert_states")
_PAGES = attrgetter("dense_pages", "expert_pages")


def _owned(parts: ModelBlocks[X], stage: Stages[X], pick: Callable[[ParameterCounts[X]], tuple[X, ...]]) -> list[X]:
    """Return numbers of every block that a stage owns, added up."""
    zero = 0 * stage.count
    rows = [(n + m, pick(k.elements)) for n, m, k in zip(stage.layers, stage.mirrored, parts.kinds, strict=True)]
    rows += (stage.embeddings, pick(parts.embedding.elements)), (stage.heads, pick(parts.head.elements))
    own = [total([n * values[i] for n, values in rows], zero) for i in range(len(rows[0][1]))]
    for block in parts.shared:
        uses = total((stage.layers[i] + stage.mirrored[i] for i in block.kinds), zero)
        again = maximum(uses - 1, 0)
        own = [sum_of_uses - again * one for sum_of_uses, one in zip(own, pick(block.elements), strict=True)]
    return own


def tied_copy(parts: ModelBlocks[X], stage: Stages[X]) -> X:
    """Return the parameters of the second copy of a shared table: on a last stage that does not hold the first too.

    Megatron-LM core/models/common/embeddings and core/transformer/multi_token_prediction.py copy the table so.
    """
    zero = 0 * stage.count
    if not parts.shared_table:
        return zero
    return above(stage.heads, 0, above(stage.embeddings, 0, zero, parts.table), zero)
