"""The messages of a plan, one by one: what each is, where in the step, how often a device sends it, for how long.

They are read from the ledger, from the messages of state and of stages, and from the seconds that composition gives
them; nothing is computed a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from shardwise.cost import exchanged_bytes, op_seconds, sent_bytes
from shardwise.ledger.op import Collective, Op, Verb
from shardwise.ops.overlap import CostModel, exposed_and_hidden
from shardwise.plans import find_rules
from shardwise.records import dataclass, replace
from shardwise.training._blocks import BlockCost
from shardwise.training._case import TrainingCase
from shardwise.training._evaluate import Evaluation, boundary_bytes, machine_of, scatters_sends, step_job
from shardwise.training._fsdp_units import gathered_elements, scattered_elements
from shardwise.training._ledger import Ledger, PartLedger, ledger_of
from shardwise.training._overlap import covering_passes, data_parallel_seconds, end_messages, unit_exposure, unit_rounds
from shardwise.training._stages import Stages
from shardwise.training._state import (
    StateMessage,
    boundary_messages,
    gathers,
    message_seconds,
    reductions,
    scatters,
    table_group_shape,
    table_message,
    updates,
)
from shardwise.training.schedules import PipelineShape, find_schedule, sends_of

MessagePhase: TypeAlias = Literal["forward", "backward", "recompute", "gradients", "weights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message as a device sees it: over a kind of group, in a part of the model and a phase of the step.

    `size_bytes` is the whole (gathered) tensor, of `shape`; `sent_bytes` what the device puts on its links for it;
    `seconds` how long it takes. `toward` is where along a pipeline a send goes.
    """

    group: str
    part: str
    where: str
    phase: MessagePhase
    verb: Verb
    tensor: str
    shape: tuple[float, ...]
    size_bytes: float
    sent_bytes: float
    seconds: float
    fanout: int = 0
    toward: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """A message with how often a device sends it, in a micro-batch (0 where once a step) and in a step.

    `exposed_seconds` and `hidden_seconds` are those of the step.
    """

    message: Message
    per_micro_batch: float
    per_step: float
    exposed_seconds: float
    hidden_seconds: float

    @property
    def bytes_per_step(self) -> float:
        """Bytes of the tensors of a step."""
        return self.per_step * self.message.size_bytes

    @property
    def sent_per_step(self) -> float:
        """Bytes that a device sends in a step."""
        return self.per_step * self.message.sent_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedMessage:
    """A message with its count and its seconds in one pass of its part."""

    message: Message
    count: float
    exposed: float
    hidden: float


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the messages of an evaluated plan are read from."""

    case: TrainingCase
    evaluation: Evaluation[float]
    machine: CostModel[float]
    ledger: Ledger[float]

    @property
    def folded(self) -> tuple[BlockCost[float], ...]:
        """The kinds of layer as the schedule runs them, then embedding, head and loss."""
        parts = self.evaluation.parts
        return (*parts.kinds, parts.embedding, parts.head, parts.loss)

    @property
    def lines(self) -> tuple[PartLedger[float], ...]:
        """The ledger of the same parts."""
        written = self.ledger
        return (*written.kinds, written.embedding, written.head, written.loss)


def traffic_of(case: TrainingCase, evaluation: Evaluation[float]) -> Traffic:
    """Return what the messages of an evaluated plan are read from."""
    written = ledger_of(case.model, case.plan, case.kinds, evaluation.layout)
    spans = {**evaluation.sizes.group_shapes, "table": table_group_shape(evaluation.sizes)}
    machine = machine_of(case, spans)
    return Traffic(case=case, evaluation=evaluation, machine=machine, ledger=written)


def runs_a_micro_batch(case: TrainingCase, stage: Stages[float]) -> tuple[float, ...]:
    """Return how often a device of a stage runs each part for one micro-batch, in the order of `Traffic.lines`.

    Under DualPipe half of the micro-batches run on the mirrored layers.
    """
    own = (*stage.layers, stage.embeds, stage.ends, stage.ends)
    if not find_schedule(case.plan.schedule).mirrored:
        return own
    mirrored = (*stage.mirrored, stage.mirrored_embeds, stage.mirrored_ends, stage.mirrored_ends)
    return tuple((a + b) / 2 for a, b in zip(own, mirrored, strict=True))


def _shape(traffic: Traffic, collective: Collective[float]) -> tuple[float, ...]:
    """Return the shape of a collective's tensor; rows that are whole sequences stand as (sequences, tokens, width)."""
    if not collective.shape:
        return ()
    rows, width = collective.shape
    B = traffic.case.plan.micro_batch * traffic.case.job.sequences
    by_tokens = collective.axis in ("tp", "cp", "tp2") and not collective.tensor.startswith("weight") and rows % B == 0
    return (B, rows / B, width) if by_tokens else (rows, width)


