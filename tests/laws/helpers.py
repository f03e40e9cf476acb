"""What the laws have in common: how often they are tried, and short names of a case's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings

from shardwise.plans import Plan, splits_replicas
from shardwise.training import (
    Evaluation,
    TrainingCase,
    TrainReport,
    evaluate,
    sizes_of,
    sizes_of_columns,
    stages_of,
)
from shardwise.training._report import report_of
from shardwise.training._stages import Stages

SLACK = 1 + 1e-9


def tried(examples: int) -> settings:
    """Return settings that try a law on so many cases, always the same ones."""
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    return settings(max_examples=examples, deadline=None, suppress_health_check=slow)


def report(case: TrainingCase) -> TrainReport:
    """Return the report of a case."""
    return report_of(case, ())


def evaluated(case: TrainingCase) -> Evaluation[Any]:
    """Return memory and time of a case."""
    return evaluate(case, sizes_of(case.plan, case.job.global_batch, case.domains), stages_of(case))


def peak(case: TrainingCase) -> float:
    """Return the peak bytes of the heaviest stage."""
    return evaluated(case).peak


def seconds(case: TrainingCase) -> float:
    """Return the seconds of a step."""
    return evaluated(case).step.total


def structure(plan: Plan) -> tuple[object, ...]:
    """Return what plans must have in common to be evaluated as one column."""
    same = ("layout", "sequence_parallel", "cp_kind", "schedule", "sharding", "recompute", "modules", "offload")
    return (*(getattr(plan, name) for name in same), bool(plan.recompute_layers), splits_replicas(plan))


def evaluate_columns(case: TrainingCase, plans: Sequence[Plan]) -> Evaluation[Any]:
    """Return memory and time of plans of one `structure` as columns; who has fewer runs has runs of no stages."""
    rows = [stages_of(replace(case, plan=plan)) for plan in plans]
    longest = max(map(len, rows))
    padded = [(*row, *[replace(row[-1], count=0)] * (longest - len(row))) for row in rows]
    sizes = sizes_of_columns(plans, case.job.global_batch, case.domains)
    return evaluate(replace(case, plan=plans[0]), sizes, tuple(_stacked(runs) for runs in zip(*padded, strict=True)))


def _stacked(runs: Sequence[Stages[float]]) -> Stages[Any]:
    """Return a run of many plans, its numbers columns."""

    def column(values: Sequence[Any]) -> Any:
        if isinstance(values[0], tuple):
            return tuple(map(column, zip(*values, strict=True)))
        return np.array(values, np.float64)

    return Stages(**{one.name: column([getattr(run, one.name) for run in runs]) for one in fields(Stages)})
