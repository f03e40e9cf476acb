"""What a step, a run or a million tokens take of energy: watts by how busy the devices are, times the time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page
from shardwise.cost import family_of, mean_watts, power_model
from shardwise.errors import InputError, Problem, plain
from shardwise.field_types import typed
from shardwise.notebook import Card, PlainValues
from shardwise.plans import Training
from shardwise.records import dataclass, replace
from shardwise.units import show_count, significant

if TYPE_CHECKING:
    from shardwise.answers._roofline_points import RooflinePoint
    from shardwise.serving import InferReport
    from shardwise.serving.load import LengthMoments, ServeReport, Trace
    from shardwise.training import TrainReport

_JOULES_PER_KWH = 3.6e6
ASSUMED = "energy is that of the devices; hosts, network and cooling are what --pue says"


@dataclass(frozen=True, kw_only=True, slots=True)
class Energy(PlainValues):
    """What devices draw and use, with 10 % and 90 % of the joules; None where there is no run or no grid.

    `joules` are of a training step, of a served batch, or of all requests of a load; `tokens` those that they made.
    A run takes the watts of a step for all its device hours, those lost to failures and checkpoints too.
    `compute_share` and `memory_share` are of the datasheet's peaks, the mean over the time, `waiting_share` is that in
    which no request is there. With a PUE all but `watts_per_device` are at the meter of the building. `source` are the
    measured loads that the watts rest on, of serving all.
    """

    watts_per_device: float
    compute_share: float
    memory_share: float
    waiting_share: float
    pue: float
    joules: float
    joules_low: float
    joules_high: float
    tokens: float
    joules_per_token: float
    kwh_per_million_tokens: float
    tokens_per_second_per_megawatt: float
    run_kwh: float | None
    run_kg_co2: float | None
    kg_co2_per_million_tokens: float | None
    source: str


AnyReport: TypeAlias = "TrainReport | InferReport | ServeReport"


@typed
def energy(report: AnyReport, pue: float = 1.0, grid_intensity: float | None = None) -> Energy:
    """Return the energy of a training step and run, of a served batch, or of the requests of a load.

    `pue` is the power of the building over that of the devices, `grid_intensity` grams of CO2 a kWh. Raises
    `InputError` where the device's rated watts are not known, or nothing is served. Sources: cost/power.toml.

    >>> import shardwise as sw
    >>> job = sw.Training(seq_len=4096, global_batch=64)
    >>> report = sw.train(sw.load_model("llama-3.1-8b"), sw.Cluster.parse("8xh100"), sw.Plan(tp=8), job)
    >>> used = energy(report)
    >>> 300 < used.watts_per_device <= 700 and used.run_kwh is None
    True
    """
    if not isinstance(report, Card):
        rule, remedy = "must be the answer of train, infer or serve", "write energy(train(...))"
        raise InputError([Problem("report", plain(report), rule, remedy)])
    _check(pue, grid_intensity)
    case = cast("InferReport", getattr(report, "base", report)).case
    host = getattr(case, "host", None)
    if host is not None:
        name = host.cluster.device.name
        rule = f"runs a part of the model, and the watts of {name} under such a load are not known"
        raise InputError([Problem("host", name, rule, "ask for the energy of one device alone")])
    work = _work(report)
    compute, memory = (min(peak / work.device_seconds, 1.0) for peak in (work.arithmetic, work.moved))
    watts, low, high = mean_watts(case.cluster.device, compute, memory, work.waiting)
    joules = watts * work.device_seconds * pue
    per_token = joules / work.tokens if work.tokens else math.inf
    kwh = per_token * 1e6 / _JOULES_PER_KWH
    job, run = getattr(report, "job", None), None
    if isinstance(job, Training) and job.run_tokens:
        # Devices are held while a run saves, restarts and repeats lost work, as its hours and dollars count.
        # An engine that generates for a step is taken to draw what training does.
        trained = cast("TrainReport", report)
        run = per_token * job.run_tokens / _JOULES_PER_KWH / trained.goodput
        run *= trained.whole_step_seconds / trained.step_seconds
        run *= 1 + trained.generation.devices / trained.plan.num_devices
    grams = None if grid_intensity is None else grid_intensity / 1000
    return Energy(
        watts_per_device=watts,
        compute_share=compute,
        memory_share=memory,
        waiting_share=work.waiting,
        pue=pue,
        joules=joules,
        joules_low=joules * low / watts,
        joules_high=joules * high / watts,
        tokens=work.tokens,
        joules_per_token=per_token,
        kwh_per_million_tokens=kwh,
        tokens_per_second_per_megawatt=1e6 / per_token,
        run_kwh=run,
        run_kg_co2=None if run is None or grams is None else run * grams,
        kg_co2_per_million_tokens=None if grams is None else kwh * grams,
        source=power_model(family_of(case.cluster.device)).source,
    )


def _check(pue: float, grid_intensity: float | None) -> None:
    problems = []
    if not 1 <= pue <= 10:
        problems.append(Problem("pue", pue, "must be from 1 to 10: the building's power over the devices'", "use 1.2"))
    if grid_intensity is not None and not 0 <= grid_intensity <= 1e4:
        rule = "must be grams of CO2 a kWh, from 0 to 10,000"
        problems.append(Problem("grid_intensity", grid_intensity, rule, "use 400"))
    if problems:
        raise InputError(problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """What devices do: seconds of all of them, those that the datasheet's peaks would take, and the tokens made."""

    device_seconds: float
    arithmetic: float
    moved: float
    tokens: float
    waiting: float = 0.0


