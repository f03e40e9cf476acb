"""The published runs that stand behind a band, and those of them that are nearest to a plan.

published.csv has them by configuration, made by `python -m accuracy update`: runs of one source, model, device, number
of devices and stack share a row.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from shardwise.cost import Conditions, spreads
from shardwise.models import Model
from shardwise.ops import count_parameters
from shardwise.training import TrainReport, conditions

if TYPE_CHECKING:
    from shardwise.serving import InferReport

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
def published_runs() -> tuple[PublishedRuns, ...]:
    """Return every configuration that was run and published.

    >>> {one.headline for one in published_runs()} >= {"step_seconds", "request_seconds"}
    True
    """
    text = resources.files("shardwise.cost").joinpath("published.csv").read_text(encoding="utf-8")
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
        for row in csv.DictReader(text.splitlines())
    )


def evidence_of(report: TrainReport | InferReport) -> Evidence:
    """Return what stands behind the band of a plan's step, or of its requests.

    >>> from shardwise import Cluster, Plan, Training, load_model, train
    >>> report = train(load_model("gpt2"), Cluster.parse("1xh100"), Plan(), Training(seq_len=1024, global_batch=8))
    >>> len(evidence_of(report).nearest)
    3
    """
    training = isinstance(report, TrainReport)
    headline = "step_seconds" if training else "request_seconds"
    known = conditions(report, False) if isinstance(report, TrainReport) else report.conditions
    band = spreads()[headline]
    own = [one for one in published_runs() if one.headline == headline]
    alike = (one for one in own if (one.conditions.stack, one.conditions.family) == (known.stack, known.family))
    return Evidence(
        headline=headline,
        runs=band.rows,
        sources=band.sources,
        same_stack=sum(one.runs for one in alike),
        nearest=nearest_runs(own, known, report.case.model, (report.case.cluster.device.name, report.plan.num_devices)),
    )


def nearest_runs(
    runs: Sequence[PublishedRuns], known: Conditions, model: Model, on: tuple[str, int]
) -> tuple[PublishedRuns, ...]:
    """Return the runs nearest to one of a model `on` so many of a device.

    Another stack or family of devices counts as much as a model seven times as large, as does 50 times the devices.
    """
    size, (device, count) = count_parameters(model), on

    def distance(one: PublishedRuns) -> float:
        other = 2.0 * (one.conditions.stack != known.stack) + 2.0 * (one.conditions.family != known.family)
        words = 0.5 * len({*one.conditions.words} ^ {*known.words}) + 0.5 * (one.device != device)
        return other + words + abs(math.log(one.parameters / size)) + 0.5 * abs(math.log(one.num_devices / count))

    return tuple(sorted(runs, key=distance)[:SHOWN])
