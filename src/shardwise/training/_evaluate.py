"""One fold for numbers, columns and traced numbers: from a model, a cluster and sizes of plans to memory and time."""

from __future__ import annotations

from typing import Any, Generic

from shardwise.cost import Casts, Network, Rates, host_of, network_of, overlap_slowdown, rates_of, with_peers
from shardwise.ledger.number import X, above, largest, total
from shardwise.ledger.op import Op
from shardwise.ledger.traced import Traced, named, plain
from shardwise.models import Block
from shardwise.ops import blocks as ledgers
from shardwise.ops.inputs import LayoutOptions, ParallelSizes, TokenBatch
from shardwise.ops.layout import Layout, lay_out
from shardwise.ops.overlap import CostModel, pairing
from shardwise.plans import DEGREES, Stack, find_rules, find_scaling, with_loss_layers
from shardwise.plans.fields import PLAN
from shardwise.records import dataclass, replace
from shardwise.training._blocks import BlockCost, KnownPrices, WrittenBlocks, fold
from shardwise.training._buffers import answer_logits, gather_buffer, returned_caches, rotary_buffers
from shardwise.training._case import TrainingCase
from shardwise.training._framework_bytes import device_bytes, moved_pages, reserved_bytes, resident_pages
from shardwise.training._fsdp_units import padded
from shardwise.training._ledger import PartLedger, ledger_of
from shardwise.training._memory import stage_memory
from shardwise.training._overlap import paired_blocks
from shardwise.training._parts import ModelBlocks, SharedWeights, StageMemory, in_flight_of
from shardwise.training._sizes import PlanSizes
from shardwise.training._stages import Stages
from shardwise.training._step import StepJob, StepSeconds, boundary_seconds, stage_seconds, step_seconds
from shardwise.training._update import with_adapter_states, with_states
from shardwise.training._weights import ParameterCounts, elements, frozen_weights, gradient_shapes, tensor_sides


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation(Generic[X]):
    """Memory and time of a plan or of a column of plans."""

    stages: tuple[Stages[X], ...]
    memory: tuple[StageMemory[X], ...]
    peak: X
    reserved: X
    required: X
    needed: X
    """All that a device shows but `resident` pages of optimizer state; what of it may not leave is `required`."""
    resident: X
    moved: X
    """Pages that an update moves onto the device, and as many off it."""
    step: StepSeconds[X]
    parts: ModelBlocks[X]
    layout: Layout[X]
    sizes: PlanSizes[X]
    rates: Rates[X]
    network: Network[X]


def layout_of(case: TrainingCase, sizes: PlanSizes[X]) -> Layout[X]:
    """Return the layout of a block under the sizes of a plan."""
    p, (dtype, width) = case.recipe.precision, case.layer_type
    zero = 0 * sizes.tp
    dropout = case.model.dropout if case.job.dropout is None else case.job.dropout
    work = TokenBatch(
        B=sizes.micro_batch * case.job.sequences,
        S=zero + case.job.seq_len + (case.tuning.virtual_tokens if case.tuning else 0),
        context=zero + (case.tuning.prefix_tokens if case.tuning else 0),
        activation_bytes=width,
        weight_bytes=width,
        gradient_bytes=p.gradient_bytes,
        dtype=dtype,
        dropout=dropout,
        softmax_dropout=case.job.softmax_dropout,
        attention_dropout=case.job.attention_dropout,
        hidden_dropout=case.job.hidden_dropout,
        density=case.job.attention_density,
        imbalance=case.job.expert_imbalance,
        capacity_factor=case.job.capacity_factor,
        pad_to_capacity=case.job.pad_to_capacity,
        widest_group=case.widest_group,
    )
    choices = LayoutOptions(
        stack=with_loss_layers(case.stack),
        layout=case.plan.layout,
        sequence_parallel=case.plan.sequence_parallel,
        cp_kind=case.plan.cp_kind,
        tuning=case.tuning,
        autocast=case.autocast,
        stops_early=not case.reenters,
    )
    ways = ParallelSizes(tp=sizes.tp, tp2=sizes.tp2, cp=sizes.cp, ep=sizes.ep, etp=sizes.etp, panels=sizes.panels)
    return lay_out(ways, work, choices)


