"""What a step, a run or a million tokens take of energy: watts by how busy the devices are, times the time."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page
from shardwise.cost import family_of, mean_watts, power_model
from shardwise.errors import InputError, Problem
from shardwise.plans import Training
from shardwise.records import dataclass
from shardwise.units import show_count

if TYPE_CHECKING:
    from shardwise.serving import InferReport
    from shardwise.training import TrainReport

_JOULES_PER_KWH = 3.6e6
ASSUMED = "energy is that of the devices; hosts, network and cooling are what --pue says"


@dataclass(frozen=True, kw_only=True, slots=True)
class Energy:
    """What devices draw and use, with 10 % and 90 % of the joules; None where there is no run or no grid.

    `joules` are of a training step, or of a served batch; `tokens` those that they made. `compute_share` and
    `memory_share` are of the datasheet's peaks, the mean over the time. With a PUE all but `watts_per_device` are at
    the meter of the building. `source` are the measured loads that the watts rest on, of serving all.
    """

    watts_per_device: float
    compute_share: float
    memory_share: float
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


def energy(report: TrainReport | InferReport, pue: float = 1.0, grid_intensity: float | None = None) -> Energy:
    """Return the energy of a training step and run, or of a served batch.

    `pue` is the power of the building over that of the devices, `grid_intensity` grams of CO2 a kWh. Raises
    `InputError` where the device's rated watts are not known. Sources: cost/power.toml.

    >>> import shardwise as sw
    >>> job = sw.Training(seq_len=4096, global_batch=64)
    >>> report = sw.train(sw.load_model("llama-3.1-8b"), sw.Cluster.parse("8xh100"), sw.Plan(tp=8), job)
    >>> found = energy(report)
    >>> 300 < found.watts_per_device <= 700 and found.run_kwh is None
    True
    """
    _check(pue, grid_intensity)
    host = getattr(report.case, "host", None)
    if host is not None:
        name = host.cluster.device.name
        rule = f"runs a part of the model, and the watts of {name} under such a load are not known"
        raise InputError([Problem("host", name, rule, "ask for the energy of one device alone")])
    compute, memory = _busy(report)
    watts, low, high = mean_watts(report.case.cluster.device, compute, memory)
    seconds, tokens = _work(report)
    joules = watts * report.plan.num_devices * seconds * pue
    per_token = joules / tokens if tokens else math.inf
    kwh = per_token * 1e6 / _JOULES_PER_KWH
    run = None
    if isinstance(report.job, Training) and report.job.run_tokens:
        run = per_token * report.job.run_tokens / _JOULES_PER_KWH
    grams = None if grid_intensity is None else grid_intensity / 1000
    return Energy(
        watts_per_device=watts,
        compute_share=compute,
        memory_share=memory,
        pue=pue,
        joules=joules,
        joules_low=joules * low / watts,
        joules_high=joules * high / watts,
        tokens=tokens,
        joules_per_token=per_token,
        kwh_per_million_tokens=kwh,
        tokens_per_second_per_megawatt=1e6 / per_token,
        run_kwh=run,
        run_kg_co2=None if run is None or grams is None else run * grams,
        kg_co2_per_million_tokens=None if grams is None else kwh * grams,
        source=power_model(family_of(report.case.cluster.device)).source,
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


def _busy(report: TrainReport | InferReport) -> tuple[float, float]:
    """Return shares of the datasheet's peaks of arithmetic and of memory, the mean over a step or a batch."""
    from shardwise.answers._roofline_points import roofline

    again = {"decode": float(max(getattr(report.job, "output_tokens", 1) - 1, 0))}
    arithmetic = moved = 0.0
    for point in roofline(report).points:
        times = point.times * again.get(point.phase, 1.0)
        arithmetic += times * point.flops / point.peak_flops_per_second
        moved += times * point.moved_bytes / point.peak_bytes_per_second
    seconds, _ = _work(report)
    return min(arithmetic / seconds, 1.0), min(moved / seconds, 1.0)


def _work(report: TrainReport | InferReport) -> tuple[float, float]:
    """Return seconds and tokens: of a training step, or of a batch from its arrival to its last token."""
    job = report.job
    if isinstance(job, Training):
        return cast("TrainReport", report).step_seconds, float(job.tokens_per_step)
    served = cast("InferReport", report)
    return served.request_seconds, float(served.batch_in_flight * (job.output_tokens or job.input_tokens))


def asked_energy(inputs: Inputs, report: TrainReport | InferReport) -> Energy | None:
    """Return the energy of a report where --energy, or what belongs to it, is given."""
    if not inputs.get("energy") and not {"pue", "grid_intensity"} & inputs.values.keys():
        return None
    return energy(report, inputs.get("pue", 1.0), inputs.get("grid_intensity"))


def energy_tree(found: Energy | None) -> dict[str, Any]:
    """Return the key of the JSON answer, none where it was not asked for."""
    return {} if found is None else {"energy": asdict(found)}


def energy_lines(page: Page, found: Energy | None, of: str) -> None:
    """Append what was asked for to a page; `of` says whose joules these are."""
    if found is None:
        return
    text = f"{show_joules(found.joules)} {of}, {show_joules(found.joules_per_token)} a token, "
    text += f"{_kwh(found.kwh_per_million_tokens)} a million tokens"
    run = f"; the run {_kwh(found.run_kwh)}" if found.run_kwh is not None else ""
    page.label("ENERGY", text + run)
    rate = show_count(found.tokens_per_second_per_megawatt)
    page.note(
        f"{found.watts_per_device:,.0f} W a device at {found.compute_share:.0%} of its FLOP/s and "
        f"{found.memory_share:.0%} of its memory's bandwidth; {rate} tokens/s a MW"
    )
    low, high = found.joules_low / found.joules, found.joules_high / found.joules
    page.note(f"8 of 10 measured serving loads: {low:.2f} to {high:.2f} of it ({found.source})", "dim")
    carbon = found.run_kg_co2 if found.run_kg_co2 is not None else found.kg_co2_per_million_tokens
    if carbon is not None:
        what = "the run" if found.run_kg_co2 is not None else "a million tokens"
        page.note(f"{_prefixed(carbon, ('kg', 't', 'kt'))} CO2 {what}")
    page.note(ASSUMED if found.pue == 1 else f"at the building's meter, PUE {found.pue:g}", "dim")


def _kwh(kwh: float) -> str:
    return _prefixed(kwh, ("kWh", "MWh", "GWh"))


def _prefixed(value: float, units: tuple[str, str, str]) -> str:
    """Return a value in the first of units, each a thousand of the one before, that needs few digits.

    >>> _prefixed(96800.0, ("kg", "t", "kt")), _prefixed(0.359, ("kg", "t", "kt"))
    ('96.8 t', '0.359 kg')
    """
    step = 0 if value < 1e3 else 1 if value < 1e6 else 2
    return f"{value / 1e3**step:,.3g} {units[step]}"


def show_joules(joules: float) -> str:
    """Return joules as people read them.

    >>> show_joules(0.0123), show_joules(4.2), show_joules(25000)
    ('12.3 mJ', '4.2 J', '25 kJ')
    """
    for size, unit in ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J")):
        if joules >= size:
            return f"{joules / size:.3g} {unit}"
    return f"{joules * 1e3:.3g} mJ"
