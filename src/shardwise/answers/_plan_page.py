"""The answer of a search as the tree that `--json` prints, whose keys are stable, and as a page."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwise.answers._described import describe_placed, placed_words, placement
from shardwise.answers._evidence import show_band
from shardwise.answers._page import Page, assumptions, command_lines, show_chance
from shardwise.answers._ties import explain_ties, ties_line
from shardwise.hardware import part_of
from shardwise.plans import Plan
from shardwise.plans.laws import stack_problems
from shardwise.records import replace
from shardwise.search import TRAIN_LIMITS, Rejection, Remedy, RunnerUp, TiedPlan, runners_up
from shardwise.units import SECONDS_A_DAY, show_bytes, show_seconds, show_usd

if TYPE_CHECKING:
    from shardwise.search import FrontPlan, ServingResult, TrainingResult
    from shardwise.training import TrainingCase, TrainReport

_FRONT = 8
_LIMITS: dict[str, Callable[[float], str]] = {
    "max_step_seconds": lambda v: f"a step up to {show_seconds(v)}",
    "max_run_seconds": lambda v: f"a run up to {v / SECONDS_A_DAY:,.1f} days",
    "max_usd": lambda v: f"a run up to {show_usd(v)}",
    "min_free_bytes": lambda v: f"{show_bytes(v)} free on every device",
}


def command_of(commands: Sequence[Sequence[str]], place: int) -> dict[str, str]:
    """Return the command that evaluates one of the best plans as a key, no key where the question was no command."""
    return {"command": " ".join(commands[place])} if commands else {}


def plan_tree(result: TrainingResult, commands: Sequence[Sequence[str]] = ()) -> dict[str, Any]:
    """Return the answer of a search as plain values; `commands` are the words that evaluate each of the best."""
    from shardwise.answers._train_tree import train_tree

    best = [
        {
            **train_tree(replace(report, assumptions=assumed(report.case, report)), result.options.risk),
            "choice": choice_tree(report.case),
            "group": result.group_of(place),
            "alternatives": list(result.alternatives(report)[1:]),
            "placement": placement(report),
            **command_of(commands, place),
        }
        for place, report in enumerate(result.best)
    ]
    return result_tree(result, best, short_tree, {"limits": limits_of(result), "risk": result.options.risk})


def with_notes(tree: dict[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    """Return the answer of a search whose best plans say what was assumed of the question too."""
    every = [{**one, "assumptions": list(dict.fromkeys((*notes, *one["assumptions"])))} for one in tree["best"]]
    return {**tree, "best": every}


def result_tree(
    result: TrainingResult | ServingResult,
    best: list[dict[str, Any]],
    short: Callable[[Any], dict[str, Any]],
    asked: dict[str, Any],
) -> dict[str, Any]:
    """Return what any search answers as plain values: its best plans, others in short, and why the rest fell out."""
    return {
        "search": {
            "plans": result.num_plans,
            "legal": result.counts.legal,
            "fitting": result.counts.fitting,
            "evaluated": result.counts.evaluated,
            "seconds": result.seconds,
            "covered": result.covered,
            "objective": result.options.objective,
            **asked,
        },
        "best": best,
        "front": [short(report) for report in result.front],
        "runners_up": [runner_up_tree(one, short) for one in runners_up(result)],
        "rejected": [{**asdict(row), "change": change_tree(result.remedy(row.name))} for row in result.rejected],
        "nearest": short(result.nearest) if result.nearest is not None else None,
    }


def choice_tree(case: TrainingCase) -> dict[str, Any]:
    """Return what of a plan a search may choose beside the plan: the device and the job."""
    job, precision = case.job, case.recipe.precision.name
    return {"device": case.cluster.device.name, "precision": precision, "optimizer": job.optimizer,
            "global_batch": job.global_batch}  # fmt: skip


def choice_words(result: TrainingResult, plan: Plan, case: TrainingCase) -> list[str]:
    """Return in words the device and what of the job is chosen, of those that the search has several of."""
    jobs = [task.grid.case.job for task in result.task.tasks]
    devices = {task.grid.case.cluster.device.name for task in result.task.tasks}
    several = {name for name in ("precision", "optimizer", "global_batch") if len({getattr(j, name) for j in jobs}) > 1}
    one = choice_tree(case)
    words = [f"{plan.num_devices} x {one['device']}"] if len(devices) > 1 else []
    words += [one[name] for name in ("precision", "optimizer") if name in several]
    return words + ([f"batch {one['global_batch']}"] if "global_batch" in several else [])


def limits_of(result: TrainingResult) -> dict[str, float]:
    """Return the limits that were asked for."""
    return {name: value for name in TRAIN_LIMITS if (value := getattr(result.options, name, 0.0))}


def short_tree(report: TrainReport) -> dict[str, Any]:
    """Return a plan with its headlines."""
    return {
        "step_seconds": report.step_seconds,
        "tokens_per_second_per_gpu": report.tokens_per_second_per_gpu,
        "device_bytes": round(report.device_bytes),
        "chance_to_fit": report.chance_to_fit,
        "devices": report.plan.num_devices,
        "launchable": not report.unlaunched,
        "choice": choice_tree(report.case),
        "plan": asdict(report.plan),
    }


def assumed(case: TrainingCase, report: TrainReport | None) -> tuple[str, ...]:
    """Return what a plan was evaluated with that nobody said, as `train` lists it; of no plan, what all share."""
    notes = [*case.model.assumptions, *case.cluster.assumptions]
    if report is not None:
        from shardwise.training import EQUAL_ROLLOUTS, ROLLOUTS_LEFT_OUT, stated

        notes += [note for note in stated(report.case) if note != ROLLOUTS_LEFT_OUT or not report.generation.seconds]
        notes += [EQUAL_ROLLOUTS] if report.generation.seconds else []
        notes += [*report.evaluation.rates.assumptions, *report.evaluation.network.assumptions]
    return tuple(dict.fromkeys(notes))


def plan_page(result: TrainingResult, command: Sequence[str], notes_and_width: tuple[Sequence[str], int]) -> Page:
    """Return the answer of a search as a page; `command` evaluates the best plan, or the nearest where none fits."""
    notes, width = notes_and_width
    page = Page(width)
    _verdict(page, result)
    page.blank()
    if result.best:
        _best(page, result)
        page.blank()
        _front(page, result)
        page.blank()
        next_best(page, [(one, _difference(result, one.report)) for one in runners_up(result)])
        page.blank()
    rejected(page, result.rejected)
    page.blank()
    if not result.best and result.nearest is not None and not result.nearest.fits:
        _savers(page, result.nearest)
    shown = result.best[0] if result.best else result.nearest
    assumptions(page, tuple(dict.fromkeys((*notes, *assumed(result.grid.case, shown)))))
    page.blank()
    if command:
        command_lines(page, "AGAIN" if result.best else "NEAREST", command)
    return page


def _savers(page: Page, nearest: TrainReport) -> None:
    """Append what would fit of the job where no plan of the space does: it may be more than a search was asked for."""
    from shardwise.answers._train_page import proposals

    proposals(page, nearest, ", added to NEAREST")
    page.blank()


def searched_on(result: TrainingResult, each: str = "{} x {}") -> str:
    """Return the clusters of a search, each as its number and kind of devices."""
    clusters = tuple(dict.fromkeys(task.grid.case.cluster for task in result.task.tasks))
    # One device of a cluster is searched apart, and is the cluster's.
    parts = {part_of(one, 1) for one in clusters if one.num_devices > 1}
    return " or ".join(each.format(one.num_devices, one.device.name) for one in clusters if one not in parts)


def _verdict(page: Page, result: TrainingResult) -> None:
    from shardwise.answers._train_page import cost_lines

    case, counts, limits = result.grid.case, result.counts, limits_of(result)
    title = f"{case.model.name} on {searched_on(result)}"
    if result.best:
        best = result.best[0]
        page.label("BEST", f"{title}: {show_seconds(best.step_seconds)} a step, MFU {best.mfu:.1%}", "bold green")
        page.note(_described(result, best), "bold")
        page.note(show_band(best, "step_seconds", show_seconds), "dim")
        page.note(_fit(best, result.options.risk), "dim")
        if best.case.stack.settings.times_rollouts:
            from shardwise.answers._rollout import added_lines

            added_lines(page, best)
    else:
        word, none = (
            ("NONE", "no plan of the space is feasible")
            if result.covered == 1
            else ("INTERRUPTED", "nothing found yet")
        )
        page.label(word, f"{title}: {none}", "bold red", "bold")
    share = "" if result.covered == 1 else f"; interrupted, {result.covered:.1%} of the space was covered"
    does = "feasible" if limits else f"fit with a chance of {result.options.risk:.0%}"
    if result.best:
        cost_lines(page, result.best[0])
    page.note(
        f"{result.num_plans:,} plans, {counts.legal:,} legal, {counts.fitting:,} {does}, {counts.evaluated:,} timed, "
        f"in {show_seconds(result.seconds)}{share}"
    )
    if limits:
        limits_text = (_LIMITS[name](value) for name, value in limits.items())
        page.note("asked for: " + ", ".join(limits_text))


def _fit(report: TrainReport, risk: float) -> str:
    needed = f"{show_bytes(report.device_bytes)} of {show_bytes(report.verdict.limit_bytes)}"
    chance = show_chance(report.chance_to_fit)
    return f"{needed}, chance to fit {chance} (--risk {risk:.0%}): {show_band(report, 'device_bytes', show_bytes)}"


def _difference(result: TrainingResult, report: Any) -> str:
    """Return what of a plan differs from the best: devices and job, and fields."""
    from dataclasses import fields

    best, other = result.best[0].plan, report.plan
    first, own = choice_words(result, best, result.best[0].case), choice_words(result, other, report.case)
    changed = [mine for one, mine in zip(first, own, strict=True) if one != mine]
    names = [f.name for f in fields(Plan) if getattr(best, f.name) != getattr(other, f.name)]
    changed += [_field_words(name, getattr(other, name)) for name in names]
    return ", ".join([*changed, *_no_launch(report.case, other)]) or "the same plan"


def _field_words(name: str, value: object) -> str:
    """Return a field of a plan and its value in words.

    >>> _field_words("micro_batch", 2), _field_words("sequence_parallel", False), _field_words("stage_layers", ())
    ('micro-batch 2', 'no sequence-parallel', 'usual stage-layers')
    """
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if isinstance(value, tuple):
        return f"{name} {','.join(map(str, value))}" if value else f"usual {name}"
    return f"{name} {value}"


def _described(result: TrainingResult, report: TrainReport | FrontPlan) -> str:
    """Return a plan in words, ahead of it what the search chose of devices and job."""
    return ", ".join([*choice_words(result, report.plan, report.case), describe_placed(report)])


def _best(page: Page, result: TrainingResult) -> None:
    from shardwise.answers._train_tree import step_tree

    priced, firsts = result.grid.case.job.run_tokens > 0, [group.first for group in result.groups]
    money = ("days", "$") if priced else ()
    shares = "compute", "exposed", "bubble", "other"
    rows = [("#", "step", "tokens/s/dev", *money, "memory", *shares, "in a domain")]
    for i, report in enumerate(firsts, 1):
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
    for i, group in enumerate(result.groups, 1):
        report = group.first
        page.label(f"{i:>3}", _described(result, report), "bold")
        page.note(_around(result, report), "dim")
        ties_line(page, group.ties, lambda tie: [*choice_words(result, tie.plan, tie.case), *_marked(tie)])
        if report.unlaunched:
            page.note(", ".join(_no_launch(report.case, report.plan)), "yellow")
    explain_ties(page, result.options.headline)


def _marked(tie: TiedPlan[TrainingCase]) -> list[str]:
    return ["no launch"] if _no_launch(tie.case, tie.plan) else []


def _no_launch(case: TrainingCase, plan: Plan) -> list[str]:
    """Return in words what of a plan its framework cannot launch; empty where it can."""
    refused = (f"{p.field.replace('_', ' ')} {p.value}" for p in stack_problems(case.stack, plan, **case.job_words))
    reasons = "; ".join(dict.fromkeys(refused))
    return [f"no launch: {reasons}"] if reasons else []


def _around(result: TrainingResult, report: TrainReport) -> str:
    """Return the chance to fit, the band of the step, and how far other plans of the same degrees go."""
    low, high = map(show_seconds, report.interval["step_seconds"])
    band = f"chance to fit {show_chance(report.chance_to_fit)}; typical {show_seconds(report.typical['step_seconds'])}"
    band += f", 8 of 10 published runs {low} to {high}"
    alike = result.alternatives(report)[1:]
    return band + (f"; {len(alike)} more of these degrees up to {show_seconds(alike[-1])}" if alike else "")


def _run_cells(report: TrainReport) -> tuple[str, str]:
    """Return days and dollars of the whole run."""
    days = f"{report.training_seconds / SECONDS_A_DAY:,.1f}"
    return days, "-" if report.usd is None else show_usd(report.usd)[1:]


def _front(page: Page, result: TrainingResult) -> None:
    front = result.front_plans
    page.label("FRONT", f"{len(front)} plans on the Pareto front of step time, memory and devices")
    every = max(1, -(-len(front) // _FRONT))
    rows: list[tuple[str, ...]] = [("step", "memory", "devices", "plan")]
    for point in front[::every]:
        row = (show_seconds(point.step_seconds), show_bytes(point.device_bytes), str(point.plan.num_devices))
        text = ", ".join([_described(result, point), *_no_launch(point.case, point.plan)])
        rows += wrapped(row, text, page.width - 36)
    page.table(rows, right=range(3), header=True, indent=2)


_INDENT = 17


def change_tree(remedy: Remedy | None) -> dict[str, Any] | None:
    """Return the change of a remedy as plain values, None where no single change is known that helps."""
    if remedy is None or not remedy.field:
        return None
    value = list(remedy.value) if isinstance(remedy.value, tuple) else remedy.value
    return {"field": remedy.field, "value": value, "loss": remedy.loss, "best": remedy.best}


def runner_up_tree(runner_up: RunnerUp, short: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Return a plan in short, by how much it is behind the best, and the constants that could put it ahead."""
    return {
        **short(runner_up.report),
        "behind": runner_up.behind,
        "sensitivity": [asdict(swap) for swap in runner_up.sensitivity],
    }