def parts_of(
    case: TrainingCase, y: Layout[X], costs: CostModel[X], known: KnownPrices[X] | None = None
) -> ModelBlocks[X]:
    """Return every kind of layer, the embedding, the head and the loss of a model, folded."""
    model, known_ops = case.model, None if known is None else known.ledger(y)
    written = ledger_of(model, case.plan, case.kinds, y, known_ops)

    def folded(lines: PartLedger[X]) -> BlockCost[X]:
        cost = fold(lines.ops or ledgers.nothing(y), costs, lines.units, f"{lines.label}: ", known)
        return replace(
            cost,
            elements=sided(case, cost.elements, lines.ops),
            adapters=with_adapter_states(case.recipe, cost.adapters, lines.ops),
            gradient_shapes=gradient_shapes(lines.ops) if case.shapes_gradients else {},
        )

    loss = folded(written.loss)
    tables = [w for o in written.embedding.ops for w in o.weights if w.role == "embedding"]
    return ModelBlocks(
        stream_bytes=y.residual("stream", model.hidden, "").size_bytes,
        kinds=tuple(map(folded, written.kinds)),
        embedding=folded(written.embedding),
        head=folded(written.head),
        loss=loss,
        answer=answer_logits(case, y, loss.kept_bytes),
        table=total((w.elements for w in tables if w.trainable), 0 * y.tokens),
        frozen_table=total((w.stored_bytes for w in tables if not w.trainable), 0 * y.tokens),
        shared=shared_of(case, y),
        gather_buffer=gather_buffer(case, y),
        mask=ledgers.attention_masks(y, model),
        rotary=rotary_buffers(case, y),
        caches=returned_caches(case, y),
        shared_table=model.embedding and bool(model.tied or model.mtp),
    )


def shared_of(case: TrainingCase, y: Layout[X]) -> tuple[SharedWeights[X], ...]:
    """Return the blocks that share weights, not adapters, and the layers that run them (Zamba2, arXiv:2411.15242)."""
    uses: dict[Block, list[int]] = {}
    for i, kind in enumerate(case.kinds):
        for block in (kind.block, *kind.block.also):
            if block.shared_weights:
                uses.setdefault(replace(block, also=()), []).append(i)
    written = {block: ledgers.block_ops(y, block, case.model.hidden) for block in uses}
    return tuple(
        SharedWeights(
            elements=sided(case, elements(ops, 0 * y.tokens), ops),
            kinds=tuple(uses[block]),
            frozen=frozen_weights(ops, 0 * y.tokens),
        )
        for block, ops in written.items()
    )


def sided(case: TrainingCase, counts: ParameterCounts[X], ops: tuple[Op[X], ...]) -> ParameterCounts[X]:
    """Return parameters with their optimizer state, and the sides of their tensors where shards pad them."""
    counts = with_states(case.recipe, counts, ops)
    return replace(counts, sides=tensor_sides(ops)) if case.stack.fsdp_padding != "flat" else counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables(Generic[X]):
    """The blocks of a model, folded, and the message between stages: what composition reads.

    They depend on how a layer is split and on the micro-batch, not on the pipeline, on replicas or on sharding.
    """

    layout: Layout[X]
    parts: ModelBlocks[X]
    boundary_bytes: X


def machine_of(case: TrainingCase, shared: dict[str, tuple[X, ...]]) -> CostModel[X]:
    """Return what blocks run on: rates of the device, links, and where the groups of each axis lie."""
    stack, compute = case.stack, case.recipe.precision.compute
    kernels = stack.attention_kernel, stack.experts_kernel, stack.library
    busy = case.cluster.num_devices > 1
    rates = rates_of(case.cluster.device, compute, stack.eager_launch_seconds, case.efficiencies, kernels, busy)
    scaling = find_scaling(compute, stack.settings.fp8_recipe)
    if scaling is not None and rates.cast_traffic:
        rates = replace(rates, casts=Casts.of(scaling, case.recipe.turns_weights))
    network = with_peers(network_of(case.cluster, case.efficiencies))
    return CostModel(
        rates=rates,
        network=network,
        group_shapes=shared,
        overlap=case.overlap,
        exposed_axes=case.efficiencies.exposed_axes,
        replicas=overlap_slowdown(case.cluster, compute, case.efficiencies),
        host=host_of(case.cluster, stack.host_update_bytes_per_second) if case.recipe.uses_host else None,
        module_launch=stack.module_launch_seconds,
        gradient_launch=stack.gradient_launch_seconds,
        module_hook=stack.zero3_hook_seconds,
    )


def tables_of(
    case: TrainingCase, costs: CostModel[X], sizes: PlanSizes[X], known: KnownPrices[X] | None = None
) -> Tables[X]:
    """Return every block of a model folded for the sizes of plans, as it runs under their schedule."""
    tables = tables_apart(case, costs, sizes, known)
    return replace(tables, parts=paired_blocks(costs, pairing(case.stack, case.plan.schedule), tables.parts))


def tables_apart(
    case: TrainingCase, costs: CostModel[X], sizes: PlanSizes[X], known: KnownPrices[X] | None = None
) -> Tables[X]:
    """Return every block of a model folded for the sizes of plans, no micro-batch beside another.

    `known` keeps prices for other ways to recompute the same.
    """
    y = layout_of(case, sizes)
    return Tables(layout=y, parts=parts_of(case, y, costs, known), boundary_bytes=boundary_bytes(case, y))


