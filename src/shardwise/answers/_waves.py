"""A static batch that the cache does not hold at once: an engine with a queue runs it in waves."""

from __future__ import annotations

from shardwise.answers._page import Page
from shardwise.records import dataclass, replace
from shardwise.serving import InferReport, ServingOptions, even_waves, infer
from shardwise.units import show_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Waves:
    """The waves of a batch on a replica: how many of how many requests, and the seconds until the last one ends."""

    count: int
    batch: int
    seconds: float
    output_tokens_per_second: float


def waves_of(report: InferReport) -> Waves | None:
    """Return the waves of a batch that does not fit at once, None where it fits or not one request of it does.

    Each wave starts when the one before has ended, as answers of equal length let it.
    """
    case, batch, room = report.case, report.job.batch, report.max_concurrency
    if report.fits or not 0 < room < batch:
        return None
    count, each = even_waves(batch, room)
    job = replace(report.job, batch=each)
    options = ServingOptions(engine=case.engine, efficiencies=case.efficiencies)
    one = infer(case.model, case.cluster, report.plan, job, options)
    if not one.fits:
        return None
    seconds = count * one.request_seconds
    rate = batch * report.plan.dp * job.output_tokens / seconds
    return Waves(count=count, batch=job.batch, seconds=seconds, output_tokens_per_second=rate)


def waves_lines(page: Page, waves: Waves | None) -> None:
    """Append how long an engine with a queue takes for a batch that does not fit, and what the lines below are of."""
    if waves is not None:
        how = f"{waves.count:,} waves of {waves.batch:,}, one after the other"
        page.label("WAVES", f"an engine that queues requests ends the batch after {show_seconds(waves.seconds)}: {how}")
        if waves.output_tokens_per_second:
            page.note(f"{waves.output_tokens_per_second:,.0f} output tokens/s in all, prompts included")
    page.note("seconds below are as if all of it had room", "bold yellow")
    page.blank()
