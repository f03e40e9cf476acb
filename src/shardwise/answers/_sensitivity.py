"""`--sensitivity`: what moves an answer most, each constant over its band and each choice to its next values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.answers._answer import Answer
from shardwise.answers._files import command_words
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import FULL, Page, command_lines
from shardwise.answers._plot import plotted
from shardwise.answers._questions import Effect, Questions, title_of, write_rows
from shardwise.cost import band_of
from shardwise.errors import InputError
from shardwise.plans.fields import PLAN, TRAINING
from shardwise.search import CONSTANTS, constant_band, with_constant
from shardwise.training import TrainReport
from shardwise.units import show_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAR = 16
# Changes below this are another name of the same plan.
_SAME = 1e-6
# Degrees and sizes whose double and half are tried, and words of which every other is.
_SIZES = {"train": ("tp", "pp", "cp", "ep", "vpp", "micro_batch"), "infer": ("tp", "pp", "ep")}
_WORDS = {"train": ("recompute", "sharding", "schedule"), "infer": ()}
_FORMATS = (("weights", "fp8"), ("weights", "int4"), ("kv_cache", "fp8"))


def moved(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `--sensitivity`."""
    if inputs.command == "serve":
        inputs.fail("sensitivity", True, "is of one plan, and serve simulates a load", "ask it of infer")
    inputs.problems.raise_if_any()
    questions = Questions(inputs)
    base = questions.at({})
    if base.report is None:
        raise InputError(base.problems)
    effects = [*_constants(base.report), *_choices(questions, base.report)]
    effects.sort(key=lambda one: (one.is_choice, -one.reach))
    name, seconds = _headline(base.report)
    write_rows(inputs, [base])

    def tree() -> dict[str, Any]:
        return {"headline": name, "seconds": seconds, "sensitivity": [_row(one) for one in effects]}

    def page() -> Page:
        made = Page(width)
        made.label("MOVES", f"{name.replace('_', ' ')} {show_seconds(seconds)}, by what moves it most", "bold", "bold")
        made.note(title_of([base]), "dim")
        for is_choice, word in ((False, "CONSTANTS, each over its band"), (True, "CHOICES, each beside the plan")):
            made.blank()
            made.add((word, "bold"))
            rows = [_cells(one, effects) for one in effects if one.is_choice == is_choice]
            made.table(rows or [["none"]], right=(2, 3), indent=2)
        made.blank()
        command_lines(made, "AGAIN", command_words(inputs.command, inputs.values))
        return made

    def draw() -> Figure:
        from shardwise.answers._plots_search import tornado_figure

        return tornado_figure(effects, name, seconds, title_of([base]))

    return plotted(inputs, Answer(0, tree, page), draw)


def _headline(report: Any) -> tuple[str, float]:
    """Return the seconds that are looked at: of a step, of a request, or of a pass."""
    name = "step_seconds" if isinstance(report, TrainReport) else "request_seconds"
    return name, float(getattr(report, name))


def _constants(report: Any) -> Iterator[Effect]:
    """Yield the effect of every constant at both ends of its band."""
    name, seconds = _headline(report)
    band = band_of(name, report.conditions)
    for constant in CONSTANTS:
        ends = constant_band(constant, band)
        moved = [_headline(with_constant(report, constant, end))[1] / seconds for end in ends]
        yield Effect(constant, f"{ends[0]:.2f} to {ends[1]:.2f}", min(moved), max(moved), report.fits)


def _choices(questions: Questions, report: Any) -> Iterator[Effect]:
    """Yield the effect of every choice that the laws allow, the job as it is."""
    _, seconds = _headline(report)
    trains = isinstance(report, TrainReport)
    fixed = {"global_batch": report.job.global_batch, "stack": report.case.stack.name} if trains else {}
    for field, value in _tried(questions.inputs.command, report):
        point = questions.at({**fixed, field: value})
        if point.report is not None and not getattr(point.report, "unlaunched", ()):
            share = _headline(point.report)[1] / seconds
            if abs(share - 1) > _SAME or not point.report.fits:
                yield Effect(
                    field.replace("_", " "), str(value), min(share, 1.0), max(share, 1.0), point.report.fits, True
                )


def _tried(command: str, report: Any) -> Iterator[tuple[str, object]]:
    plan = report.plan
    for field in _SIZES[command]:
        now = getattr(plan, field)
        yield from ((field, value) for value in (now * 2, now // 2) if value)
    choices = {f.key: f.choices for f in (*PLAN, *TRAINING)}
    for field in _WORDS[command]:
        yield from ((field, word) for word in choices[field] if word != getattr(plan, field))
    if command == "infer":
        yield from _FORMATS


def _row(one: Effect) -> dict[str, Any]:
    kind = "choice" if one.is_choice else "constant"
    return {"kind": kind, "what": one.what, "value": one.value, "least": one.least, "most": one.most, "fits": one.fits}


def _cells(one: Effect, effects: Sequence[Effect]) -> list[str]:
    """Return a row of the page: what, its values, the change of the seconds and a bar of it beside the widest."""
    changes = [f"{share - 1:+.1%}" for share in (one.least, one.most)]
    if one.is_choice:
        changes = ["", changes[0] if one.least < 1 else changes[1]]
    widest = max(other.reach for other in effects)
    bar = FULL * max(1 if one.reach > 0.005 else 0, round(_BAR * one.reach / widest) if widest else 0)
    return [one.what, one.value, *changes, bar, "" if one.fits else "does not fit"]
