"""The published runs that stand behind a band, and those of them that are nearest to a plan.

published.csv has them by configuration, made by `python -m accuracy update`: runs of one source, model, device, number
of devices and stack share a row.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import field
from functools import cache
from typing import TYPE_CHECKING, Any

from shardwise import cost
from shardwise.answers._page import Page
from shardwise.cost import Conditions, spreads
from shardwise.models import Model
from shardwise.ops import count_parameters
from shardwise.plans import Training
from shardwise.records import dataclass
from shardwise.units import counted, percent

if TYPE_CHECKING:
    from shardwise.serving import InferReport
    from shardwise.training import TrainReport

SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRuns:
    """Published runs of one configuration: how many, and by how much their headline was off, predicted over measured.

    `headline` is the band that they belong to, `conditions` what is known of them.
    """

    headline: str
    source: str
    model: str
    parameters: float
    device: str
    num_devices: int
    runs: int
    error: float
    conditions: Conditions


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What stands behind the band of a headline: runs of sources, those of the same stack, and the nearest."""

    headline: str
    runs: int
    sources: int
    same_stack: int
    """Runs on the stack or engine of the plan and a device of its family."""
    nearest: tuple[PublishedRuns, ...] = field(default=())


@cache
def published_runs(headline: str) -> tuple[PublishedRuns, ...]:
    """Return every configuration whose headline was run and published.

    >>> min(one.runs for one in published_runs("step_seconds"))
    1
    """
    import csv

    with open(os.path.join(os.path.dirname(cost.__file__), "published.csv"), encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["headline"] == headline]
    return tuple(
        PublishedRuns(
            headline=row["headline"],
            source=row["source"],
            model=row["model"],
            parameters=float(row["parameters"]),
            device=row["device"],
            num_devices=int(row["num_devices"]),
            runs=int(row["runs"]),
            error=float(row["error"]),
            conditions=Conditions(
                stack=row["stack"], family=row["family"], words=tuple(row["known"].split("|")) if row["known"] else ()
            ),
        )
        for row in rows
    )


def _trains(report: TrainReport | InferReport) -> bool:
    """Return whether a report is of training; to ask for its class would load what trains where nothing does."""
    return isinstance(report.job, Training)


def evidence_of(report: TrainReport | InferReport) -> Evidence:
    """Return what stands behind the band of a plan's step, or of its requests.

    >>> from shardwise import Cluster, Plan, Training, load_model, train
    >>> report = train(load_model("gpt2"), Cluster.parse("1xh100"), Plan(), Training(seq_len=1024, global_batch=8))
    >>> len(evidence_of(report).nearest)
    3
    """
    headline = "step_seconds" if _trains(report) else "request_seconds"
    known = report.conditions
    band = spreads()[headline]
    own = published_runs(headline)
    alike = (one for one in own if (one.conditions.stack, one.conditions.family) == (known.stack, known.family))
    return Evidence(
        headline=headline,
        runs=band.rows,
        sources=band.sources,
        same_stack=sum(one.runs for one in alike),
        nearest=nearest_runs(own, known, report.case.model, (report.case.cluster.device.chip, report.plan.num_devices)),
    )


def nearest_runs(
    runs: Sequence[PublishedRuns], known: Conditions, model: Model, on: tuple[str, int]
) -> tuple[PublishedRuns, ...]:
    """Return the runs nearest to one of a model `on` so many of a device.

    Another stack or family of devices counts as much as a model seven times as large, as does 50 times the devices.
    """
    size, (device, count), words_of = count_parameters(model), on, frozenset(known.words)

    def distance(one: PublishedRuns) -> float:
        other = 2.0 * (one.conditions.stack != known.stack) + 2.0 * (one.conditions.family != known.family)
        words = 0.5 * len(words_of.symmetric_difference(one.conditions.words)) + 0.5 * (one.device != device)
        return other + words + abs(math.log(one.parameters / size)) + 0.5 * abs(math.log(one.num_devices / count))

    return tuple(sorted(runs, key=distance)[:SHOWN])


def interval_tree(report: object) -> dict[str, dict[str, float]] | None:
    """Return low, typical and high of every headline that has an interval, None where there is none."""
    interval, typical = getattr(report, "interval", None), getattr(report, "typical", {})
    if not interval:
        return None
    return {name: {"low": low, "typical": typical[name], "high": high} for name, (low, high) in interval.items()}


def evidence_tree(report: TrainReport | InferReport) -> dict[str, Any]:
    """Return the published runs behind the band of a step, or of a request, and the nearest of them."""
    evidence = evidence_of(report)
    names = ("source", "model", "device", "num_devices", "runs", "error")
    nearest = [
        {**{name: getattr(one, name) for name in names}, "stack": one.conditions.stack} for one in evidence.nearest
    ]
    return {"runs": evidence.runs, "sources": evidence.sources, "same_stack": evidence.same_stack, "nearest": nearest}


def fits_at(report: TrainReport | InferReport, risk: float) -> bool:
    """Return whether a plan fits as predicted, with a chance of at least what was asked."""
    return report.fits and report.chance_to_fit >= risk


def evidence_lines(page: Page, report: TrainReport | InferReport) -> None:
    """Add the published runs that the band of a plan's seconds rests on, and the nearest of them with their errors."""
    evidence = evidence_tree(report)
    alike = f"{evidence['same_stack']:,} of them with its {'stack' if _trains(report) else 'engine'}"
    text = f"the band rests on {evidence['runs']:,} runs of {evidence['sources']} sources, {alike} on such devices"
    page.label("MEASURED", f"{text}; the nearest:")
    for one in evidence["nearest"]:
        where = f"{one['model']} on {one['num_devices']:,} x {one['device']}, {one['stack']} ({one['source']})"
        page.note(f"{where}: {counted(one['runs'], 'run')}, predicted {percent(one['error'], True)}", "dim")


def show_band(report: TrainReport | InferReport, name: str, show: Callable[[float], str]) -> str:
    """Return low, typical and high of a headline in words."""
    low, high = report.interval[name]
    return f"typical {show(report.typical[name])}, 8 of 10 published runs {show(low)} to {show(high)}"
