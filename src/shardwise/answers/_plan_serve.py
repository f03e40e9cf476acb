"""The answer of a search for a deployment as the tree that `--json` prints; its keys are stable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardwise.answers._infer_view import infer_tree
from shardwise.answers._rejected import change_tree, runner_up_tree
from shardwise.plans import spans
from shardwise.search import ServingResult, runners_up, tokens_per_second_per_gpu
from shardwise.serving import InferReport

LIMITS = ("max_ttft_seconds", "max_tpot_seconds", "max_latency_seconds", "max_usd", "min_tokens_per_second")


def serve_tree(found: ServingResult, commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the answer of a search as plain values; `commands` are the words that evaluate each of the best."""
    best = [
        {
            **infer_tree(report),
            "tokens_per_second_per_gpu": tokens_per_second_per_gpu(report),
            "placement": serve_placement(report),
            "command": " ".join(words),
        }
        for report, words in zip(found.best, commands, strict=True)
    ]
    return {
        "search": {
            "plans": found.num_plans,
            "legal": found.counts.legal,
            "fitting": found.counts.fitting,
            "evaluated": found.counts.evaluated,
            "seconds": found.seconds,
            "covered": 1.0,
            "objective": found.options.objective,
            "limits": {name: getattr(found.options, name) for name in LIMITS if getattr(found.options, name)},
        },
        "best": best,
        "front": [short_serve_tree(report) for report in found.front],
        "runners_up": [
            {**short_serve_tree(report), **runner_up_tree(runner_up)}
            for runner_up in runners_up(found)
            if isinstance(report := runner_up.report, InferReport)
        ],
        "rejected": [{**asdict(row), "change": change_tree(found.remedy(row.name))} for row in found.rejected],
        "nearest": short_serve_tree(found.nearest) if found.nearest is not None else None,
    }


def short_serve_tree(report: InferReport) -> dict[str, Any]:
    """Return a deployment with its headlines."""
    names = ("fits", "ttft_seconds", "tpot_seconds", "request_seconds", "output_tokens_per_second")
    job = {name: getattr(report.job, name) for name in ("batch", "weights", "kv_cache", "compute")}
    return {
        **{name: getattr(report, name) for name in names},
        "tokens_per_second_per_gpu": tokens_per_second_per_gpu(report),
        "usd_per_million_output_tokens": report.usd_per_million_output_tokens,
        "devices": report.plan.num_devices,
        "plan": {**asdict(report.plan), "engine": report.case.engine.name},
        "job": {**job, "weights": job["weights"] or report.case.format.name},
    }


def serve_placement(report: InferReport) -> dict[str, int]:
    """Return how many ranks of each axis share a domain of the fastest tier, those above one."""
    placed = spans(report.plan, report.case.domains)
    return {axis: placed[axis][0] for axis in report.plan.order if placed[axis][0] > 1}