def memory_of(
    case: TrainingCase, sizes: PlanSizes[X], parts: ModelBlocks[X], stages: tuple[Stages[X], ...]
) -> tuple[StageMemory[X], ...]:
    """Return the memory of each run of stages."""
    recipe, schedule = case.recipe, case.plan.schedule
    in_flight = (in_flight_of(schedule, case.stack, sizes, s) for s in stages)
    each = (stage_memory(recipe, sizes, parts, s, depth) for s, depth in zip(stages, in_flight, strict=True))
    return tuple(map(named_stage, each, stages))


def peak_of(stages: tuple[Stages[X], ...], memory: tuple[StageMemory[X], ...]) -> X:
    """Return the bytes of the heaviest stage at its fullest."""
    return named(largest([counted(s, m.peak) for s, m in zip(stages, memory, strict=True)]), "peak memory")


def reserved_of(stack: Stack, stages: tuple[Stages[X], ...], memory: tuple[StageMemory[X], ...]) -> X:
    """Return what the caching allocator holds at most on the stage where that is most, workspaces left out."""
    per_stage = [counted(s, reserved_bytes(stack, m)) for s, m in zip(stages, memory, strict=True)]
    return named(largest(per_stage), "reserved memory")


def paged_of(stages: tuple[Stages[X], ...], memory: tuple[StageMemory[X], ...]) -> X:
    """Return the bytes of optimizer state that may leave the device, of the stage with most of it."""
    return largest([counted(s, m.paged) for s, m in zip(stages, memory, strict=True)])


def hosted_of(stages: tuple[Stages[X], ...], memory: tuple[StageMemory[X], ...]) -> X:
    """Return the bytes that lie on the host for a device, of the stage with most of them."""
    return largest([counted(s, m.host) for s, m in zip(stages, memory, strict=True)])


def paging_seconds(costs: CostModel[X], moved: X) -> X:
    """Return seconds in which an update brings so many bytes of its state, behind as many that leave for them.

    A page comes in when another has left (uvm_pmm_gpu.c pick_and_evict_root_chunk holds the allocation until then).
    """
    if costs.host is None:
        return 0 * moved
    return named(2 * moved / costs.host.link_bytes_per_second, "pages of optimizer state over the host link")


def boundary_bytes(case: TrainingCase, y: Layout[X]) -> X:
    """Return the bytes of the residual streams that one stage hands to the next (Megatron-LM schedules.py)."""
    return case.model.streams * y.residual("boundary", case.model.hidden, "").size_bytes


def scatters_sends(case: TrainingCase) -> bool:
    """Return whether each tensor-parallel rank sends its share of a message that all of them need."""
    # Under sequence parallelism each rank sends its own share already: nothing is left to scatter.
    return case.stack.scattered_sends and not case.plan.sequence_parallel


def send_of(case: TrainingCase, costs: CostModel[X], sizes: PlanSizes[X], boundary_bytes: X) -> X:
    """Return the seconds of one message between stages."""
    return boundary_seconds(costs, sizes, boundary_bytes, scatters_sends(case))


def step_job(case: TrainingCase, parts: ModelBlocks[X], send: X) -> StepJob[X]:
    """Return what the step needs to know beside its blocks."""
    return StepJob(
        schedule=case.plan.schedule,
        send=send,
        tied=parts.shared_table and not find_rules(case.plan.schedule).folded,
        tied_bytes=parts.table * case.recipe.precision.gradient_bytes,
    )


# Fields of a plan that the blocks of a model depend on, and the groups whose messages are theirs.
_BLOCK_FIELDS = tuple(field.key for field in PLAN if field.in_blocks)
_BLOCK_GROUPS = tuple(name for name in DEGREES if name in _BLOCK_FIELDS)


