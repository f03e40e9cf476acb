"""Seconds of one engine step: the price that every answer about serving is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic

from shardwise.cost import collective_seconds
from shardwise.ledger.number import X, above, ceil, largest, maximum, minimum, total
from shardwise.ledger.op import Collective, OpRole
from shardwise.ledger.traced import named
from shardwise.records import dataclass, replace
from shardwise.serving._case import ServingCase
from shardwise.serving._cost_model import EngineCostModel, engine_cost_model
from shardwise.serving._draft import draft_case, draft_ledger, draft_sizes, uses_heads
from shardwise.serving._host import host_seconds, late_seconds
from shardwise.serving._ledger import EngineStep, StepLedger, step_ledger
from shardwise.serving._memory import layers_bytes
from shardwise.serving._placed import LayerCost, add, host_lines, layer_cost
from shardwise.serving._sizes import PipelineStage, ServingSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost(Generic[X]):
    """Seconds of a model in one step: of its kinds of layer, embedding and head, and the message between stages."""

    kinds: tuple[LayerCost[X], ...]
    embedding: LayerCost[X]
    head: LayerCost[X]
    send: X


GROUPS: dict[str, tuple[OpRole, ...]] = {
    "attention": ("attention", "scores", "softmax", "context", "cache_write", "rotary", "indexer", "state"),
    "ends": ("embedding", "head", "sampling"),
    "small": ("norm", "add", "activation", "steps"),
}
"""Roles of operators that people see as one; all others are GEMMs and what routes to them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost(Generic[X]):
    """Seconds of one engine step or of several, FLOPs and bytes moved.

    `operators` (by name, and again by role) and exposed messages and `overhead` of the host, less what steps
    `overlapped`, are `seconds`; `routed` are those of GEMMs of routed experts.
    `slowest_stage` is the longest pipeline stage of one step, its message and the host included.
    """

    seconds: X
    routed: X
    operators: dict[str, X]
    roles: dict[str, X]
    exposed: dict[str, X]
    hidden: dict[str, X]
    overhead: X
    overlapped: X
    slowest_stage: X
    flops: X
    moved_bytes: X

    @property
    def groups(self) -> dict[str, X]:
        """Seconds of operators by what they are: GEMMs, attention with its cache, ends of the model, small ones."""
        grouped = {group: self.of(*roles) for group, roles in GROUPS.items()}
        every = total(self.roles.values(), 0 * self.seconds)
        return {"products": every - total(grouped.values(), 0 * self.seconds), **grouped}

    def of(self, *roles: OpRole) -> X:
        """Return seconds of the operators of some roles."""
        return total((self.roles[role] for role in roles if role in self.roles), 0 * self.seconds)

    @property
    def attention(self) -> X:
        """Seconds of what grows with the context: attention, fused or not, and the indexer of sparse attention."""
        return self.of("attention", "scores", "softmax", "context", "indexer")

    @property
    def of_sequences(self) -> X:
        """Seconds of what each sequence has of its own: attention, writes to its cache, its recurrent state.

        Sequences of a step share all else, which its tokens alone decide.
        """
        return self.attention + self.of("cache_write", "state")

    @property
    def sampling(self) -> X:
        """Seconds of choosing the next tokens."""
        return self.of("sampling")


def _summed(parts: Iterable[tuple[Any, StepCost[X] | LayerCost[X]]]) -> Iterator[dict[str, X]]:
    """Yield seconds by operator, by role, exposed and hidden by axis: the sum of parts, each so many times."""
    every = tuple(parts)
    for name in ("operators", "roles", "exposed", "hidden"):
        sums: dict[str, X] = {}
        for times, part in every:
            add(sums, getattr(part, name), times)
        yield sums


