"""A deployment under load as a page: verdict, percentiles with what published runs say of them, load, causes, cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.answers._described import rate_text
from shardwise.answers._energy import Energy, energy_lines
from shardwise.answers._page import FULL, Page, Segment, command_lines, show_chance
from shardwise.serving import overstated
from shardwise.serving.load import PERCENTILES, ServeReport, around
from shardwise.units import counted, show_bytes, show_seconds, show_usd

if TYPE_CHECKING:
    from shardwise.plans import Limit, Metric
    from shardwise.search import LoadRemedy

_ROWS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "end to end", "queue": "queueing"}
_STYLES = ("blue", "green", "cyan", "yellow", "magenta")


def _spread(report: ServeReport, metric: str, quantile: str, seconds: float, of: str = "") -> str:
    """Return what published runs say of a percentile, in words."""
    band = around(report.band(metric, quantile, of), seconds)
    low, typical, high = (show_seconds(band[name]) for name in ("low", "typical", "high"))
    return f"typical {typical}, 8 of 10 published runs {low} to {high}"


def chance_line(report: ServeReport, page: Page) -> None:
    """Append the chance to fit, to carry the load and to keep every limit, and whether it is what was asked."""
    if report.fits and report.stable:
        risk = report.options.risk
        wanted = f", too risky for the {risk:.0%} that was asked" if report.chance_to_meet < risk else ""
        what = "carry it and keep every limit" if report.options.limits else "carry it"
        chance = f"chance to {what} {show_chance(report.chance_to_meet)}{wanted}"
        page.note(chance, "bold yellow" if wanted else "dim")


def limit_lines(report: ServeReport, page: Page, limits: Sequence[Limit]) -> None:
    """Append a line for each limit: what it is about, and the limit."""
    for limit in limits:
        value = show_seconds(report.value(limit))
        name = f"{limit.quantile} {_ROWS[limit.metric]}{f' of {limit.of}' if limit.of else ''}"
        page.note(f"{name} is {value}, the limit {show_seconds(limit.seconds)}")
        if math.isfinite(report.value(limit)):
            page.note(f"  {_spread(report, limit.metric, limit.quantile, report.value(limit), limit.of)}", "dim")
        if report.floor(limit) > limit.seconds:
            page.note(
                f"  an empty replica takes {show_seconds(report.floor(limit))} on average: less load does not help"
            )


def _verdict(report: ServeReport, page: Page) -> None:
    base = report.base
    name = f"{base.case.model.name} on {report.devices} x {base.case.cluster.device.name}"
    many = f"{report.replicas} replicas" if report.replicas > 1 else "one replica"
    if report.groups > 1:
        many += f" of {report.groups} attention groups"
    where = f"{name}: tp {base.plan.tp}, pp {base.plan.pp}, {many}, {base.case.engine.name}"
    if report.prefill:
        plan = report.prefill.base.plan
        where += f"; prompts on {counted(plan.dp, 'group')} of tp {plan.tp}, pp {plan.pp}"
    if not report.fits:
        base = report.base if report.prefill is None or not report.base.fits else report.prefill.base
        page.label("NO FIT", where, "bold red", "bold")
        tokens, room = base.job.total_tokens, base.kv_cache_tokens
        if over := overstated(base.case, base.kv_cache_budget_bytes_per_gpu):
            page.note(*over)
        elif room:
            page.note(f"one request of {tokens:,} tokens is longer than the cache, which holds {room:,}")
        else:
            page.note("weights and working memory leave no room for a cache")
        lacks = "that cache" if over else f"one request of {tokens:,} tokens"
        page.note(f"{show_bytes(base.short_by_bytes)} short of memory for {lacks}")
        if base is report.base:
            from shardwise.answers._infer import nearest_change

            page.note(nearest_change(base).replace("plan infer", "plan serve"))
    elif not report.stable:
        page.label("UNSTABLE", where, "bold red", "bold")
        asked = report.workload.arrivals.rate
        most = rate_text(report.capacity_per_second, asked)
        grows = report.growth_per_second
        slowly = grows < 0.01 * asked
        page.note(f"the queue grows {'slowly' if slowly else f'by {rate_text(grows)}'}; stable up to {most}")
        first, whole = (show_seconds(getattr(report.empty, f"{name}_seconds")) for name in ("ttft", "e2e"))
        page.note(f"a request alone takes {whole} on a replica, its first token {first}")
        rule = report.options.autoscale
        if rule and asked <= report.capacity_per_second:
            start = show_seconds(rule.start_seconds)
            page.note(f"while replicas start, {start} each: ask more --requests, or begin with more --min-replicas")
    elif report.broken:
        page.label("MISSES", where, "bold red", "bold")
        limit_lines(report, page, report.broken)
    elif not report.meets:
        page.label("RISKY", where, "bold yellow", "bold")
        limit_lines(report, page, report.options.limits)
    else:
        page.label("MEETS" if report.options.limits else "SERVES", where, "bold green", "bold")
        limit_lines(report, page, report.options.limits)
    chance_line(report, page)


def _latencies(report: ServeReport, page: Page) -> None:
    page.blank()
    page.add(("LATENCY  of the server, from arrival", "bold"))
    rows = [["", "mean", *PERCENTILES]]
    for key, word in _ROWS.items():
        quantiles = report.latencies.get(key)
        if quantiles:
            rows.append([word, *(show_seconds(quantiles[name]) for name in ("mean", *PERCENTILES))])
    for name, (_, latencies) in report.by_class.items():
        for key in ("ttft", "tpot", "e2e"):
            if latencies[key]:
                rows.append([f"{_ROWS[key]} of {name}", *map(show_seconds, latencies[key].values())])
    page.table(rows, right=(1, 2, 3, 4, 5), header=True, indent=0)
    if not report.options.limits:
        for metric in ("ttft", "tpot", "e2e"):
            if p99 := report.latencies[metric].get("p99"):
                page.note(f"p99 {_ROWS[metric]}: {_spread(report, metric, 'p99', p99)}", "dim")


def _load(report: ServeReport, page: Page) -> None:
    tree = report.own_values()
    page.blank()
    served = f"{rate_text(report.requests_per_second)}, {report.output_tokens_per_second:,.0f} output tokens/s"
    page.label("LOAD", f"serves {served}; capacity about {rate_text(report.capacity_per_second)}")
    if report.workload.arrivals.kind == "burst":
        page.note(f"all {len(report.requests):,} requests end within {show_seconds(report.span_seconds)}")
    if report.open_loop:
        band = report.interval["capacity"]["requests_per_second"]
        page.note(f"capacity of 8 of 10 published runs {band['low']:,.2f} to {rate_text(band['high'])}", "dim")
    if report.prefill:
        first = tree["prefill"]
        took, sent = show_seconds(first["prompt_seconds"]), show_seconds(first["transfer_seconds"])
        page.note(f"prefill workers are busy {first['utilization']:.0%} of the time")
        waiting = first["waiting"]
        page.note(f"and {waiting['mean']:.1f} requests wait at each on average, {waiting['max']} at most")
        page.note(f"a prompt takes {took}, sending its cache {sent}")
    running, waiting, cache = tree["running"], tree["waiting"], tree["kv"]
    page.note(f"a replica runs {running['mean']:.1f} requests on average, {running['max']} at most")
    page.note(f"and {waiting['mean']:.1f} wait on average, {waiting['max']} at most")
    share = cache["used_max"] / cache["capacity_tokens"] if cache["capacity_tokens"] else 0.0
    page.note(f"cache {cache['used_max']:,.0f} of {cache['capacity_tokens']:,} tokens a replica at most ({share:.0%})")
    if tree["preemptions"]:
        page.note(f"{tree['preemptions']:,} preemptions, {tree['recomputed_tokens']:,} tokens recomputed")
    if tree["prefix_hit_share"]:
        own = "attention groups" if report.groups > 1 else "replicas"
        each = f", of which each of the {report.base.plan.dp} {own} has its own" if report.base.plan.dp > 1 else ""
        page.note(f"{tree['prefix_hit_share']:.0%} of prompt tokens come from the prefix cache{each}")
    if report.options.limits:
        page.note(f"{report.goodput_share:.1%} of requests keep every limit")


def _scaling(report: ServeReport, page: Page) -> None:
    """Append how many replicas there were, where they followed the load."""
    if report.scaling is None:
        return
    tree = report.scaling.to_dict(report.devices // report.replicas)
    spared = 1 - tree["device_hours"] / tree["fixed_device_hours"]
    page.blank()
    mean, most = tree["replicas"]["mean"], tree["replicas"]["max"]
    page.label("SCALING", f"{mean:.1f} replicas on average, {most} at most, {tree['started']} started in all")
    page.note(f"{tree['device_hours']:,.1f} device-hours, {spared:.0%} less than {most} replicas all the time")


def _cost(report: ServeReport, page: Page) -> None:
    hourly, million = report.usd_per_hour, report.usd_per_million_output_tokens
    if hourly is not None:
        text = f"${hourly:,.2f} an hour"
        page.label("COST", text + (f", {show_usd(million)} a million output tokens" if million else ""))


def _remedies(page: Page, remedies: Sequence[LoadRemedy]) -> None:
    """Append what each change of one field would do, as it was simulated."""
    if not remedies:
        return
    limit = remedies[0].limit
    page.blank()
    none = "; none is enough" if not any(one.report.meets for one in remedies) else ""
    page.add((f"REMEDIES  simulated, {limit.quantile} {_ROWS[limit.metric]} then{none}", "bold"))
    for one in remedies:
        flag = f"--{one.field.replace('_', '-')} {one.value}"
        flag += f" --dp {one.report.base.plan.dp}" if one.field == "tp" else ""
        devices = f" on {one.report.devices:,} devices" if one.field in ("dp", "tp", "prefill_workers") else ""
        shown = show_seconds(one.seconds) if math.isfinite(one.seconds) else "grows"
        page.note(f"{shown:>10}  {flag}{devices}: {_remedied(one.report)}", "bold" if one.report.meets else "")


def _remedied(report: ServeReport) -> str:
    """Return what a deployment does after a change, in words: of limits only where there are any."""
    if not report.stable:
        return "the queue still grows"
    if report.broken:
        return "misses " + ", ".join(
            f"{one.quantile} {_ROWS[one.metric]} ({show_seconds(report.value(one))})" for one in report.broken
        )
    if not report.meets:
        return f"still too risky, the chance is {show_chance(report.chance_to_meet)}"
    return "keeps every limit" if report.options.limits else "carries the load"


def _why(page: Page, report: ServeReport, metric: Metric, quantile: str) -> None:
    """Append where the seconds around a percentile go."""
    parts = report.why(metric, quantile)
    if not parts:
        return
    page.blank()
    whole = sum(seconds for _, seconds in parts)
    segments = [Segment(word, s, FULL, _STYLES[i % 5]) for i, (word, s) in enumerate(parts)]
    value = show_seconds(report.latencies[metric][quantile])
    page.bar("WHY", segments, whole, f"{quantile} {_ROWS[metric]} {value}")
    for word, seconds in parts:
        page.note(f"{show_seconds(seconds):>10}  {word}")


def serve_page(
    report: ServeReport,
    words: Sequence[str],
    width: int,
    remedies: Sequence[LoadRemedy] = (),
    used: Energy | None = None,
) -> Page:
    """Return the page of a deployment under load, with the energy where it was asked for."""
    page = Page(width)
    _verdict(report, page)
    if report.requests:
        _latencies(report, page)
        _load(report, page)
        _scaling(report, page)
        limit = report.focus
        for metric, quantile in dict.fromkeys(((limit.metric, limit.quantile), ("e2e", "p99"))):
            _why(page, report, "tpot" if metric == "itl" else metric, quantile)
    _remedies(page, remedies)
    page.blank()
    _cost(report, page)
    energy_lines(page, used, "all requests")
    page.blank()
    page.label("ASSUMED", "")
    page.items(report.assumptions)
    command_lines(page, "AGAIN", words)
    return page