def _at_peak(points: Iterable[RooflinePoint], again: Mapping[str, float] = MappingProxyType({})) -> tuple[float, float]:
    """Return seconds of a rank at the peaks of arithmetic and of memory, phases as often again as is said."""
    arithmetic = moved = 0.0
    for point in points:
        times = point.times * again.get(point.phase, 1.0)
        arithmetic += times * point.flops / point.peak_flops_per_second
        moved += times * point.moved_bytes / point.peak_bytes_per_second
    return arithmetic, moved


def _work(report: AnyReport) -> _Work:
    """Return the work of a training step, of a batch from its arrival to its last token, or of a load."""
    from shardwise.answers._roofline_points import roofline

    if hasattr(report, "base"):
        # Of a deployment under load, whose class is not loaded where nothing is served.
        return _of_load(cast("ServeReport", report))
    job, devices = report.job, report.plan.num_devices
    if isinstance(job, Training):
        return _of_step(cast("TrainReport", report))
    served = cast("InferReport", report)
    tokens = float(served.batch_in_flight * (job.output_tokens or job.input_tokens))
    # Its operators are of all layers, of which a stage has its part.
    ranks, again = devices / report.plan.pp, {"decode": float(max(job.output_tokens - 1, 0))}
    arithmetic, moved = _at_peak(roofline(_even(served)).points, again)
    return _Work(
        device_seconds=devices * served.request_seconds,
        arithmetic=ranks * arithmetic,
        moved=ranks * moved,
        tokens=tokens,
    )


def _even(report: InferReport) -> InferReport:
    """Return a report whose ranks do what they do on average: what experts get beyond that, others lack."""
    job = replace(report.case.job, expert_imbalance=1.0)
    return replace(report, case=replace(report.case, job=job, mean_rank=True))


def _of_step(report: TrainReport) -> _Work:
    """Return the work of a training step on all stages, of which those with an end of the model do more.

    Passes without gradients and models that train beside are as in `StepSeconds`; ranks of experts as on average.
    """
    from shardwise.answers._roofline_points import points_of_stage

    recipe, e = report.case.recipe, report.evaluation
    even = replace(e, layout=replace(e.layout, work=replace(e.layout.work, imbalance=1.0)))
    models = 1.0 + recipe.critics + recipe.critic_adapters
    again = dict.fromkeys(("recompute", "backward_input", "backward_weight"), models)
    again["forward"] = models + recipe.scorings
    devices, arithmetic, moved = report.plan.num_devices, 0.0, 0.0
    for index, stage in enumerate(e.stages):
        points = points_of_stage(replace(report, evaluation=even), index)
        ranks, work = devices / report.plan.pp * float(stage.count), _at_peak(points, again)
        arithmetic, moved = arithmetic + ranks * work[0], moved + ranks * work[1]
    return _Work(
        device_seconds=devices * report.step_seconds,
        arithmetic=arithmetic,
        moved=moved,
        tokens=float(report.job.tokens_per_step),
    )


def _of_load(report: ServeReport) -> _Work:
    """Return what all pools of a deployment do, from the first arrival to the last token."""
    from shardwise.serving.load import lanes_of

    if not report.requests:
        rule = "is not carried, so that nobody knows what is served"
        raise InputError(
            [Problem("load", f"{report.workload.arrivals.rate:g}/s", rule, "ask for less, or add devices")]
        )
    pools = [(report.fleet.decode, report.traces)]
    if report.prefill and report.fleet.prefill:
        pools.append((report.fleet.prefill, report.prefill.traces))
    seconds = busy = arithmetic = moved = 0.0
    for pool, traces in pools:
        base = _even(pool.base)
        own = report.span_seconds * base.plan.num_devices * report.share
        if report.scaling:
            own = report.scaling.replica_seconds * base.plan.num_devices / report.replicas
        # A trace is of a group of attention, or of one of the batches that pass its stages in turn.
        each, lanes = base.plan.num_devices / base.plan.dp, lanes_of(base.plan, pool.policy.one_batch)
        work = _of_pool(base, traces, pool.form.moments)
        ranks = each / base.plan.pp
        arithmetic, moved = arithmetic + ranks * work[0], moved + ranks * work[1]
        seconds, busy = seconds + own, busy + each / lanes * sum(t.busy_seconds for t in traces)
    return _Work(
        device_seconds=seconds,
        arithmetic=arithmetic,
        moved=moved,
        tokens=float(sum(request.output_tokens for request in report.requests)),
        waiting=max(1 - busy / seconds, 0.0),
    )