def weighted(steps: list[tuple[StepCost[X], float]], name: str) -> StepCost[X]:
    """Return the weighted mean of steps whose weights add up to one."""
    if len(steps) == 1 and steps[0][1] == 1:
        return replace(steps[0][0], seconds=named(steps[0][0].seconds, name))
    operators, roles, exposed, hidden = _summed((weight, step) for step, weight in steps)

    def mean(pick: str) -> X:
        values: list[X] = [weight * getattr(step, pick) for step, weight in steps]
        return total(values, 0 * values[0])

    return StepCost(
        seconds=named(mean("seconds"), name),
        routed=mean("routed"),
        operators=operators,
        roles=roles,
        exposed=exposed,
        hidden=hidden,
        overhead=mean("overhead"),
        overlapped=mean("overlapped"),
        slowest_stage=mean("slowest_stage"),
        flops=mean("flops"),
        moved_bytes=mean("moved_bytes"),
    )


def gathered(part: LayerCost[X], weights: X, costs: EngineCostModel[X]) -> LayerCost[X]:
    """Return a layer whose weights are sharded over the replicas, with the exposed seconds of gathering them.

    They are gathered one layer ahead; only what takes longer than the work of that layer is exposed.

    ZeRO-Inference gathers each layer's weights before it runs (deepspeed.ai, ZeRO-Inference, 2022-09).
    """
    seconds = collective_seconds(costs.network, "all_gather", weights, costs.group_shapes["dp"])
    waits = maximum(seconds - part.seconds, 0.0)
    return replace(
        part,
        seconds=part.seconds + named(waits, "exposed weight gathers"),
        exposed={**part.exposed, "dp": waits},
        hidden={**part.hidden, "dp": seconds - waits},
    )


def model_cost(case: ServingCase, ledger: StepLedger[X], costs: EngineCostModel[X], zero: X) -> ModelCost[X]:
    """Return seconds of every kind of layer, of the embedding and of the head in one step."""
    costs_of = [layer_cost(ops, costs, label) if ops else LayerCost.nothing(zero) for label, ops in ledger.lines]
    if case.job.shard_weights:
        layers = layers_bytes(case, ledger, zero)
        costs_of = [gathered(part, own.weights, costs) for part, own in zip(costs_of, layers, strict=True)]
    *kinds, embedding, head = costs_of
    message: Collective[X] = Collective(axis="pp", verb="send", size_bytes=ledger.stream_bytes)
    hand_over = 0.0 if case.efficiencies.ideal else case.engine.host.stage_seconds
    send = named(costs.message(message) + hand_over, "stage boundary message")
    return ModelCost(kinds=tuple(kinds), embedding=embedding, head=head, send=send)


def _largest_share(stages: tuple[PipelineStage[X], ...]) -> X:
    """Return the share of the layers that the stage with most of them has, one on a stage that has none."""
    layers = [total(stage.layers[1:], stage.layers[0]) for stage in stages]
    every = total(layers[1:], layers[0])
    return largest(layers) / maximum(every, 1.0)


def _slowest(parts: ModelCost[X], stages: tuple[PipelineStage[X], ...]) -> X:
    """Return seconds of the slowest stage for one step, its message to the next one included."""
    return largest(
        total((n * kind.seconds for n, kind in zip(stage.layers, parts.kinds, strict=True)), 0 * parts.send)
        + stage.embeds * parts.embedding.seconds
        + stage.ends * parts.head.seconds
        + parts.send
        for stage in stages
    )


def step_cost(
    case: ServingCase,
    sizes: ServingSizes[X],
    step: EngineStep[X],
    costs: EngineCostModel[X],
    ledger: StepLedger[X] | None = None,
) -> StepCost[X]:
    """Return the price of one engine iteration, or of a column of them: every answer about serving is made of it.

    A step passes all stages in turn: their sum, and the p - 1 messages between them, never less than on one stage.
    `costs` are those of the step's phase; `ledger` are its operators where they are known.
    """
    ledger = ledger or step_ledger(case, sizes, step)
    parts = model_cost(case, ledger, costs, 0 * sizes.tp)
    lines = (*parts.kinds, parts.embedding, parts.head)
    rows = host_lines(case, sizes, costs, ledger, lines) or [
        *zip((*case.model.kinds.values(), 1, 1), lines, strict=True)
    ]
    operators, roles, exposed, hidden = _summed(rows)
    sends = (sizes.pp - 1) * parts.send
    add(exposed, {"pp": sends})
    overhead = named((0.0 if case.efficiencies.ideal else 1.0) * host_seconds(case, sizes, step), "engine step")
    device = total((times * part.seconds for times, part in rows), sends)
    late = late_seconds(case, sizes, ledger, device)
    # Every stage is a process that launches its own layers (vllm/v1/executor/multiproc_executor.py).
    stage_overhead = overhead + late * _largest_share(sizes.stages)
    overhead = overhead + late
    seconds = device + overhead
    return StepCost(
        seconds=seconds,
        routed=total((times * part.routed for times, part in rows), 0 * sizes.pp),
        operators=operators,
        roles=roles,
        exposed=exposed,
        hidden=hidden,
        overhead=overhead,
        overlapped=0 * seconds,
        # The device and its host work in turn.
        slowest_stage=seconds if case.host else _slowest(parts, sizes.stages) + stage_overhead,
        flops=total((times * part.flops for times, part in rows), 0 * sizes.pp),
        moved_bytes=total((times * part.moved_bytes for times, part in rows), 0 * sizes.pp),
    )


