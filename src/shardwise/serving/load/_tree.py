"""A deployment under load as the record that `--json` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.serving.load._bands import chance_of
from shardwise.serving.load._why import EXPLAINED

if TYPE_CHECKING:
    from shardwise.serving.load._report import ServeReport


def _tree(latencies: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return latencies with the unit in the name of each value."""
    return {m: {f"{name}_seconds": value for name, value in found.items()} for m, found in latencies.items()}


def _of_a_replica(report: ServeReport) -> dict[str, dict[str, float | None]]:
    """Return what runs, what waits and what the cache holds, on average over the run and at most."""
    groups = report.scaling.mean_replicas * report.groups if report.scaling else report.base.plan.dp
    traces, whole = report.traces, report.span_seconds * groups
    seconds = (
        sum(t.running_seconds for t in traces),
        sum(r.queue_seconds for r in report.requests),
        sum(t.cache_token_seconds for t in traces),
    )
    running, waiting, used = (one / whole if whole else None for one in seconds)
    return {
        "running": {"mean": running, "max": max((t.most_running for t in traces), default=None)},
        "waiting": {"mean": waiting, "max": max((t.most_waiting for t in traces), default=None)},
        "kv": {
            "capacity_tokens": report.base.kv_cache_tokens,
            "used_mean": used,
            "used_max": max((t.most_cache_tokens for t in traces), default=None),
        },
    }


def _limits(report: ServeReport, of: str = "") -> list[dict[str, Any]]:
    """Return the limits on all requests, or on those of a class, and whether each is kept."""
    return [
        {
            "metric": one.metric, "quantile": one.quantile, "seconds": one.seconds,
            "kept": one not in report.broken, "chance": chance_of(report, one),
        }
        for one in report.options.limits
        if one.of == of
    ]  # fmt: skip


def _of_classes(report: ServeReport) -> dict[str, list[dict[str, Any]]]:
    """Return what happened to the requests of each class, nothing where there are none."""
    found = []
    for one in report.workload.classes:
        part, latencies = report.by_class.get(one.name, ([], {}))
        head = {"name": one.name, "share": one.share, "requests": len(part), "limits": _limits(report, one.name)}
        found.append(head | _tree(latencies))
    return {"classes": found} if found else {}


def _of_prefill(report: ServeReport) -> dict[str, Any] | None:
    """Return the pool that computes prompts, and the seconds of sending their cache; None where one does both."""
    if report.prefill is None:
        return None
    plan, traces, count = report.prefill.base.plan, report.prefill.traces, max(len(report.requests), 1)
    busy = sum(t.busy_seconds for t in traces) / max(sum(t.seconds for t in traces), 1e-12)
    return {
        "plan": {axis: getattr(plan, axis) for axis in ("tp", "pp", "dp", "ep")},
        "devices": plan.num_devices,
        "utilization": busy if traces else None,
        "prompt_seconds": sum(r.prompt_seconds for r in report.requests) / count if report.requests else None,
        "transfer_seconds": sum(r.transfer_seconds for r in report.requests) / count if report.requests else None,
    }


def tree_of(report: ServeReport) -> dict[str, Any]:
    """Return the record that `--json` prints; seconds, requests a second, None where a value is not known.

    `running`, `waiting` and `kv` are of one replica, of one of its queues where attention is data
    parallel or pipeline stages have several batches in flight.
    """
    traces = report.all_traces
    offered = report.workload.arrivals.rate or (report.requests_per_second if report.requests else None)
    total = sum(t.prompt_tokens + t.hit_tokens for t in traces)
    return {
        "meets": report.meets,
        "chance_to_meet": report.chance_to_meet,
        "risk": report.options.risk or None,
        "fits": report.fits,
        "stable": report.stable,
        "model": report.base.case.model.name,
        "plan": {axis: getattr(report.base.plan, axis) for axis in ("tp", "pp", "dp", "ep")},
        "engine": report.base.case.engine.name,
        "load": {"requests_per_second": offered, "growth_per_second": report.growth_per_second},
        "served": {
            "requests_per_second": report.requests_per_second if report.requests else None,
            "output_tokens_per_second": report.output_tokens_per_second if report.requests else None,
        },
        "goodput": {
            "share": report.goodput_share if report.requests else None,
            "requests_per_second": report.goodput_share * report.requests_per_second if report.requests else None,
        },
        "capacity": {"requests_per_second": report.capacity_per_second},
        "utilization": report.steady.rate * report.base.plan.dp / report.capacity_per_second
        if report.open_loop
        else None,
        **_tree(report.latencies),
        "interval": report.interval,
        **_of_a_replica(report),
        "preemptions": sum(t.preemptions for t in traces),
        "recomputed_tokens": sum(t.recomputed_tokens for t in traces),
        "prefix_hit_share": sum(t.hit_tokens for t in traces) / total if total else None,
        "replicas": report.replicas,
        "attention_dp": report.groups,
        "devices": report.devices,
        "prefill": _of_prefill(report),
        "autoscale": report.scaling.to_dict(report.devices // report.replicas) if report.scaling else None,
        "usd_per_hour": report.usd_per_hour,
        "usd_per_million_output_tokens": report.usd_per_million_output_tokens,
        "limits": _limits(report),
        **_of_classes(report),
        "why": {
            metric: [{"part": part, "seconds": value} for part, value in report.why(metric)] for metric in EXPLAINED
        },
        "method": {
            "name": "simulated" if traces else "steady",
            "requests": len(report.requests),
            "iterations": sum(t.iterations for t in traces),
            "seed": report.workload.seed,
        },
        "assumptions": list(report.assumptions),
    }
