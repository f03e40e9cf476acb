"""Every operator against the device's roofline: from the ledger, with the cost functions that time is made of.

Roofline: Williams, Waterman, Patterson 2009.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from shardwise.answers._roofline_limits import Bound, binding, each_alone
from shardwise.answers._train_tree import step_tree, without_residue
from shardwise.cost import WIDE_DTYPES, Rates, attention_dtype, cached_share
from shardwise.cost import op_seconds as trained_seconds
from shardwise.errors import InputError, Problem
from shardwise.field_types import typed
from shardwise.hardware import Device
from shardwise.ledger.op import Op
from shardwise.notebook import PlainValues
from shardwise.records import dataclass, replace
from shardwise.serving import (
    EngineStep,
    InferReport,
    ServingCase,
    ServingSizes,
    StepLedger,
    decode_steps,
    draft_case,
    draft_ledger,
    draft_sizes,
    engine_cost_model,
    prefill_steps,
    step_ledger,
    tokens_per_whole_step,
    uses_heads,
)
from shardwise.serving import op_seconds as served_seconds
from shardwise.training import PartLedger, TrainReport, ledger_of, machine_of, slowest_stage

_TRAINED = (
    ("forward", "flops", "forward_bytes"),
    ("backward_input", "backward_flops", "backward_bytes"),
    ("backward_weight", "weight_flops", "weight_bytes"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflinePoint:
    """One operator in one pass, on one rank: what a call takes, how often it runs, and what limits it.

    `phase` is forward, recompute, backward_input, backward_weight, prefill or decode; `shape` is m, n, k and the batch
    of a GEMM. `bound` names the limit that alone takes longest: arithmetic, memory, or starting the kernels.
    """

    part: str
    operator: str
    phase: str
    kind: str
    shape: tuple[float, ...]
    flops: float
    moved_bytes: float
    seconds: float
    times: float
    bound: Bound
    dtype: str
    peak_flops_per_second: float
    peak_bytes_per_second: float

    @property
    def intensity(self) -> float:
        """FLOPs a byte moved; 0 where no FLOPs are counted."""
        return self.flops / self.moved_bytes if self.moved_bytes else 0.0

    @property
    def ridge(self) -> float:
        """FLOPs a byte at which the device's arithmetic and memory take the same time, by the datasheet."""
        return self.peak_flops_per_second / self.peak_bytes_per_second

    @property
    def flops_per_second(self) -> float:
        """FLOP/s that the operator is predicted to attain."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes a second that the operator is predicted to move."""
        return self.moved_bytes / self.seconds if self.seconds else 0.0

    @property
    def of_peak(self) -> float:
        """Share of the device's peak FLOP/s in the operator's data type."""
        return self.flops_per_second / self.peak_flops_per_second

    @property
    def of_roof(self) -> float:
        """Share of what the datasheet allows at this intensity: the roof's seconds over the predicted ones."""
        roof = max(self.flops / self.peak_flops_per_second, self.moved_bytes / self.peak_bytes_per_second)
        return roof / self.seconds if self.seconds else 0.0

    @property
    def total_seconds(self) -> float:
        """Seconds of all its calls in a step."""
        return self.seconds * self.times


