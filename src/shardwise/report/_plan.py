"""The answer of a search as the tree that `--json` prints; its keys are stable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardwise.plans import spans
from shardwise.report._train import train_tree
from shardwise.search import Found
from shardwise.training import TrainReport


def plan_tree(found: Found, commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the answer of a search as plain values; `commands` are the words that evaluate each of the best."""
    counts = found.counts
    best = [
        {**train_tree(report), "placement": placement(report), "command": " ".join(words)}
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
            "objective": found.wish.objective,
        },
        "best": best,
        "front": [short_tree(report) for report in found.front],
        "rejected": [asdict(row) for row in found.rejected],
        "nearest": short_tree(found.nearest) if found.nearest is not None else None,
    }


def short_tree(report: TrainReport) -> dict[str, Any]:
    """Return a plan with its headlines."""
    return {
        "step_seconds": report.step_seconds,
        "tokens_per_second_per_gpu": report.tokens_per_second_per_gpu,
        "device_bytes": report.device_bytes,
        "devices": report.plan.num_devices,
        "plan": asdict(report.plan),
    }


def placement(report: TrainReport) -> dict[str, int]:
    """Return how many ranks of each axis share a domain of the fastest tier, those above one."""
    placed = spans(report.plan, report.case.domains)
    return {axis: placed[axis][0] for axis in report.plan.order if placed[axis][0] > 1}
