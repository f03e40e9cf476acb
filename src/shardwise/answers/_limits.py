"""Limits of one plan: what each judges of its report, which are broken, and how the page says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shardwise.answers._answer import Answer
from shardwise.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from shardwise.answers._page import Page

# What a limit judges of a report, and whether it may not be more.
_JUDGED: dict[str, tuple[Callable[[Any], float | None], bool]] = {
    "max_step": (lambda report: report.whole_step_seconds, True),
    "max_time": (lambda report: report.training_seconds, True),
    "min_free": (lambda report: -report.verdict.short_by_bytes, False),
    "max_ttft": (lambda report: report.request_ttft_seconds, True),
    "max_tpot": (lambda report: report.request_tpot_seconds, True),
    "max_latency": (lambda report: report.request_seconds, True),
    "max_cost": (lambda report: getattr(report, "usd_per_million_output_tokens", getattr(report, "usd", None)), True),
    "min_rate": (lambda report: report.output_tokens_per_second, False),
}


def broken_limits(values: Mapping[str, Any], report: Any) -> dict[str, float | None]:
    """Return the limits that one plan breaks, each with its value; None is not known, which breaks a limit too."""
    broken = {}
    for key in _JUDGED.keys() & values.keys():
        value_of, is_most = _JUDGED[key]
        value = value_of(report)
        if value is None or (value > values[key] if is_most else value < values[key]):
            broken[key] = value
    return dict(sorted(broken.items()))


def limit_values(values: Mapping[str, Any], report: Any) -> dict[str, float | None]:
    """Return what the limits that were asked of one plan judge."""
    return {key: of(report) for key, (of, _) in _JUDGED.items() if key in values}


def limited(values: Mapping[str, Any], answer: Answer, report: Any) -> Answer:
    """Return an answer that says what its limits judge, with status 1 where one is broken; as it is without limits.

    A limit that is met is shown too: one that was typed without its unit is then seen to be of another size.
    """
    if not _JUDGED.keys() & values.keys():
        return answer
    broken = broken_limits(values, report)
    met = {key: value for key, value in limit_values(values, report).items() if key not in broken}

    def page() -> Page:
        made = answer.page()
        verdicts = [("MISSES", "bold red", broken), ("MEETS", "bold green", met if answer.status == 0 else {})]
        rows = [(word, style, key, value) for word, style, judged in verdicts for key, value in judged.items()]
        for at, (word, style, key, value) in enumerate(rows):
            judged = "not known" if value is None else show_limit(key, value)
            text = f"--{key.replace('_', '-')}: {judged}, the limit {show_limit(key, values[key])}"
            made.lines.insert(at, [(f"{word:<10}", style), (text, style)])
        return made

    return Answer(1 if broken else answer.status, lambda: {**answer.tree(), "broken": broken}, page)


def show_limit(key: str, value: float | None) -> str:
    """Return what a limit judges as it is shown."""
    if value is None:
        return "-"
    other = f"{value:,.2f}" if key in ("max_cost", "min_rate") else show_seconds(value)
    return f"{show_bytes(value)} free" if key == "min_free" else other
