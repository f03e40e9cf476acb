"""Seconds of one optimizer step: pipeline of micro-batches, exposed data-parallel messages, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

from shardwise.ledger.number import X, above, divide, is_plain, largest, minimum, total
from shardwise.ledger.traced import named
from shardwise.ops.overlap import CostModel, merge, pairing, sends_overlap
from shardwise.plans import Schedule, find_rules
from shardwise.records import dataclass, replace
from shardwise.training._adding import adding_seconds
from shardwise.training._blocks import BlockCost
from shardwise.training._offload import host_traffic
from shardwise.training._overlap import covering_passes, data_parallel_seconds, host_waits, once_a_step, sharding_waits
from shardwise.training._parts import ModelBlocks, Recipe
from shardwise.training._sizes import PlanSizes, micro_batches_a_run
from shardwise.training._stages import Stages
from shardwise.training._state import boundary_messages, state_seconds, table_seconds
from shardwise.training._update import optimizer_seconds, orthogonal_seconds
from shardwise.training.schedules import (
    PipelineShape,
    PipelineTime,
    StageRun,
    find_schedule,
    least_pipeline_seconds,
    pipeline_time,
    slowest_work,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSeconds(Generic[X]):
    """Seconds of one micro-batch on one stage, and the messages in them by axis.

    Of a step's first forward pass on a stage, and of its last backward pass, `first` and `last` are the shares of a
    micro-batch in what they alone wait for: a pipeline that keeps weights gathered waits for them once.
    """

    forward: X
    backward_input: X
    backward_weight: X
    recompute: X
    compute: X
    exposed: dict[str, X]
    hidden: dict[str, X]
    first: X
    last: X
    unpaired: X

    @property
    def busy(self) -> X:
        """Seconds of forward and backward."""
        return self.forward + self.backward_input + self.backward_weight

    def passes(self, often: X | float) -> tuple[X, X]:
        """Return the seconds of so many (forward, backward) passes."""
        return often * self.forward, often * (self.backward_input + self.backward_weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds(Generic[X]):
    """Seconds of a step and what they are made of."""

    total: X
    pipeline: PipelineTime[X]
    stages: tuple[StageSeconds[X], ...]
    gradients_exposed: X
    gradients_hidden: X
    parameters_exposed: X
    parameters_hidden: X
    optimizer: X
    overhead: X


def weighted(parts: ModelBlocks[X], stage: Stages[X], pick: Callable[[BlockCost[X]], X]) -> X:
    """Return a number of every block of a stage, added up."""
    layers = (n * pick(k) for n, k in zip(stage.layers, parts.kinds, strict=True))
    ends = stage.embeds * pick(parts.embedding) + stage.ends * (pick(parts.head) + pick(parts.loss))
    return total(layers, 0 * stage.count) + ends


def weighted_axes(
    parts: ModelBlocks[X], stage: Stages[X], pick: Callable[[BlockCost[X]], dict[str, X]]
) -> dict[str, X]:
    """Return numbers by axis of every block of a stage, added up."""
    axes: dict[str, X] = {}
    ends = ((stage.embeds, parts.embedding), (stage.ends, parts.head), (stage.ends, parts.loss))
    for n, folded in (*zip(stage.layers, parts.kinds, strict=True), *ends):
        for axis, seconds in pick(folded).items():
            axes[axis] = axes[axis] + n * seconds if axis in axes else n * seconds
    return axes


def stage_seconds(
    costs: CostModel[X],
    sizes: PlanSizes[X],
    recipe: Recipe,
    parts: ModelBlocks[X],
    stage: Stages[X],
    bare: bool = False,
) -> StageSeconds[X]:
    """Return seconds of one micro-batch on a stage, all its chunks together; `bare` ones add up no gradients."""
    w, zero = sharding_waits(costs, sizes, recipe, parts, stage), 0 * stage.count
    added = zero if bare else adding_seconds(costs, sizes, recipe, parts, stage)
    once = once_a_step(sizes, recipe)
    ahead, behind = w.ahead + w.lost_ahead, w.behind + w.lost_behind
    replay = weighted(parts, stage, lambda k: k.replay)
    exposed, hidden = weighted_axes(parts, stage, lambda k: k.exposed), weighted_axes(parts, stage, lambda k: k.hidden)
    if recipe.shards_gradients:
        exposed["dp"], hidden["dp"] = w.ahead + w.behind, w.hidden
    sums = weighted(parts, stage, lambda k: zero + k.sharded) if recipe.shards_weights else zero
    merge(exposed, {"tp": sums} if recipe.shards_weights else {})
    forward = weighted(parts, stage, lambda k: k.forward) + ahead
    backward_input = weighted(parts, stage, lambda k: k.backward_input) + replay + behind + sums
    backward_weight = weighted(parts, stage, lambda k: k.backward_weight) + added
    if recipe.offload:
        moved = host_traffic(recipe, sizes, parts, stage)
        waits, covered = host_waits(costs, recipe, moved, stage, (forward, backward_input + backward_weight))
        forward, backward_input = forward + waits[0], backward_input + waits[1]
        exposed["host"], hidden["host"] = waits[0] + waits[1], covered
    return StageSeconds(
        forward=named(forward, "forward of a micro-batch"),
        backward_input=named(backward_input, "input gradients and recompute of a micro-batch"),
        backward_weight=named(backward_weight, "weight gradients of a micro-batch"),
        recompute=replay,
        compute=weighted(parts, stage, lambda k: k.compute) + w.lost_ahead + w.lost_behind + added,
        exposed=exposed,
        hidden=hidden,
        first=zero + once * ahead,
        last=zero + once * behind,
        unpaired=zero + weighted(parts, stage, lambda k: zero + k.unpaired),
    )


def once_seconds(sizes: PlanSizes[X], counts: Sequence[X], each: Sequence[X]) -> X:
    """Return seconds that stages take once a step, as the micro-batch that fills or drains the pipeline meets them.

    It passes the first chunk of every stage; the other chunks of the slowest stage follow one after another.
    """
    way = total((n * one for n, one in zip(counts, each, strict=True)), 0 * sizes.pp)
    slowest = largest([above(n, 0, one, 0 * one) for n, one in zip(counts, each, strict=True)])
    return divide(way + (sizes.vpp - 1) * slowest, sizes.vpp)


def drained(once: PipelineTime[X], runs: X) -> PipelineTime[X]:
    """Return the seconds of a pipeline that runs so often in a step, and drains each time."""
    busy, bubble, sent = (
        named(runs * one, words)
        for one, words in zip(
            (once.busy, once.bubble, once.exposed_send),
            ("slowest stage computes", "pipeline bubble", "exposed pipeline messages"),
            strict=True,
        )
    )
    return PipelineTime(total=busy + bubble + sent, busy=busy, bubble=bubble, exposed_send=sent)


def with_waits(
    sizes: PlanSizes[X],
    runs: tuple[StageRun[X], ...],
    timed: tuple[StageSeconds[X], ...],
    alone: PipelineTime[X],
    mirrored: bool,
) -> PipelineTime[X]:
    """Return the seconds of a pipeline with what stages wait for once a step; what others wait for is bubble."""
    counts = [run.count for run in runs]
    once = once_seconds(sizes, counts, [sizes.num_micro * (t.first + t.last) for t in timed])
    whole = tuple(
        replace(run, forward=t.forward, backward_input=t.backward_input) for run, t in zip(runs, timed, strict=True)
    )
    busy = named(sizes.num_micro * slowest_work(whole, mirrored=mirrored), "slowest stage computes", unit="s")
    bubble = named(alone.busy + alone.bubble + once - busy, "pipeline bubble", unit="s")
    return replace(alone, total=busy + bubble + alone.exposed_send, busy=busy, bubble=bubble)


def with_lone_passes(
    recipe: Recipe, schedule: Schedule, shape: PipelineShape[X], timed: Sequence[StageSeconds[X]], once: PipelineTime[X]
) -> PipelineTime[X]:
    """Return the seconds of a pipeline whose first forwards and last backwards have no micro-batch beside them.

    Megatron-LM core/pipeline_parallel/schedules.py get_pp_rank_microbatches and combined_1f1b.py: warm-up, one forward
    longer, and cool-down wait for messages of experts. That is p - 1 chunks of filling, p (v - 1) of a round and one.
    """
    if pairing(recipe.stack, schedule) == "never" or find_rules(schedule).paired:
        return once
    alone = minimum(shape.num_stages, shape.num_micro) * largest([t.unpaired for t in timed])
    bubble = once.bubble + named(alone, "expert messages of passes without a pair")
    return replace(once, total=once.busy + bubble + once.exposed_send, bubble=bubble)


def boundary_seconds(costs: CostModel[X], sizes: PlanSizes[X], size: X, scattered: bool) -> X:
    """Return seconds of one message between stages; scattered sends move 1/tp of it and gather over the fast links."""
    zero = 0 * sizes.pp
    return above(sizes.pp, 1, state_seconds(costs, boundary_messages(sizes, size, scattered), zero), zero)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepJob(Generic[X]):
    """What the step needs to know beside its blocks: schedule, message between stages, tied table, paging seconds.

    `spared` are the seconds that a last micro-batch which is smaller than the others does not take.
    """

    schedule: Schedule
    send: X
    tied: bool
    tied_bytes: X
    paging: X | float = 0.0
    spared: X | float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinedStep(Generic[X]):
    """The micro-batches of a step: seconds of one on each run of stages, and of all through the pipeline."""

    job: StepJob[X]
    stages: tuple[StageSeconds[X], ...]
    pipeline: PipelineTime[X]


def runs_of_seconds(stages: tuple[Stages[X], ...], per_stage: tuple[StageSeconds[X], ...]) -> tuple[StageRun[X], ...]:
    """Return what a pipeline needs to know of its stages: what every micro-batch takes."""
    return tuple(
        StageRun(
            count=s.count,
            forward=t.forward - t.first,
            backward_input=t.backward_input - t.last,
            backward_weight=t.backward_weight,
        )
        for s, t in zip(stages, per_stage, strict=True)
    )


def least_piped_seconds(
    costs: CostModel[X],
    sizes: PlanSizes[X],
    recipe: Recipe,
    parts: ModelBlocks[X],
    stages: tuple[Stages[X], ...],
    schedule: Schedule,
) -> X:
    """Return seconds that all micro-batches never take less than, whatever is sent between stages and between copies.

    They never fall when a time of a block grows.
    """
    bare = replace(recipe, sharding="none", offload=())
    timed = [stage_seconds(costs, sizes, bare, parts, s, bare=True) for s in stages]
    shape = PipelineShape(num_stages=sizes.pp, num_chunks=sizes.vpp, num_micro=sizes.num_micro,
                          send=0 * sizes.num_micro, overlap_send=True)  # fmt: skip
    return least_pipeline_seconds(schedule, runs_of_seconds(stages, tuple(timed)), shape)


def update_seconds(
    costs: CostModel[X], sizes: PlanSizes[X], recipe: Recipe, parts: ModelBlocks[X], stages: tuple[Stages[X], ...]
) -> X:
    """Return the seconds of the optimizer on the stage that takes longest."""
    return largest(
        [
            above(
                s.count,
                0,
                optimizer_seconds(costs, recipe, sizes, parts, s) + orthogonal_seconds(costs, recipe, sizes, parts, s),
                0 * s.count,
            )
            for s in stages
        ]
    )


def piped_seconds(
    costs: CostModel[X],
    sizes: PlanSizes[X],
    recipe: Recipe,
    timed: tuple[StageSeconds[X], ...],
    runs: tuple[StageRun[X], ...],
    job: StepJob[X],
) -> PipelinedStep[X]:
    """Return the seconds of all micro-batches through the pipeline, and of what stages wait for once a step."""
    shape = PipelineShape(
        num_stages=sizes.pp,
        num_chunks=sizes.vpp,
        num_micro=micro_batches_a_run(sizes, recipe.stack),
        send=named(job.send, "stage boundary message"),
        overlap_send=sends_overlap(costs, recipe.stack, job.schedule),
    )
    pipeline = with_lone_passes(recipe, job.schedule, shape, timed, pipeline_time(job.schedule, runs, shape))
    if recipe.stack.settings.pipeline_runs > 1:
        pipeline = drained(pipeline, divide(sizes.num_micro, shape.num_micro))
    if recipe.shards_gradients and recipe.stack.pipeline_keeps_gathered:
        pipeline = with_waits(sizes, runs, timed, pipeline, find_schedule(job.schedule).mirrored)
    if not is_plain(job.spared, 0):
        busy = named(pipeline.busy - named(job.spared, "what the last micro-batch lacks"), "micro-batches")
        pipeline = replace(pipeline, busy=busy, total=busy + pipeline.bubble + pipeline.exposed_send)
    return PipelinedStep(job=job, stages=timed, pipeline=pipeline)


def tied_seconds(costs: CostModel[X], sizes: PlanSizes[X], job: StepJob[X]) -> X:
    """Return seconds in which the first and the last stage add up the gradients of the table that they share."""
    return named(table_seconds(costs, sizes, job.tied_bytes), "tied table gradients")


def scoring_seconds(sizes: PlanSizes[X], stages: tuple[StageSeconds[X], ...]) -> X:
    """Return the seconds of a forward pass over a step's batch: every micro-batch, and the filling of the pipeline."""
    slowest = largest([s.forward for s in stages])
    return named((sizes.num_micro + divide(sizes.pp - 1, sizes.vpp)) * slowest, "pass without gradients")