def _message(
    traffic: Traffic, lines: PartLedger[float], op: Op[float], phase: MessagePhase, collective: Collective[float]
) -> Message:
    group = traffic.machine.group_shapes[collective.axis]
    return Message(
        group=collective.axis,
        part=lines.label,
        where=op.name,
        phase=phase,
        verb=collective.verb,
        tensor=collective.tensor,
        shape=_shape(traffic, collective),
        size_bytes=collective.size_bytes,
        sent_bytes=exchanged_bytes(group, collective.size_bytes, collective.fanout)
        if collective.verb == "all_to_all"
        else sent_bytes(collective.verb, group[-1], collective.size_bytes),
        seconds=traffic.machine.message(collective),
        fanout=collective.fanout,
    )


def operator_messages(traffic: Traffic, lines: PartLedger[float]) -> Iterator[TimedMessage]:
    """Yield the messages of the operators of a part, in the order of its passes; groups of one rank send none."""
    for op in lines.ops:
        seconds = op_seconds(traffic.evaluation.rates, op)
        ahead = exposed_and_hidden(traffic.machine, op.forward, seconds.forward)
        back = exposed_and_hidden(traffic.machine, op.backward, seconds.backward_input, seconds.backward_weight)
        passes: list[tuple[MessagePhase, tuple[Collective[float], ...], list[tuple[float, float]]]] = [
            ("forward", op.forward, ahead)
        ]
        if lines.again(op):
            passes.append(("recompute", op.forward, ahead))
        passes.append(("backward", op.backward, back))
        for phase, collectives, waits in passes:
            for c, (exposed, hidden) in zip(collectives, waits, strict=True):
                if c.hides == "sharded":
                    if not traffic.case.recipe.shards_weights:
                        continue
                    exposed = traffic.machine.message(c) * c.count
                if traffic.machine.group_shapes[c.axis][-1] > 1 and c.size_bytes and c.count:
                    one = _message(traffic, lines, op, phase, c)
                    yield TimedMessage(message=one, count=c.count, exposed=exposed, hidden=hidden)


def part_messages(traffic: Traffic, lines: PartLedger[float], folded: BlockCost[float]) -> Iterator[TimedMessage]:
    """Yield the messages of the operators of a part with the seconds that its pairs of micro-batches leave exposed."""
    for one in operator_messages(traffic, lines):
        gone = one.exposed * folded.behind_pair.get(one.message.group, 0.0)
        yield replace(one, exposed=one.exposed - gone, hidden=one.hidden + gone)


def _state(
    traffic: Traffic, messages: tuple[StateMessage[float], ...], part: str, phase: MessagePhase
) -> list[Message]:
    """Return the messages of state that are sent: those of more than nothing over more than one rank."""
    sent = []
    for one in messages:
        group = traffic.machine.group_shapes[one.group]
        if one.size_bytes and group[-1] > 1:
            sent.append(
                Message(
                    group=one.group,
                    part=part,
                    where=part,
                    phase=phase,
                    verb=one.verb,
                    tensor=one.tensor,
                    shape=(),
                    size_bytes=one.size_bytes,
                    sent_bytes=sent_bytes(one.verb, group[-1], one.size_bytes),
                    seconds=message_seconds(traffic.machine, one),
                )
            )
    return sent


