"""The answer of a search as a page: the best plans, the front, the reasons for the others, the command to copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.answers._page import Page, command_lines
from shardwise.answers._plan_tree import assumed, limits_of, placed_words, placement, tiers_words
from shardwise.answers._rejected import next_best, rejected, wrapped
from shardwise.answers._train_tree import step_tree
from shardwise.answers._train_view import assumptions, describe, show_band, show_chance
from shardwise.errors import Problem
from shardwise.plans import Plan
from shardwise.search import TrainingResult, runners_up
from shardwise.training import TrainReport
from shardwise.units import show_bytes, show_seconds

_FRONT = 8
_LIMITS: dict[str, Callable[[float], str]] = {
    "max_step_seconds": lambda v: f"a step up to {show_seconds(v)}",
    "max_run_seconds": lambda v: f"a run up to {v / 86400:,.1f} days",
    "max_usd": lambda v: f"a run up to ${v:,.0f}",
    "min_free_bytes": lambda v: f"{show_bytes(v)} free on every device",
}


def plan_page(found: TrainingResult, command: Sequence[str], notes_and_width: tuple[Sequence[str], int]) -> Page:
    """Return the answer of a search as a page; `command` evaluates the best plan, or the nearest where none fits."""
    notes, width = notes_and_width
    page = Page(width)
    _verdict(page, found)
    page.blank()
    if found.best:
        _best(page, found)
        page.blank()
        _front(page, found.front)
        page.blank()
        best = found.best[0].plan
        next_best(page, [(runner_up, _difference(best, runner_up.report.plan)) for runner_up in runners_up(found)])
        page.blank()
    rejected(page, found.rejected)
    page.blank()
    shown = found.best[0] if found.best else found.nearest
    assumptions(page, tuple(dict.fromkeys((*notes, *assumed(found.grid.case, shown)))))
    page.blank()
    if command:
        command_lines(page, "AGAIN" if found.best else "NEAREST", command)
    return page


def _verdict(page: Page, found: TrainingResult) -> None:
    case, counts, limits = found.grid.case, found.counts, limits_of(found)
    title = f"{case.model.name} on {case.cluster.num_devices} x {case.cluster.device.name}"
    if found.best:
        best = found.best[0]
        page.label("BEST", f"{title}: {show_seconds(best.step_seconds)} a step, MFU {best.mfu:.1%}", "bold green")
        page.note(describe_placed(best), "bold")
        page.note(show_band(best, "step_seconds", show_seconds), "dim")
        page.note(_fit(best, found.options.risk), "dim")
    else:
        word, none = (
            ("NONE", "no plan of the space is feasible") if found.covered == 1 else ("INTERRUPTED", "nothing found yet")
        )
        page.label(word, f"{title}: {none}", "bold red", "bold")
    share = "" if found.covered == 1 else f"; interrupted, {found.covered:.1%} of the space was covered"
    does = "feasible" if limits else f"fit with a chance of {found.options.risk:.0%}"
    page.note(
        f"{found.num_plans:,} plans, {counts.legal:,} legal, {counts.fitting:,} {does}, {counts.evaluated:,} timed, "
        f"in {show_seconds(found.seconds)}{share}"
    )
    if limits:
        said = (_LIMITS[name](value) for name, value in limits.items())
        page.note("asked for: " + ", ".join(said))


def _fit(report: TrainReport, risk: float) -> str:
    held = f"{show_bytes(report.device_bytes)} of {show_bytes(report.verdict.limit_bytes)}"
    chance = show_chance(report.chance_to_fit)
    return f"{held}, chance to fit {chance} (--risk {risk:.0%}): {show_band(report, 'device_bytes', show_bytes)}"


def _difference(best: Plan, other: Plan) -> str:
    """Return the fields in which a plan differs from the best."""
    from dataclasses import fields

    names = [f.name for f in fields(Plan) if getattr(best, f.name) != getattr(other, f.name)]
    return ", ".join(f"{n.replace('_', ' ')} {_word(getattr(other, n))}" for n in names) or "the same plan"


def _word(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()


def describe_more(plan: Plan) -> str:
    """Return a plan in words: degrees, micro-batch, schedule, and what else stands out.

    >>> describe_more(Plan(tp=2, pp=4, vpp=2, schedule="interleaved", sequence_parallel=True))
    'tp 2, pp 4, vpp 2, interleaved, micro-batch 1, sequence parallel'
    """
    said = [describe(plan)]
    said += [plan.schedule] if plan.pp > 1 or plan.schedule == "gpipe" else []
    said += [f"micro-batch {plan.micro_batch}"]
    said += ["sequence parallel"] if plan.sequence_parallel and plan.tp > 1 else []
    said += [f"cp by {plan.cp_kind}"] if plan.cp > 1 else []
    said += [f"summa in {plan.panels} panels"] if plan.layout == "summa" else []
    return ", ".join(said)


def describe_placed(report: TrainReport) -> str:
    """Return a plan in words with where its axes sit."""
    return ", ".join([describe_more(report.plan), *tiers_words(report)])


def _best(page: Page, found: TrainingResult) -> None:
    priced = found.grid.case.job.run_tokens > 0
    money = ("days", "$") if priced else ()
    rows = [
        (
            "#",
            "step",
            "tokens/s/dev",
            *money,
            "memory",
            "compute",
            "exposed",
            "bubble",
            "other",
            "in a domain",
        )
    ]
    for i, report in enumerate(found.best, 1):
        step, whole = step_tree(report), report.step_seconds
        rows.append(
            (
                str(i),
                show_seconds(whole),
                f"{report.tokens_per_second_per_gpu:,.0f}",
                *(_run_cells(report) if priced else ()),
                show_bytes(report.device_bytes),
                f"{step['compute_seconds'] / whole:.1%}",
                f"{sum(step['exposed_seconds'].values()) / whole:.1%}",
                f"{step['bubble_seconds'] / whole:.1%}",
                f"{(step['optimizer_seconds'] + step['overhead_seconds']) / whole:.1%}",
                placed_words(placement(report)),
            )
        )
    page.table(rows, right=range(len(rows[0]) - 1), header=True, indent=2)
    page.blank()
    for i, report in enumerate(found.best, 1):
        page.label(f"{i:>3}", describe_placed(report), "bold")
        page.note(_around(found, report), "dim")
        if report.unlaunched:
            page.note("no launch: " + "; ".join(dict.fromkeys(map(_unlaunched, report.unlaunched))), "yellow")


def _unlaunched(problem: Problem) -> str:
    return f"{problem.field.replace('_', ' ')} {problem.value}"


def _around(found: TrainingResult, report: TrainReport) -> str:
    """Return the chance to fit, the band of the step, and how far other plans of the same degrees go."""
    low, high = map(show_seconds, report.interval["step_seconds"])
    said = f"chance to fit {show_chance(report.chance_to_fit)}; typical {show_seconds(report.typical['step_seconds'])}"
    said += f", 8 of 10 {low} to {high}"
    alike = found.alternatives(report)[1:]
    return said + (f"; {len(alike)} more of these degrees up to {show_seconds(alike[-1])}" if alike else "")


def _run_cells(report: TrainReport) -> tuple[str, str]:
    """Return days and dollars of the whole run."""
    days = f"{report.training_seconds / 86400:,.1f}"
    return days, "-" if report.usd is None else f"{report.usd:,.0f}"


def _front(page: Page, front: Sequence[TrainReport]) -> None:
    page.add(("FRONT", "bold"), (f"     {len(front)} plans on the Pareto front of step time, memory and devices", ""))
    every = max(1, -(-len(front) // _FRONT))
    rows: list[tuple[str, ...]] = [("step", "memory", "devices", "plan")]
    for report in front[::every]:
        row = (show_seconds(report.step_seconds), show_bytes(report.device_bytes), str(report.plan.num_devices))
        rows += wrapped(row, describe_placed(report), page.width - 36)
    page.table(rows, right=range(3), header=True, indent=2)