def wrapped(row: tuple[str, ...], text: str, room: int) -> list[tuple[str, ...]]:
    """Return a row of a table with its text in as many lines as it takes.

    >>> wrapped(("1", "2"), "tp 4, dp 2", 6)
    [('1', '2', 'tp 4,'), ('', '', 'dp 2')]
    """
    width = max(room, 24) if room > 6 else 6
    first, *more = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    return [(*row, first), *(((*("",) * len(row), line)) for line in more)]


def next_best(page: Page, near: Sequence[tuple[RunnerUp, str]]) -> None:
    """Append the next plans, each with what is other than in the best, and which constants could put it ahead."""
    if near:
        page.label("NEXT", "runners-up, and which constants could put them ahead")
    for runner_up, text in near:
        page.note(f"{runner_up.behind:.1%} behind: {text}")
        page.items([_swaps(runner_up)], "dim")


def _swaps(runner_up: RunnerUp) -> str:
    """Return in words what puts a runner_up ahead."""
    at = "{} at {:.2f} of what is assumed (band {:.2f} to {:.2f}, at whose end keeping the best costs {:.1%})"
    swaps = [at.format(s.constant, s.factor, s.low, s.high, s.regret) for s in runner_up.sensitivity]
    return "ahead with " + ", or ".join(swaps) if swaps else "no constant within its band puts it ahead"


def rejected(page: Page, rows: Sequence[Rejection]) -> None:
    """Append the laws and limits that reject plans."""
    if not rows:
        return
    page.add(("REJECTED", "bold"))
    for row in rows:
        lines = [(line, "") for line in _in_room(page, row.title)] + [
            (line, "dim") for line in _in_room(page, row.remedy)
        ]
        count = f"{row.count:>15,}  " if row.count else ""
        for line in lines:
            page.add((f"{count:<{_INDENT}}", ""), line)
            count = ""


def _in_room(page: Page, text: str) -> list[str]:
    return textwrap.wrap(text, page.width - _INDENT, break_long_words=False, break_on_hyphens=False)
