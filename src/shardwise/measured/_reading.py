"""What requests wait for an API server that prepares their prompts one after another before the engine has them."""

from __future__ import annotations

from shardwise.measured._record import Record
from shardwise.serving.load import ServeReport, rush_seconds, spread_of


def prepared_seconds(record: Record, report: ServeReport) -> float:
    """Return the seconds of a row's API server before a request reaches the engine, none where the notes say nothing.

    One process prepares the requests one after another. Of those that come at once it prepares all before it hands any
    over: each waits for all of them.
    """
    each = record.noted("api_server_seconds")
    return each * (len(report.requests) if report.workload.arrivals.kind == "burst" else 1)


def seen_seconds(record: Record, report: ServeReport, metric: str, quantile: str) -> float:
    """Return a latency as requests see it, those that came together behind what they wait for each other.

    In a closed loop these are the first requests of the users: what follows comes as answers end.
    """
    rush = waited_together(record, report)
    if metric not in ("ttft", "e2e") or not rush:
        return report.latencies[metric][quantile]
    start = min(request.arrival for request in report.requests)
    of = "ttft_seconds" if metric == "ttft" else "e2e_seconds"
    return spread_of([getattr(r, of) + rush * (r.arrival == start) for r in report.requests])[quantile]


def waited_together(record: Record, report: ServeReport) -> float:
    """Return the seconds that the first requests of a run wait for each other, 0 where they do not come together."""
    arrivals, together = report.workload.arrivals, len(report.requests)
    if arrivals.kind not in ("closed", "burst") or report.prefill:
        return 0.0
    if "api_server_seconds" in record.notes or "server-side" in record.text("notes"):
        return 0.0
    if arrivals.kind == "closed":
        together = min(arrivals.users, together)
    rush = rush_seconds(together, report.workload.input_tokens.mean, report.policy.read_together)
    if rush:
        record.rule_value("read_together")
    return rush