def exposed_seconds(sizes: PlanSizes[X], stages: tuple[Stages[X], ...], piped: PipelinedStep[X]) -> X:
    """Return the seconds of a step's micro-batches in messages that nothing hides, of the stage with the most."""
    each = (
        above(s.count, 0, total((x for axis, x in t.exposed.items() if axis != "host"), 0 * s.count), 0 * s.count)
        for s, t in zip(stages, piped.stages, strict=True)
    )
    return sizes.num_micro * largest([0 * sizes.pp, *each]) + piped.pipeline.exposed_send


def with_update(
    costs: CostModel[X],
    sizes: PlanSizes[X],
    recipe: Recipe,
    parts: ModelBlocks[X],
    stages: tuple[Stages[X], ...],
    piped: PipelinedStep[X],
) -> StepSeconds[X]:
    """Return the seconds of a step: its micro-batches, what data parallelism exposes, and the update."""
    job, per_stage, pipeline = piped.job, piped.stages, piped.pipeline
    often = covering_passes(sizes, job.schedule)
    reduced = [
        data_parallel_seconds(costs, recipe, parts, s, t.passes(often)) for s, t in zip(stages, per_stage, strict=True)
    ]
    grads, grads_hidden, gather, gather_hidden = (
        largest([above(s.count, 0, row[i], 0 * row[i]) for s, row in zip(stages, reduced, strict=True)])
        for i in range(4)
    )
    update = update_seconds(costs, sizes, recipe, parts, stages) + job.paging
    if job.tied:
        grads = grads + tied_seconds(costs, sizes, job)
    overhead = 0 * sizes.pp + recipe.stack.step_overhead_seconds
    parts_of_it = named(grads, "gradients exposed") + named(gather, "weight gather exposed") + update
    whole = named(pipeline.total, "pipeline") + parts_of_it + overhead
    if recipe.scorings or recipe.critics:
        # The adapter of a critic is within the update and the messages of all that trains; its passes are its own.
        trained = recipe.critics * (whole - overhead) + recipe.critic_adapters * pipeline.total
        scoring = recipe.scorings * scoring_seconds(sizes, per_stage) + trained
        scoring = named(scoring, "passes without gradients, and other models that train")
        whole, overhead = whole + scoring, overhead + scoring
    if recipe.slack or recipe.waiting:
        slower = recipe.slack * whole + recipe.waiting * (exposed_seconds(sizes, stages, piped) + grads + gather)
        slower = named(slower, "tuned as most runs", "cost/bands.toml, step_seconds")
        whole, overhead = whole + slower, overhead + slower
    return StepSeconds(
        total=named(whole, "step"),
        pipeline=pipeline,
        stages=per_stage,
        gradients_exposed=grads,
        gradients_hidden=grads_hidden,
        parameters_exposed=gather,
        parameters_hidden=gather_hidden,
        optimizer=update,
        overhead=overhead,
    )