def decode_cost(
    case: ServingCase, sizes: ServingSizes[X], step: EngineStep[X], costs: EngineCostModel[X]
) -> StepCost[X]:
    """Return the price of a decode step: where a draft guesses k tokens, its k steps and one that verifies k + 1."""
    depth = case.job.num_speculative_tokens
    if not depth:
        return step_cost(case, sizes, step, costs)
    verified = step_cost(case, sizes, replace(step, tokens=step.tokens * (depth + 1)), costs)
    draft = draft_case(case)
    if draft is None:
        return verified
    own = draft_sizes(draft, sizes)
    theirs = replace(engine_cost_model(draft, own), decoding=costs.decoding)
    guess = step_cost(draft, own, step, theirs, draft_ledger(draft, own, step, uses_heads(case)))
    # The host schedules once; captured graphs of the draft follow one another.
    alone = guess.seconds - guess.overhead
    operators, roles = dict(verified.operators), dict(verified.roles)
    exposed, hidden = dict(verified.exposed), dict(verified.hidden)
    add(operators, {f"draft.{name}": seconds for name, seconds in guess.operators.items()}, depth)
    add(roles, guess.roles, depth)
    add(exposed, guess.exposed, depth)
    add(hidden, guess.hidden, depth)
    return replace(
        verified,
        seconds=verified.seconds + named(depth * alone, "draft"),
        routed=verified.routed + depth * guess.routed,
        operators=operators,
        roles=roles,
        exposed=exposed,
        hidden=hidden,
        slowest_stage=verified.slowest_stage + depth * alone,
        flops=verified.flops + depth * guess.flops,
        moved_bytes=verified.moved_bytes + depth * guess.moved_bytes,
    )


def in_turn(case: ServingCase, steps: list[tuple[StepCost[X], X]], name: str) -> StepCost[X]:
    """Return the last of several steps with the full ones before it: all but the first cost their slowest stage.

    Pieces of a prompt follow one another in groups, each of which runs dry before the next.
    """
    *filled, (last, _) = steps
    if not filled:
        return replace(last, seconds=named(last.seconds, name))
    (one, count), most = filled[0], case.engine.prefill.chunks_in_flight

    def behind(pieces: X) -> X:
        return pieces - (ceil(pieces / most) if most else minimum(pieces, 1.0))

    ahead, every = behind(count), behind(count + 1)
    overlapped = ahead * maximum(one.seconds - one.slowest_stage, 0.0)
    overlapped = overlapped + (every - ahead) * maximum(last.seconds - last.slowest_stage, 0.0)
    both = (
        count * named(one.seconds, "full step")
        + named(last.seconds, "last step")
        - named(overlapped, "overlap of stages")
    )
    operators, roles, exposed, hidden = _summed([(count, one), (1, last)])
    return StepCost(
        seconds=named(above(count, 0, both, last.seconds), name),
        routed=count * one.routed + last.routed,
        operators=operators,
        roles=roles,
        exposed=exposed,
        hidden=hidden,
        overhead=count * one.overhead + last.overhead,
        overlapped=overlapped,
        slowest_stage=maximum(one.slowest_stage, last.slowest_stage),
        flops=count * one.flops + last.flops,
        moved_bytes=count * one.moved_bytes + last.moved_bytes,
    )
