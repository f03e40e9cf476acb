"""Runs whose requests all come together: batches that the cache does not hold, and queues that are run to their end."""

from __future__ import annotations

import math

from shardwise.measured._record import Record, refuse
from shardwise.models import Model
from shardwise.plans import Arrivals, Length, Serving, Workload
from shardwise.records import replace
from shardwise.serving import InferReport, ServingOptions
from shardwise.serving.load import LoadOptions, ServeReport, limits_of, serve

# Requests of a queue that are simulated at most: of more the last wave is a small part.
_MOST = 60_000


def as_run(record: Record, model: Model) -> Model:
    """Return a row's model with room for its requests: what was measured ran, whatever the model states."""
    longest = math.ceil(record.number("input_tokens") + record.number("output_tokens"))
    if not model.max_context or model.max_context >= longest:
        return model
    record.assume(f"requests of {longest} tokens beyond the {model.max_context} that the model states")
    return replace(model, max_context=2 * longest)


def in_waves(record: Record, base: InferReport) -> ServeReport:
    """Return the run of a fixed batch that the cache does not hold to its end: who finds no room waits for others."""
    case = base.case
    job = replace(case.job, max_sequences=case.profiled.sequences or case.job.batch)
    report = _all_at_once(record, base, job, case.job.batch * base.plan.dp)
    record.assume(f"the cache does not hold the batch to its end: up to {_most_running(report)}")
    return report


def queued(record: Record, base: InferReport, count: int) -> ServeReport:
    """Return the run of a queue of so many requests, all there when it starts: its last steps run few of them.

    As many run at once as the row says, or as the engine takes, where the cache holds them.
    """
    stated = -(-record.whole("batch") // base.plan.dp)
    most = stated or limits_of(base.case.engine.name, base.case.cluster.device).sequences
    job = replace(base.case.job, max_sequences=most, max_batched_tokens=record.whole("max_num_batched_tokens"))
    report = _all_at_once(record, base, job, min(count, _MOST))
    part = f", of which {_MOST} are simulated" if count > _MOST else ""
    record.assume(f"offline: a queue of {count} requests{part}, up to {_most_running(report)}")
    return report


def _all_at_once(record: Record, base: InferReport, job: Serving, count: int) -> ServeReport:
    """Return the run of so many requests of a fixed batch that come together."""
    asked = Workload(
        input_tokens=Length(mean=job.input_tokens), output_tokens=Length(mean=max(job.output_tokens, 1)),
        arrivals=Arrivals(kind="burst"), count=count, finite=True,
    )  # fmt: skip
    # A script that holds its engine has no API server.
    case, options = base.case, LoadOptions(serving=ServingOptions(engine=base.case.engine), api_server_seconds=0.0)
    report = serve(as_run(record, case.model), case.cluster, case.plan, asked, job, options)
    if not report.requests:
        raise refuse("batch", case.job.batch, "does not fit with one of its requests")
    return report


def _most_running(report: ServeReport) -> str:
    return f"{max(trace.most_running for trace in report.traces)} sequences at once on a replica"