def step_seconds(
    costs: CostModel[X],
    sizes: PlanSizes[X],
    recipe: Recipe,
    parts: ModelBlocks[X],
    stages: tuple[Stages[X], ...],
    job: StepJob[X],
) -> StepSeconds[X]:
    """Return the seconds of one optimizer step."""
    timed = tuple(stage_seconds(costs, sizes, recipe, parts, s) for s in stages)
    piped = piped_seconds(costs, sizes, recipe, timed, runs_of_seconds(stages, timed), job)
    return with_update(costs, sizes, recipe, parts, stages, piped)


def slowest_stage(step: StepSeconds[float]) -> int:
    """Return the index of the run of stages that sets the pace of the pipeline."""
    busy = [s.busy for s in step.stages]
    return busy.index(max(busy))


def axis_seconds(step: StepSeconds[float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds of a step that messages take by axis: (exposed, hidden).

    They are those of the slowest stage, messages of data parallelism and between stages included.
    """
    slowest = step.stages[slowest_stage(step)]
    times = step.pipeline.busy / slowest.busy
    exposed = {axis: times * s for axis, s in slowest.exposed.items()}
    hidden = {axis: times * s for axis, s in slowest.hidden.items()}
    merge(exposed, {"pp": step.pipeline.exposed_send})
    merge(exposed, {"dp": step.gradients_exposed + step.parameters_exposed})
    merge(hidden, {"dp": step.gradients_hidden + step.parameters_hidden})
    return exposed, hidden