def _shared(messages: list[tuple[Message, float]], exposed: float) -> list[TimedMessage]:
    """Return messages and how often each is sent, that wait together, each with its share of seconds that wait."""
    whole = sum(m.seconds * count for m, count in messages)
    part = exposed / whole if whole else 0.0
    return [
        TimedMessage(message=m, count=n, exposed=part * m.seconds * n, hidden=(1 - part) * m.seconds * n)
        for m, n in messages
    ]


def fsdp_unit_messages(traffic: Traffic, part: str, folded: BlockCost[float]) -> list[TimedMessage]:
    """Return the messages of sharded weights and gradients of one layer in one micro-batch."""
    sizes, recipe = traffic.evaluation.sizes, traffic.case.recipe
    if not recipe.shards_gradients:
        return []
    ahead, behind, *_ = unit_exposure(traffic.machine, sizes, recipe, folded)
    gathered, made = gathered_elements(recipe, sizes, folded), scattered_elements(recipe, sizes, folded)
    gather, (often, twice, reduced) = (
        gathers(recipe, *gathered) if recipe.shards_weights else (),
        unit_rounds(sizes, recipe),
    )
    first = _state(traffic, gather, part, "forward")
    regathers = _state(traffic, gather if twice else (), part, "backward")
    made_whole = _state(traffic, scatters(sizes, recipe, made), part, "backward")
    forward = [(one, often) for one in first]
    backward = [*((one, often) for one in regathers), *((one, reduced) for one in made_whole)]
    return [*_shared(forward, ahead), *_shared(backward, behind)]


def embedding_and_head_messages(traffic: Traffic, stage: Stages[float]) -> list[TimedMessage]:
    """Return the messages of the units that hold embedding, final norm and head of a stage in one micro-batch."""
    messages: list[TimedMessage] = []
    for one in end_messages(
        traffic.machine, traffic.evaluation.sizes, traffic.case.recipe, traffic.evaluation.parts, stage
    ):
        sent = _state(traffic, one.messages, one.unit, "backward" if one.backward else "forward")
        if one.count:
            messages += _shared([(each, one.count) for each in sent], one.exposed)
    return messages


def _once(traffic: Traffic, index: int) -> Iterator[Flow]:
    """Yield what a stage sends once a step: gradients, new weights, and the table it shares."""
    evaluation, recipe = traffic.evaluation, traffic.case.recipe
    stage, m = evaluation.stages[index], traffic.machine
    passes = evaluation.step.stages[index].passes(covering_passes(evaluation.sizes, traffic.case.plan.schedule))
    shown, _, waits, _ = data_parallel_seconds(m, recipe, evaluation.parts, stage, passes)
    rows = [
        *_shared(
            [(one, 1) for one in _state(traffic, reductions(recipe, evaluation.parts, stage), "stage", "gradients")],
            shown,
        ),
        *_shared(
            [(one, 1) for one in _state(traffic, updates(recipe, evaluation.parts, stage), "stage", "weights")], waits
        ),
    ]
    job = step_job(traffic.case, evaluation.parts, 0.0)
    if job.tied and evaluation.sizes.pp > 1 and (stage.embeddings or stage.heads):
        table = _state(traffic, (table_message(job.tied_bytes),), "embedding", "gradients")
        rows += [TimedMessage(message=x, count=1, exposed=x.seconds, hidden=0.0) for x in table]
    for one in rows:
        yield Flow(
            message=one.message,
            per_micro_batch=0.0,
            per_step=one.count,
            exposed_seconds=one.exposed,
            hidden_seconds=one.hidden,
        )


