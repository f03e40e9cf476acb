"""The answer of a search as the tree that `--json` prints; its keys are stable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from shardwise.answers._rejected import change_tree, runner_up_tree
from shardwise.answers._train_tree import train_tree
from shardwise.plans import spans
from shardwise.search import TRAIN_LIMITS, TrainingResult, runners_up
from shardwise.serving import InferReport
from shardwise.training import TrainingCase, TrainReport
from shardwise.training._stated import stated


def plan_tree(found: TrainingResult, commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the answer of a search as plain values; `commands` are the words that evaluate each of the best."""
    counts, nearest = found.counts, found.nearest
    best = [
        {
            **train_tree(_with_assumptions(report), found.options.risk),
            "alternatives": list(found.alternatives(report)[1:]),
            "placement": placement(report),
            "command": " ".join(words),
        }
        for report, words in zip(found.best, commands, strict=True)
    ]
    return {
        "search": {
            "plans": found.num_plans,
            "legal": counts.legal,
            "fitting": counts.fitting,
            "evaluated": counts.evaluated,
            "seconds": found.seconds,
            "covered": found.covered,
            "objective": found.options.objective,
            "limits": limits_of(found),
            "risk": found.options.risk,
        },
        "best": best,
        "front": [short_tree(report) for report in found.front],
        "runners_up": [
            {**short_tree(report), **runner_up_tree(runner_up)}
            for runner_up in runners_up(found)
            if isinstance(report := runner_up.report, TrainReport)
        ],
        "rejected": [{**asdict(row), "change": change_tree(found.remedy(row.name))} for row in found.rejected],
        "nearest": short_tree(nearest) if nearest is not None else None,
    }


def limits_of(found: TrainingResult) -> dict[str, float]:
    """Return the limits that were asked for."""
    return {name: value for name in TRAIN_LIMITS if (value := getattr(found.options, name, 0.0))}


def short_tree(report: TrainReport) -> dict[str, Any]:
    """Return a plan with its headlines."""
    return {
        "step_seconds": report.step_seconds,
        "tokens_per_second_per_gpu": report.tokens_per_second_per_gpu,
        "device_bytes": report.device_bytes,
        "chance_to_fit": report.chance_to_fit,
        "devices": report.plan.num_devices,
        "launchable": not report.unlaunched,
        "plan": asdict(report.plan),
    }


def assumed(case: TrainingCase, report: TrainReport | None) -> tuple[str, ...]:
    """Return what a plan was evaluated with that nobody said, as `train` lists it; of no plan, what all share."""
    said = [*case.model.assumptions, *case.cluster.assumptions]
    if report is not None:
        said += [*stated(report.case), *report.evaluation.rates.assumptions, *report.evaluation.network.assumptions]
    return tuple(dict.fromkeys(said))


def _with_assumptions(report: TrainReport) -> TrainReport:
    return replace(report, assumptions=assumed(report.case, report))


def placed_words(place: dict[str, int]) -> str:
    """Return in words what shares a domain of the fastest tier.

    >>> placed_words({"tp": 4, "dp": 2}), placed_words({})
    ('tp 4 dp 2', 'alone')
    """
    return " ".join(f"{axis} {n}" for axis, n in place.items()) or "alone"


def tiers_words(report: TrainReport | InferReport) -> list[str]:
    """Return in words which ranks share a domain of each tier but that of all devices, none where one holds them."""
    placed, domains, tiers = spans(report.plan, report.case.domains), report.case.domains, report.case.cluster.tiers
    said = []
    for i, size in enumerate(domains[:-1]):
        if size >= report.plan.num_devices:
            break
        inside = {str(axis): placed[axis][i] for axis in report.plan.order if placed[axis][i] > 1}
        said.append(f"{placed_words(inside)} in a {'domain' if i == 0 else tiers[i].name}")
    return said


def placement(report: TrainReport) -> dict[str, int]:
    """Return how many ranks of each axis share a domain of the fastest tier, those above one."""
    placed = spans(report.plan, report.case.domains)
    return {axis: placed[axis][0] for axis in report.plan.order if placed[axis][0] > 1}