def _of_pool(base: InferReport, traces: Sequence[Trace], moments: LengthMoments) -> tuple[float, float]:
    """Return seconds at the peaks of arithmetic and of memory of one rank of each group of a pool, added up.

    Each iteration reads the weights for the sequences that decode in it on average; prompts add what their tokens take
    beyond that.
    """
    from shardwise.answers._roofline_points import step_points
    from shardwise.serving import EngineStep

    def priced(sequences: float, tokens: float, past: float) -> tuple[float, float]:
        phase: Literal["prefill", "decode"] = "prefill" if tokens else "decode"
        step = EngineStep(phase=phase, sequences=sequences, tokens=tokens or 1.0, context=past)
        return _at_peak(step_points(base, phase, step, 1.0))

    iterations = sum(t.iterations for t in traces)
    decoded = sum(r.output_tokens - 1 for t in traces for r in t.finished) / moments.made if moments.steps else 0.0
    decoding = decoded / iterations
    whole = priced(decoding, 0.0, moments.context) if decoding else priced(1.0, 1.0, 0.0)
    total = [iterations * one for one in whole]
    new = moments.new_tokens
    many = sum(t.prompt_tokens for t in traces) / new / len(moments.prompts) if new else 0.0
    for size, past in moments.prompts if many else ():
        pair = priced(1.0, decoding + size, past), priced(1.0, max(decoding, 1.0), past)
        total = [one + many * (more - less) for one, more, less in zip(total, *pair, strict=True)]
    return total[0], total[1]


def asked_energy(inputs: Inputs, report: AnyReport) -> Energy | None:
    """Return the energy of a report where --energy, or what belongs to it, is given; None of a load nobody carries."""
    if not inputs.get("energy") and not {"pue", "grid_intensity"} & inputs.values.keys():
        return None
    pue, grid = inputs.get("pue", 1.0), inputs.get("grid_intensity")
    if not getattr(report, "requests", True):
        _check(pue, grid)
        return None
    return energy(report, pue, grid)


def energy_tree(used: Energy | None) -> dict[str, Any]:
    """Return the key of the JSON answer, none where it was not asked for."""
    return {} if used is None else {"energy": asdict(used)}


def energy_lines(page: Page, used: Energy | None, of: str) -> None:
    """Append what was asked for to a page; `of` says whose joules these are."""
    if used is None:
        return
    text = f"{show_joules(used.joules)} {of}, {show_joules(used.joules_per_token)} a token, "
    text += f"{_kwh(used.kwh_per_million_tokens)} a million tokens"
    run = f"; the run {_kwh(used.run_kwh)}" if used.run_kwh is not None else ""
    page.label("ENERGY", text + run)
    rate = show_count(used.tokens_per_second_per_megawatt)
    page.note(
        f"{used.watts_per_device:,.0f} W a device at {used.compute_share:.0%} of its FLOP/s and "
        f"{used.memory_share:.0%} of its memory's bandwidth; {rate} tokens/s a MW"
    )
    if used.waiting_share >= 0.01:
        page.note(f"{used.waiting_share:.0%} of the time no request is there: taken as between two kernels", "dim")
    low, high = used.joules_low / used.joules, used.joules_high / used.joules
    page.note(f"8 of 10 measured serving loads: {low:.2f} to {high:.2f} of it ({used.source})", "dim")
    carbon = used.run_kg_co2 if used.run_kg_co2 is not None else used.kg_co2_per_million_tokens
    if carbon is not None:
        what = "the run" if used.run_kg_co2 is not None else "a million tokens"
        page.note(f"{_prefixed(carbon, ('kg', 't', 'kt'))} CO2 {what}")
    page.note(ASSUMED if used.pue == 1 else f"at the building's meter, PUE {used.pue:g}", "dim")


def _kwh(kwh: float) -> str:
    return _prefixed(kwh, ("kWh", "MWh", "GWh"))


def _prefixed(value: float, units: tuple[str, str, str]) -> str:
    """Return a value in the first of units, each a thousand of the one before, that needs few digits.

    >>> _prefixed(96800.0, ("kg", "t", "kt")), _prefixed(0.359, ("kg", "t", "kt"))
    ('96.8 t', '0.359 kg')
    """
    step = 0 if value < 1e3 else 1 if value < 1e6 else 2
    return f"{significant(value / 1e3**step)} {units[step]}"


def show_joules(joules: float) -> str:
    """Return joules as people read them.

    >>> show_joules(0.0123), show_joules(4.2), show_joules(25000)
    ('12.3 mJ', '4.2 J', '25 kJ')
    """
    for size, unit in ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J")):
        if joules >= size:
            return f"{significant(joules / size)} {unit}"
    return f"{joules * 1e3:.3g} mJ"
