"""What the laws have in common: how often they are tried, and short names of a case's answers."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

from shardwise.training import Evaluation, TrainingCase, TrainReport, evaluate, sizes_of, stages_of
from shardwise.training._report import report_of

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
