"""The answer of a search for a deployment as a page: the best, the front, rejections, the command to copy."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.answers._infer_view import infer_changes
from shardwise.answers._page import Page, command_lines
from shardwise.answers._plan_tree import tiers_words
from shardwise.answers._rejected import next_best, rejected, wrapped
from shardwise.answers._train_view import assumptions, describe, show_band
from shardwise.search import ServingResult, runners_up, tokens_per_second_per_gpu
from shardwise.serving import InferReport
from shardwise.units import show_bytes, show_seconds

_FRONT = 12
_SAID = {
    "max_ttft_seconds": "TTFT up to {}",
    "max_tpot_seconds": "TPOT up to {}",
    "max_latency_seconds": "requests up to {}",
    "max_usd": "up to ${:g} per million tokens",
    "min_tokens_per_second": "at least {:,g} tokens/s in all",
}


def serve_page(found: ServingResult, command: Sequence[str], notes_and_width: tuple[Sequence[str], int]) -> Page:
    """Return the answer of a search as a page; `command` evaluates the best plan, or the nearest without one."""
    notes, width = notes_and_width
    page = Page(width)
    _verdict(page, found)
    page.blank()
    if found.best:
        _best(page, found.best)
        page.blank()
        _front(page, found.front)
        page.blank()
        near = [(one, report) for one in runners_up(found) if isinstance(report := one.report, InferReport)]
        next_best(page, [(runner_up, describe_deployment(report)) for runner_up, report in near])
        page.blank()
    rejected(page, found.rejected)
    page.blank()
    shown = found.best[0] if found.best else found.nearest
    assumptions(page, (*notes, *(shown.assumptions if shown is not None else ())))
    page.blank()
    if command:
        command_lines(page, "AGAIN" if found.best else "NEAREST", command)
    return page


def _verdict(page: Page, found: ServingResult) -> None:
    rows, job = found.grid, found.grid.job
    title = f"{rows.model.name} on {rows.cluster.num_devices} x {rows.cluster.device.name}"
    if found.best:
        best = found.best[0]
        each, what = tokens_per_second_per_gpu(best), "output tokens/s" if best.job.output_tokens else "tokens/s"
        rate = f"{each:,.0f} {what} per device, {each * best.plan.num_devices:,.0f} in all"
        page.label("BEST", f"{title}: {rate}", "bold green", "bold")
        page.note(describe_deployment(best), "bold")
        for name, word in (("ttft_seconds", "TTFT"), ("tpot_seconds", "TPOT"), ("request_seconds", "request")):
            if getattr(best, name):
                page.note(f"{word} {show_seconds(getattr(best, name))}: {show_band(best, name, show_seconds)}", "dim")
    else:
        page.label("NONE", f"{title}: no plan of the space is feasible", "bold red", "bold")
        _beyond(page, found.nearest)
    out = f"{job.output_tokens:,} out" if rows.model.generates else "none out: one pass"
    page.note(f"{job.input_tokens:,} tokens in and {out}{_limits(found)}")
    page.note(
        f"{found.num_plans:,} plans, {found.counts.evaluated:,} legal and evaluated, "
        f"{found.counts.fitting:,} feasible, "
        f"in {show_seconds(found.seconds)}"
    )


def _beyond(page: Page, nearest: InferReport | None) -> None:
    """Append the single change beyond the space that makes the nearest plan fit, where one does."""
    if nearest is not None and not nearest.fits:
        fitting = [change for change in infer_changes(nearest) if change.fits]
        for change in fitting[:1]:
            flag = f"{change.field.replace('_', ' ')} {change.value}"
            page.note(
                f"beyond the space, the nearest fits with {flag}: a token every {show_seconds(change.tpot_seconds)}"
            )


def _limits(found: ServingResult) -> str:
    said = []
    for name, text in _SAID.items():
        value = getattr(found.options, name)
        if value:
            said.append(text.format(show_seconds(value) if name.endswith("_seconds") and "{}" in text else value))
    return "; " + ", ".join(said) if said else ""


def describe_deployment(report: InferReport) -> str:
    """Return a deployment in words: degrees, batch, formats, engine."""
    formats = [f"weights {report.case.format.name}"]
    formats += [f"cache {report.job.kv_cache}"] if report.job.kv_cache else []
    formats += [f"GEMMs in {report.job.compute}"] if report.job.compute else []
    order = [axis for axis in report.plan.order if getattr(report.plan, axis) > 1]
    usual = [axis for axis in ("tp", "dp", "pp") if axis in order]
    placed = [f"order {','.join(order)}"] if order != usual else []
    plan = [describe(report.plan), f"batch {report.job.batch}", *formats, *placed, *tiers_words(report)]
    return ", ".join([*plan, report.case.engine.name])


def _best(page: Page, best: Sequence[InferReport]) -> None:
    rows = [("#", "tokens/s/dev", "tokens/s", "TTFT", "TPOT", "request", "$/M", "memory", "devices")]
    for i, report in enumerate(best, 1):
        each, price = tokens_per_second_per_gpu(report), _price(report)
        rows.append(
            (
                str(i),
                f"{each:,.1f}",
                f"{each * report.plan.num_devices:,.0f}",
                show_seconds(report.ttft_seconds),
                show_seconds(report.tpot_seconds) if report.tpot_seconds else "-",
                show_seconds(report.request_seconds),
                "-" if price is None else f"{price:,.3g}" if price < 1 else f"{price:,.2f}",
                show_bytes(report.memory.needed),
                f"{report.plan.num_devices:,}",
            )
        )
    page.table(rows, right=range(9), header=True, indent=2)
    page.blank()
    for i, report in enumerate(best, 1):
        page.label(f"{i:>3}", describe_deployment(report), "bold")


def _price(report: InferReport) -> float | None:
    """Return dollars per million tokens generated, or of input where none are; None without a price."""
    return report.usd_per_million_output_tokens if report.job.output_tokens else report.usd_per_million_input_tokens


def _front(page: Page, front: Sequence[InferReport]) -> None:
    what = "time between tokens" if front[0].tpot_seconds else "time of a request"
    text = f"     {len(front)} plans on the Pareto front of {what} and tokens/s per device"
    page.add(("FRONT", "bold"), (text, ""))
    every = max(1, -(-len(front) // _FRONT))
    rows: list[tuple[str, ...]] = [("TPOT" if front[0].tpot_seconds else "request", "tokens/s/dev", "TTFT", "plan")]
    for report in [*front[:-1:every], front[-1]]:
        gap, rate = report.tpot_seconds or report.request_seconds, tokens_per_second_per_gpu(report)
        latency = show_seconds(gap), f"{rate:,.1f}", show_seconds(report.ttft_seconds)
        rows += wrapped(latency, describe_deployment(report), page.width - 38)
    page.table(rows, right=range(3), header=True, indent=2)