@dataclass(frozen=True, repr=False)
class Roofline(PlainValues):
    """The operators of a report against the roofline of its device; `what` says what the shares are of."""

    report: TrainReport | InferReport
    points: tuple[RooflinePoint, ...]
    what: dict[str, str]

    def __repr__(self) -> str:
        return f"<Roofline of {len(self.points)} operators: {self.report}>"

    @cached_property
    def lost_seconds(self) -> float:
        """Seconds of a training step's compute that no operator has: of messages beside it, and of the host's launches.

        The operators of serving are all of its compute: 0.
        """
        if not isinstance(self.report, TrainReport):
            return 0.0
        whole = step_tree(self.report)["compute_seconds"]
        return without_residue(whole - self.seconds["step"], whole)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of all operators: of a step in training, of each phase in serving."""
        seconds_of: dict[str, float] = {}
        for point in self.points:
            key = self.group(point)
            seconds_of[key] = seconds_of.get(key, 0.0) + point.total_seconds
        return seconds_of

    def group(self, point: RooflinePoint) -> str:
        """Return what the share of a point is a share of."""
        return "step" if isinstance(self.report, TrainReport) else point.phase

    def share(self, point: RooflinePoint) -> float:
        """Return the share of a point in the compute of its group."""
        whole = self.seconds[self.group(point)]
        return point.total_seconds / whole if whole else 0.0

    def bounds(self) -> dict[str, dict[str, float]]:
        """Return for each group the share of time that compute, memory and kernel starts bound."""
        seconds_of = {key: {"compute": 0.0, "memory": 0.0, "start": 0.0} for key in self.seconds}
        for point in self.points:
            seconds_of[self.group(point)][point.bound] += self.share(point)
        return seconds_of


def _shape(op: Op[float], phase: str) -> tuple[float, ...]:
    m, n, k = float(op.rows), float(op.columns), float(op.inner)
    if op.kind not in ("matmul", "grouped"):
        return (m, n, k, float(op.batch))
    if phase == "backward_input":
        n, k = k, n
    elif phase == "backward_weight":
        m, n, k = k, n, m
    return (m, n, k, float(op.batch))


def _dtype(device: Device, op: Op[float], dtype: str) -> str:
    """Return the data type whose peak limits an operator; the attention core and the head stay in 16 bit."""
    wide = op.kind == "attention" or (op.kind == "matmul" and op.dtype in WIDE_DTYPES)
    return attention_dtype(device, dtype) if wide else dtype


def _trained(
    report: TrainReport, lines: PartLedger[float], times: float, limits: dict[Bound, Any]
) -> Iterable[RooflinePoint]:
    """Yield the passes of the operators of one part of a model; `times` is how often the part runs in a step."""
    case, rates = report.case, report.evaluation.rates
    device, dtype = case.cluster.device, case.recipe.precision.compute
    for op in lines.ops:
        seconds = trained_seconds(rates, op)
        passes = [*_TRAINED, *([("recompute", "flops", "forward_bytes")] if lines.again(op) else [])]
        for phase, flops, moved in passes:
            timed = "forward" if phase == "recompute" else phase
            if not float(getattr(seconds, timed)):
                continue

            def alone(machine: Any, op: Op[float] = op, timed: str = timed) -> float:
                return float(getattr(trained_seconds(machine, op), timed))

            yield RooflinePoint(
                part=lines.label,
                operator=op.name,
                phase=phase,
                kind=op.kind,
                shape=_shape(op, phase),
                flops=float(getattr(op, flops)),
                moved_bytes=float(getattr(op, moved)),
                seconds=float(getattr(seconds, timed)),
                times=times,
                bound=binding(alone, limits),
                dtype=_dtype(device, op, dtype),
                peak_flops_per_second=device.peak_flops(_dtype(device, op, dtype)),
                peak_bytes_per_second=_bandwidth(device, rates, op, float(getattr(op, moved))),
            )


def _bandwidth(device: Device, rates: Rates[float], op: Op[float], moved: float) -> float:
    """Return the bytes/s that bound an operator: those of the last cache where it holds what a kernel moves."""
    return max(device.memory_bytes_per_second, rates.cached_rate if cached_share(rates, op, moved) > 0 else 0.0)


def points_of_stage(report: TrainReport, index: int) -> tuple[RooflinePoint, ...]:
    """Return the operators of one device of a run of equal stages, all micro-batches of a step together."""
    case, e = report.case, report.evaluation
    stage, written = e.stages[index], ledger_of(case.model, case.plan, case.kinds, e.layout)
    runs = e.step.pipeline.busy / e.step.stages[slowest_stage(e.step)].busy
    rates = machine_of(case, e.sizes.group_shapes).rates
    limits = each_alone(rates)
    rows = [*zip(written.kinds, stage.layers, strict=True), (written.embedding, stage.embeds)]
    rows += [(written.head, stage.ends), (written.loss, stage.ends)]
    return tuple(point for lines, n in rows if n for point in _trained(report, lines, n * runs, limits))


def _of_training(report: TrainReport) -> Roofline:
    """Return the operators of one device of the slowest stage."""
    index = slowest_stage(report.evaluation.step)
    stage = report.evaluation.stages[index]
    first, count = int(stage.position), int(stage.count)
    where = f"stage {first}" if count == 1 else f"each of stages {first} to {first + count - 1}"
    whole = "the policy's update of one step" if report.phases else "one step"
    what = f"{whole} on a device of {where}" if report.case.plan.pp > 1 else whole
    return Roofline(report, points_of_stage(report, index), {"step": what})


def _served(
    case: ServingCase, sizes: ServingSizes[float], ledger: StepLedger[float], phase: str, times: float
) -> Iterable[RooflinePoint]:
    """Yield the operators of one engine step that runs so many times."""
    server = replace(engine_cost_model(case, sizes), decoding=ledger.step.phase == "decode")
    limits = each_alone(server)
    rows = [*case.model.kinds.values(), 1, 1]
    device = case.cluster.device
    for (label, ops), count in zip(ledger.lines, rows, strict=True):
        for op in ops:
            seconds = float(served_seconds(server, op))
            if not seconds:
                continue

            def alone(machine: Any, op: Op[float] = op) -> float:
                return float(served_seconds(machine, op))

            yield RooflinePoint(
                part=label,
                operator=op.name,
                phase=phase,
                kind=op.kind,
                shape=_shape(op, "forward"),
                flops=float(op.flops),
                moved_bytes=float(op.forward_bytes),
                seconds=seconds,
                times=count * times,
                bound=binding(alone, limits),
                dtype=_dtype(device, op, op.dtype or case.dtype),
                peak_flops_per_second=device.peak_flops(_dtype(device, op, op.dtype or case.dtype)),
                peak_bytes_per_second=_bandwidth(device, server.rates, op, float(op.forward_bytes)),
            )


def _mean(points: list[RooflinePoint]) -> tuple[RooflinePoint, ...]:
    """Return points of the same operator at several contexts as one: means weighted by how often each runs."""
    groups: dict[tuple[str, str], list[RooflinePoint]] = {}
    for point in points:
        groups.setdefault((point.part, point.operator), []).append(point)
    return tuple(own[0] if len(own) == 1 else _merged(own) for own in groups.values())


def _merged(points: list[RooflinePoint]) -> RooflinePoint:
    times = sum(p.times for p in points) or 1.0

    def mean(name: str) -> float:
        return sum(p.times * float(getattr(p, name)) for p in points) / times

    longest = max(points, key=lambda p: p.total_seconds)
    means: dict[str, Any] = {name: mean(name) for name in ("flops", "moved_bytes", "seconds")}
    means["shape"] = tuple(sum(p.times * p.shape[i] for p in points) / times for i in range(4))
    return replace(longest, times=times, **means)


def step_points(report: InferReport, phase: str, step: EngineStep[float], times: float) -> Iterable[RooflinePoint]:
    """Yield the operators of one engine step; of a decode step those of a draft too, whose guesses it verifies."""
    case, sizes, depth = report.case, report.evaluation.sizes, report.job.num_speculative_tokens
    if step.phase != "decode" or not depth:
        yield from _served(case, sizes, step_ledger(case, sizes, step), phase, times)
        return
    verified = replace(step, tokens=step.tokens * (depth + 1))
    yield from _served(case, sizes, step_ledger(case, sizes, verified), phase, times)
    draft = draft_case(case)
    if draft is not None:
        own = draft_sizes(draft, sizes)
        for point in _served(draft, own, draft_ledger(draft, own, step, uses_heads(case)), phase, times * depth):
            yield replace(point, operator=f"draft.{point.operator}")


def _of_serving(report: InferReport) -> Roofline:
    """Return the operators of a prefill and of the mean decode step, all layers together."""
    case, sizes = report.case, report.evaluation.sizes
    filled = prefill_steps(case, sizes)
    prefill = [p for step, count in filled if count for p in step_points(report, "prefill", step, float(count))]
    steps = decode_steps(case, sizes)
    made = tokens_per_whole_step(report.job)
    decode = [point for at, share in steps if share for point in step_points(report, "decode", at, share / made)]
    what = {"prefill": "the prefill of a batch", "decode": "a decode step, the mean of the generation"}
    return Roofline(report, (*_mean(prefill), *_mean(decode)), what)


@typed
def roofline(report: TrainReport | InferReport) -> Roofline:
    """Return every operator of a report in FLOPs, bytes and seconds, against its device (Williams et al. 2009).

    >>> from shardwise import Cluster, Plan, Training, load_model, train
    >>> job = Training(seq_len=4096, global_batch=8)
    >>> report = train(load_model("llama-3.1-8b"), Cluster.parse("8xh100"), Plan(tp=8), job)
    >>> max(roofline(report).points, key=lambda p: p.total_seconds).bound
    'compute'
    """
    if isinstance(report, TrainReport):
        return _of_training(report)
    if report.case.host is not None:
        rule = "runs a part of the model, and operators are held against the roofline of one device"
        raise InputError([Problem("host", report.job.host, rule, "ask for the roofline of either alone")])
    return _of_serving(report)