class PricedBlocks:
    """Blocks of a model already folded, for plans of one model, job, cluster and stack that differ elsewhere.

    Operators of one size on groups of one shape take as long, whatever is recomputed.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[object, ...], Tables[float]] = {}
        self._machines: dict[bool, CostModel[float]] = {}
        self._prices: dict[tuple[object, ...], KnownPrices[float]] = {}
        self._written: WrittenBlocks[float] = WrittenBlocks()

    def elsewhere(self) -> KnownPrices[float]:
        """Return the operators of the plans without prices, for a machine of other rates."""
        return KnownPrices(written=self._written)

    def machine(self, case: TrainingCase, sizes: PlanSizes[float]) -> CostModel[float]:
        """Return what the blocks of a plan run on."""
        host = case.recipe.uses_host
        if host not in self._machines:
            self._machines[host] = machine_of(case, sizes.group_shapes)
        return replace(self._machines[host], group_shapes=sizes.group_shapes)

    def tables(self, case: TrainingCase, machine: CostModel[float], sizes: PlanSizes[float]) -> Tables[float]:
        """Return the folded blocks of a plan, those of an earlier one where they are the same."""
        # Sharded weights are cast apart from autocast, and what re-enters a checkpoint depends on both.
        fields = (getattr(case.plan, name) for name in (*_BLOCK_FIELDS, "sharding", "offload"))
        key = (*fields, bool(case.plan.recompute_layers), *(sizes.group_shapes.get(name) for name in _BLOCK_GROUPS))
        if key not in self._tables:
            placed = (case.recipe.uses_host, *sizes.group_shapes.items())
            self._tables[key] = tables_of(case, machine, sizes, self._prices.setdefault(placed, self.elsewhere()))
        return self._tables[key]


def evaluate(
    case: TrainingCase, sizes: PlanSizes[X], stages: tuple[Stages[X], ...], priced: PricedBlocks | None = None
) -> Evaluation[X]:
    """Return memory and time for the sizes of one plan, a column of plans, or traced sizes.

    `priced`, of plain numbers alone, keeps blocks from plan to plan.
    """
    known: Any = priced
    machine: CostModel[X] = known.machine(case, sizes) if known else machine_of(case, sizes.group_shapes)
    tables: Tables[X] = known.tables(case, machine, sizes) if known else tables_of(case, machine, sizes)
    parts = padded(case.recipe, sizes, tables.parts)
    memory = memory_of(case, sizes, parts, stages)
    reserved, paged, peak = reserved_of(case.stack, stages, memory), paged_of(stages, memory), peak_of(stages, memory)
    chip, workspace = case.cluster.device, case.workspace_at(sizes.tp)
    device, required = device_bytes(case.stack, case.cluster, sizes, (reserved, peak), workspace)
    room = chip.usable_memory_bytes
    moved = moved_pages(paged, device, room)
    job = step_job(case, parts, send_of(case, machine, sizes, tables.boundary_bytes))
    paging = paging_seconds(machine, moved) if case.recipe.optimizer.paged else 0.0
    job = replace(job, paging=paging, spared=spared_seconds(case, machine, sizes, parts, stages))
    return Evaluation(
        stages=stages,
        memory=memory,
        peak=peak,
        reserved=reserved,
        needed=device,
        required=required,
        resident=resident_pages(paged, device, room),
        moved=moved,
        step=step_seconds(machine, sizes, case.recipe, parts, stages, job),
        parts=parts,
        layout=tables.layout,
        sizes=sizes,
        rates=machine.rates,
        network=machine.network,
    )


def spared_seconds(
    case: TrainingCase, costs: CostModel[X], sizes: PlanSizes[X], parts: ModelBlocks[X], stages: tuple[Stages[X], ...]
) -> X:
    """Return by how many seconds the last micro-batch of a replica is shorter than the others; 0 where none is."""
    zero, whole = 0 * sizes.num_micro, case.plan.micro_batch
    rest = case.job.global_batch // case.plan.dp % whole
    if not rest:
        return zero
    last = replace(sizes, micro_batch=sizes.micro_batch * (rest / whole))
    small = padded(case.recipe, last, tables_of(case, costs, last).parts)
    of_all = [stage_seconds(costs, sizes, case.recipe, parts, s).busy for s in stages]
    of_last = [stage_seconds(costs, last, case.recipe, small, s).busy for s in stages]
    return total(of_all, zero) - total(of_last, zero)


def step_of(
    case: TrainingCase,
    sizes: PlanSizes[X],
    stages: tuple[Stages[X], ...],
    machine: CostModel[X] | None = None,
    known: KnownPrices[X] | None = None,
) -> StepSeconds[X]:
    """Return the seconds of a step alone, on a machine of other rates where one is given; `known` keeps prices."""
    machine = machine_of(case, sizes.group_shapes) if machine is None else machine
    tables = tables_of(case, machine, sizes, known)
    parts = padded(case.recipe, sizes, tables.parts)
    job = step_job(case, parts, send_of(case, machine, sizes, tables.boundary_bytes))
    job = replace(job, spared=spared_seconds(case, machine, sizes, parts, stages))
    return step_seconds(machine, sizes, case.recipe, parts, stages, job)


def counted(stage: Stages[X], value: X) -> X:
    """Return a stage's value, or zero where the run is padding of a column."""
    return above(stage.count, 0, value, 0 * value)


def named_stage(memory: StageMemory[X], stage: Stages[X]) -> StageMemory[X]:
    """Return the memory of equal stages with its peak named by their places, where it is traced."""
    if not isinstance(memory.peak, Traced):
        return memory
    first, last = int(plain(stage.position)), int(plain(stage.position + stage.count)) - 1
    name = f"stage {first}" if first >= last else f"stages {first} to {last}"
    return replace(memory, peak=named(memory.peak, name))
