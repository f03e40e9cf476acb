"""A deployment under load as a page: the verdict, latencies, load, cost, and where the seconds go."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.answers._page import FULL, Page, Segment, command_lines
from shardwise.serving.load import PERCENTILES, ServeReport
from shardwise.units import show_bytes, show_seconds

_ROWS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "end to end", "queue": "queueing"}
_STYLES = ("blue", "green", "cyan", "yellow", "magenta")


def _rate(value: float) -> str:
    return f"{value:,.2f} requests/s"


def _verdict(report: ServeReport, page: Page) -> None:
    base = report.base
    name = f"{base.case.model.name} on {base.plan.num_devices} x {base.case.cluster.device.name}"
    many = f"{report.replicas} replicas" if report.replicas > 1 else "one replica"
    where = f"{name}: tp {base.plan.tp}, pp {base.plan.pp}, {many}, {base.case.engine.name}"
    if not base.fits:
        page.label("NO FIT", where, "bold red", "bold")
        page.note(f"{show_bytes(base.short_by_bytes)} short of memory for one request of the longest length")
    elif not report.stable:
        page.label("UNSTABLE", where, "bold red", "bold")
        page.note(
            f"the queue grows by {_rate(report.growth_per_second)}; stable up to {_rate(report.capacity_per_second)}"
        )
    elif report.broken:
        page.label("MISSES", where, "bold red", "bold")
        for limit in report.broken:
            value = show_seconds(report.value(limit))
            page.note(f"{limit.quantile} {_ROWS[limit.metric]} is {value}, the limit {show_seconds(limit.seconds)}")
    else:
        page.label("MEETS" if report.options.limits else "SERVES", where, "bold green", "bold")
        for limit in report.options.limits:
            value = show_seconds(report.value(limit))
            page.note(f"{limit.quantile} {_ROWS[limit.metric]} is {value}, the limit {show_seconds(limit.seconds)}")


def _latencies(report: ServeReport, page: Page) -> None:
    page.blank()
    page.add(("LATENCY  of the server, from arrival", "bold"))
    rows = [["", "mean", *PERCENTILES]]
    for key, word in _ROWS.items():
        found = report.latencies.get(key)
        if found:
            rows.append([word, *(show_seconds(found[name]) for name in ("mean", *PERCENTILES))])
    page.table(rows, right=(1, 2, 3, 4, 5), header=True, indent=0)


def _load(report: ServeReport, page: Page) -> None:
    tree = report.to_dict()
    page.blank()
    served = f"{_rate(report.requests_per_second)}, {report.output_tokens_per_second:,.0f} output tokens/s"
    page.label("LOAD", f"serves {served}; carries up to about {_rate(report.capacity_per_second)}")
    running, waiting, cache = tree["running"], tree["waiting"], tree["kv"]
    page.note(f"a replica runs {running['mean']:.1f} requests on average, {running['max']} at most")
    page.note(f"and {waiting['mean']:.1f} wait on average, {waiting['max']} at most")
    share = cache["used_max"] / cache["capacity_tokens"] if cache["capacity_tokens"] else 0.0
    page.note(f"cache {cache['used_max']:,.0f} of {cache['capacity_tokens']:,} tokens a replica at most ({share:.0%})")
    if tree["preemptions"]:
        page.note(f"{tree['preemptions']:,} preemptions, {tree['recomputed_tokens']:,} tokens recomputed")
    if tree["prefix_hit_share"]:
        page.note(f"{tree['prefix_hit_share']:.0%} of prompt tokens come from the prefix cache")
    if report.options.limits:
        page.note(f"{report.goodput_share:.1%} of requests keep every limit")


def _cost(report: ServeReport, page: Page) -> None:
    hourly, million = report.usd_per_hour, report.usd_per_million_output_tokens
    if hourly is not None:
        text = f"${hourly:,.2f} an hour"
        page.label("COST", text + (f", ${million:,.2f} a million output tokens" if million else ""))


def serve_page(report: ServeReport, words: Sequence[str], width: int) -> Page:
    """Return the page of a deployment under load."""
    page = Page(width)
    _verdict(report, page)
    if report.requests:
        _latencies(report, page)
        _load(report, page)
        parts = report.why()
        if parts:
            page.blank()
            whole = sum(seconds for _, seconds in parts)
            segments = [Segment(word, s, FULL, _STYLES[i % 5]) for i, (word, s) in enumerate(parts)]
            page.bar("WHY", segments, whole, f"p99 TTFT {show_seconds(report.latencies['ttft']['p99'])}")
            for word, seconds in parts:
                page.note(f"{show_seconds(seconds):>10}  {word}")
        page.blank()
    _cost(report, page)
    page.blank()
    page.label("ASSUMED", "")
    page.items(report.assumptions)
    command_lines(page, "AGAIN", words)
    return page