def _sends(
    traffic: Traffic, stage: Stages[float], shape: PipelineShape[float]
) -> Iterator[tuple[MessagePhase, int, float]]:
    """Yield (phase, direction, messages a micro-batch) of what a stage sends along the pipeline."""
    ahead, back = sends_of(shape, stage.position)
    rules = find_rules(traffic.case.plan.schedule)
    if rules.folded:
        # One piece runs down the stages and one up; each end of a stage's line is crossed once each way.
        after, before = float(stage.position < shape.num_stages - 1), float(stage.position > 0)
        yield "forward", 1, after
        yield "forward", -1, before
        yield "backward", 1, after
        yield "backward", -1, before
        return
    if not rules.mirrored:
        yield "forward", 1, ahead
        yield "backward", -1, back
        return
    # Half of the micro-batches run the other way, through the mirrored stage.
    mirrored = sends_of(shape, shape.num_stages - 1 - stage.position)
    for share, toward in (((ahead, back), 1), (mirrored, -1)):
        yield "forward", toward, share[0] / 2
        yield "backward", -toward, share[1] / 2


def _between(traffic: Traffic, index: int) -> Iterator[Flow]:
    """Yield what a stage sends to its neighbours, exposed as the schedule exposes it."""
    e, case = traffic.evaluation, traffic.case
    sizes = e.sizes
    if sizes.pp == 1:
        return
    shape = PipelineShape(
        num_stages=sizes.pp, num_chunks=sizes.vpp, num_micro=sizes.num_micro, send=0.0, overlap_send=True
    )
    rows = e.layout.residual_tokens, case.model.streams * e.layout.residual_width(case.model.hidden)
    scattered, stream = scatters_sends(case), boundary_bytes(case, e.layout)
    sent = [(phase, toward, n) for phase, toward, n in _sends(traffic, e.stages[index], shape) if n]
    whole = sum(n for _, _, n in sent) or 1.0
    for phase, toward, n in sent:
        messages = _state(traffic, boundary_messages(sizes, stream, scattered), "boundary", phase)
        for one in messages:
            B = case.plan.micro_batch * case.job.sequences
            split = sizes.tp if scattered and one.verb == "send" else 1
            message = replace(one, toward=toward, shape=(B, rows[0] / B / split, rows[1]))
            # The gather of a scattered send is part of the time between stages, not of tensor parallelism.
            waits = e.step.pipeline.exposed_send * n / whole if one.group == "pp" else 0.0
            yield Flow(
                message=message,
                per_micro_batch=n,
                per_step=n * sizes.num_micro,
                exposed_seconds=waits,
                hidden_seconds=0.0,
            )


def flows_of(traffic: Traffic, index: int, times: float) -> tuple[Flow, ...]:
    """Return everything that a device of a run of stages sends in a step of `times` micro-batches' worth of seconds."""
    evaluation, stage = traffic.evaluation, traffic.evaluation.stages[index]
    flows: list[Flow] = []

    def add(timed: list[TimedMessage], often: float, seconds_of: float) -> None:
        for one in timed:
            flows.append(
                Flow(
                    message=one.message,
                    per_micro_batch=often * one.count,
                    per_step=often * one.count * evaluation.sizes.num_micro,
                    exposed_seconds=times * seconds_of * one.exposed,
                    hidden_seconds=times * seconds_of * one.hidden,
                )
            )

    own = (*stage.layers, stage.embeds, stage.ends, stage.ends)
    layers = len(stage.layers)
    for i, (lines, folded) in enumerate(zip(traffic.lines, traffic.folded, strict=True)):
        often = runs_a_micro_batch(traffic.case, stage)[i]
        if often or own[i]:
            units = fsdp_unit_messages(traffic, lines.label, folded) if i < layers else []
            add([*part_messages(traffic, lines, folded), *units], often, own[i])
    add(embedding_and_head_messages(traffic, stage), 1.0, 1.0)
    return (*flows, *_once(traffic, index), *_between(traffic, index))
