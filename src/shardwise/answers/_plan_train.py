"""`shardwise plan train`: the best plans of a space, on more and more devices, and why others are not among them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardwise.answers import _case, _precision
from shardwise.answers._answer import INTERRUPTED, Answer, is_terminal, print_error
from shardwise.answers._described import describe_placed
from shardwise.answers._files import command_words, save_best
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import FULL, Page, assumptions, command_lines
from shardwise.answers._plan_page import assumed, plan_page, plan_tree, short_tree, with_notes
from shardwise.answers._plan_tuning import searched_keys
from shardwise.answers._plot import plotted
from shardwise.answers._search_flags import COUNTS, FAST, JOBS, LIMITS, LISTS, WHOLES, WORDS, plan_search_flags
from shardwise.answers._train_tree import train_tree
from shardwise.answers._value_lists import on_count, on_devices, order_of
from shardwise.answers._whole_steps import run_search
from shardwise.cost import WANTED_CHANCE
from shardwise.errors import InputError
from shardwise.records import replace
from shardwise.search import ScalingRow
from shardwise.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.answers._page import Page
    from shardwise.hardware import Cluster
    from shardwise.plans import Stack
    from shardwise.search import SearchOptions, SearchSpace, SearchTask, TrainingResult
    from shardwise.training import TrainReport


def space_of(inputs: Inputs, num_devices: int, jobs: Mapping[str, Any] = MappingProxyType({})) -> SearchSpace:
    """Return the space that the flags restrict; `jobs` are fields of the job that have several values."""
    from shardwise.search import IntRanges, SearchSpace, upto

    ranges = [key for key in (*WHOLES, *FAST) if key in inputs.values]
    given: dict[str, Any] = {key: IntRanges.parse(inputs.values[key]) for key in ranges}
    given |= {key: inputs.values[key] for key in (*WORDS, *LISTS) if key in inputs.values}
    given |= {key: v if isinstance(v := inputs.values[key], tuple) else (v,) for key in COUNTS if key in inputs.values}
    given |= jobs
    if "sequence_parallel" in inputs.values:
        given["sequence_parallel"] = (inputs.values["sequence_parallel"],)
    if "order" in inputs.values:
        given["orders"] = (order_of(inputs.values["order"]),)
    if inputs.get("at_most", False):
        given["devices"] = upto(num_devices)
    return SearchSpace(**given)


def options_of(inputs: Inputs, stack: Stack) -> SearchOptions:
    """Return what is wanted: the objective, the limits, and how plans are timed."""
    from shardwise.search import SearchOptions

    limits = {name: inputs.values[key] for name, key in LIMITS.items() if key in inputs.values}
    return SearchOptions(
        objective=inputs.get("objective", "step"),
        top=inputs.get("top", 10),
        risk=inputs.get("risk", WANTED_CHANCE),
        prune=inputs.get("prune", True),
        stack=stack,
        efficiencies=_case.make_efficiencies(inputs),
        overlap=inputs.get("overlap", True),
        explore=inputs.get("explore", False),
        **limits,
    )


def question(inputs: Inputs) -> SearchTask:
    """Return the work of the search that was asked for; raises `InputError` with every problem."""
    from shardwise.search import multiples, work_of

    jobs = {key: value for key in JOBS if isinstance(value := inputs.get(key), tuple)}
    # What reads the job reads one value of each of its fields.
    inputs = replace(inputs, values={**inputs.values, **{key: several[0] for key, several in jobs.items()}})
    model, clusters = _case.load_the_model(inputs), _clusters(inputs)
    stack, job = _case.make_stack(inputs, "", next(iter(clusters), None)), _case.make_job(inputs, model)
    if len(clusters) == 1 and stack is not None and "precision" not in inputs.bad | jobs.keys():
        job = _precision.with_precision(inputs, clusters[0], stack, job)
    if model is None or not clusters or stack is None:
        raise InputError(dict.fromkeys(inputs.problems.items))
    _check_batch(inputs, clusters)
    try:
        most = max(one.num_devices for one in clusters)
        space = space_of(inputs, most, jobs)
        settings = stack.settings
        if space.devices.ranges and settings.times_rollouts and not settings.rollout_devices:
            # The engine runs on the trainer's devices, or on as many.
            space = replace(space, devices=multiples(settings.rollout_tp, most))
        work = work_of(model, clusters, job, space, options_of(inputs, stack))
    except InputError as error:
        inputs.merge(error)
    inputs.problems.raise_if_any()
    return work


def _check_batch(inputs: Inputs, clusters: Sequence[Cluster]) -> None:
    """Record a batch that is missing where ways to tune were as likely wanted as plans of one batch."""
    keys = searched_keys(inputs)
    if inputs.values.keys() & {"adapter", "base"} and keys and "global_batch" not in keys:
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in keys)
        remedy = f"for example {max(one.num_devices for one in clusters)}, or leave out {flags} for every way to tune"
        inputs.fail("global_batch", None, "is needed: plans are compared for the same batch", remedy)
        raise InputError(dict.fromkeys(inputs.problems.items))


def _clusters(inputs: Inputs) -> tuple[Cluster, ...]:
    """Return the clusters that are tried, none where one of them is wrong."""
    text, most = str(inputs.get("on", "")), inputs.get("at_most", False)
    one_file = text.endswith(".toml") and "," not in text
    clusters = []
    for part in [text] if one_file else map(str.strip, text.split(",")):
        of_size = on_count(part, most) if most is not True and most else {"on": part}
        own = replace(inputs, values={**inputs.values, **of_size} if text else inputs.values)
        clusters.append(_case.load_the_cluster(own))
    return tuple(one for one in clusters if one is not None) if None not in clusters else ()


def ask(inputs: Inputs, work: SearchTask) -> TrainingResult:
    """Return the answer of a search."""
    return run_search(work, _engine(inputs, len(work.parts())), _progress(work.num_plans))


def searched(inputs: Inputs) -> TrainingResult:
    """Return the answer of the search that was asked for, silently."""
    work = question(inputs)
    return run_search(work, _engine(inputs, len(work.parts())))


def _engine(inputs: Inputs, num_parts: int) -> Any:
    from shardwise.search import ProcessExecutor, SerialExecutor

    workers = min(inputs.get("workers", 64), os.cpu_count() or 1)
    # A part takes about 0.4 s; each process records the formulas that it reads.
    small = num_parts < 16
    if workers == 1 or (small and "workers" not in inputs.values):
        return SerialExecutor()
    return ProcessExecutor(workers)


def _progress(num_plans: int) -> Callable[[Any, float], None] | None:
    """Return what says on a terminal how far a search is, how fast and what is best so far."""
    if not is_terminal("stderr"):
        return None
    import time

    start = time.perf_counter()

    def say(partial: Any, share: float) -> None:
        from shardwise.units import show_seconds

        rate = share * num_plans / max(time.perf_counter() - start, 1e-9)
        best = partial.top.entries[0].step_seconds if partial.top.entries else None
        so_far = f", best so far {show_seconds(best)}" if best is not None else ""
        end = "\n" if share == 1 else ""
        print_error(f"\r{share:6.1%} of {num_plans:,} plans, {rate:,.0f} a second{so_far}   {end}")

    return say


def case_of(inputs: Inputs, report: TrainReport) -> dict[str, Any]:
    """Return the case of `train` that one plan of the answer is."""
    from dataclasses import fields

    from shardwise.plans import Plan, usual_recompute

    plan, plain = report.plan, inputs.imported.plan if inputs.imported else Plan()
    groups = ("search", "space", "limits")
    own = {key for key, flag in plan_search_flags().items() if flag.group in groups} | {
        "what",
        "order",
        "save",
        "num_devices",
    }
    kept = {key: value for key, value in inputs.values.items() if key not in own and key != "sequence_parallel"}
    on = on_devices(inputs, report.case.cluster.device.name, plan.num_devices)
    changed = {f.name: getattr(plan, f.name) for f in fields(Plan) if getattr(plan, f.name) != getattr(plain, f.name)}
    always: dict[str, Any] = {name: getattr(plan, name) for name in ("tp", "pp", "dp", "micro_batch")}
    if plan.recompute == "none" and not plan.modules and usual_recompute(report.case.stack, report.job.base) != "none":
        always["recompute"] = "none"
    if report.case.stack.usual_offload and plan.recompute == "full" and not plan.offload:
        always["offload"] = ()
    if plan.sequence_parallel and plan.tp > 1 and report.case.stack.runs.sequence_parallel == (False,):
        always["sequence_parallel"] = True  # explored: unasked, a training leaves it off on a framework that has it not
    asked = {key: getattr(report.job, key) for key in JOBS if key in inputs.values}
    job = {**asked, "global_batch": report.job.global_batch, "seq_len": report.job.seq_len}
    job["stack"] = report.case.stack.name
    if inputs.imported is not None:
        del job["stack"]
    return {**kept, **on, **always, **changed, **job}


def words(inputs: Inputs, report: TrainReport) -> list[str]:
    """Return the command that evaluates one plan of the answer."""
    return command_words("train", case_of(inputs, report))


def status_of(covered: float, feasible: bool) -> int:
    """Return the exit status: 130 where a search was interrupted, else 0 where it found something and 1 where not.

    >>> status_of(1.0, True), status_of(1.0, False), status_of(0.5, True)
    (0, 1, 130)
    """
    return INTERRUPTED if covered < 1 else 0 if feasible else 1


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise plan train`."""
    if "scaling" in inputs.values:
        return scaled(inputs, width)
    result = ask(inputs, question(inputs))
    save_best(inputs, "train", case_of(inputs, result.best[0]) if result.best else None)
    shown = result.best[0] if result.best else result.nearest

    def tree() -> dict[str, Any]:
        return with_notes(plan_tree(result, [words(inputs, report) for report in result.best]), inputs.notes)

    def page() -> Page:
        return plan_page(result, words(inputs, shown) if shown is not None else [], (tuple(inputs.notes), width))

    def draw() -> Figure:
        from shardwise.answers._plots_search import plan_figure

        return plan_figure(result)

    fits = bool(result.best) and shown is not None and shown.generation.fits
    return plotted(inputs, Answer(status_of(result.covered, fits), tree, page), draw)


def scaled(inputs: Inputs, width: int) -> Answer:
    """Return the answer of a search on more and more devices."""
    from shardwise.errors import InputError
    from shardwise.search import doubling, scaled_rows, scaled_task

    whole = question(inputs)
    try:
        works = [(count, scaled_task(whole, count)) for count in doubling(*inputs.values["scaling"])]
    except InputError as error:
        inputs.merge(error)
    inputs.problems.raise_if_any()
    rows = tuple(scaled_rows(works, lambda work: ask(inputs, work)))
    best = [row.best for row in rows if row.best is not None]
    covered = min(rows[-1].result.covered, 1.0 if len(rows) == len(works) else 0.0)
    commands = [words(inputs, report) for report in best]
    save_best(inputs, "train", case_of(inputs, best[-1]) if best else None)

    def tree() -> dict[str, Any]:
        return scaling_tree(rows, commands)

    def page() -> Page:
        return scaling_page(rows, commands[-1] if commands else [], (tuple(inputs.notes), width))

    def draw() -> Figure:
        from shardwise.answers._plots_search import plan_figure
        from shardwise.search import scaled_result

        return plan_figure(scaled_result(rows))

    return plotted(inputs, Answer(status_of(covered, bool(best)), tree, page), draw)


_BAR = 12


def scaling_tree(rows: Sequence[ScalingRow], commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the rows as plain values; `commands` are the words that evaluate the best plan of each that has one."""
    rows_with_a_plan = [row for row in rows if row.best is not None]
    best = [
        {**train_tree(row.best), "command": " ".join(words)}
        for row, words in zip(rows_with_a_plan, commands, strict=True)
        if row.best is not None
    ]
    return {
        "search": {
            "plans": sum(row.result.num_plans for row in rows),
            "evaluated": sum(row.result.counts.evaluated for row in rows),
            "seconds": sum(row.result.seconds for row in rows),
            "covered": min(row.result.covered for row in rows),
            "objective": rows[0].result.options.objective,
        },
        "scaling": [row_tree(row) for row in rows],
        "best": best,
        "rejected": [],
    }


def row_tree(row: ScalingRow) -> dict[str, Any]:
    """Return the best plan on a count of devices as plain values."""
    own = {"num_devices": row.num_devices, "plans": row.result.num_plans, "efficiency": row.efficiency}
    return {**own, "best": short_tree(row.best) if row.best is not None else None}


def scaling_page(
    rows: Sequence[ScalingRow], command: Sequence[str], notes_and_width: tuple[Sequence[str], int]
) -> Page:
    """Return the rows as a page; `command` evaluates the best plan on the most devices."""
    notes, width = notes_and_width
    page = Page(width)
    case = rows[0].result.grid.case
    title = f"{case.model.name} on {rows[0].num_devices:,} to {rows[-1].num_devices:,} x {case.cluster.device.name}"
    page.label("SCALING", f"{title}, {case.job.global_batch:,} sequences a step", "bold", "bold")
    plans, seconds = sum(r.result.num_plans for r in rows), sum(r.result.seconds for r in rows)
    page.note(f"{plans:,} plans in {show_seconds(seconds)}; efficiency is tokens/s per device over the first row's")
    if rows[-1].result.covered < 1:
        page.note(f"interrupted: {rows[-1].result.covered:.1%} of the last row's space was covered")
    page.blank()
    table: list[Sequence[str]] = [("devices", "step", "tokens/s/dev", "MFU", "efficiency", "", "memory")]
    table += [_cells(row) for row in rows]
    page.table(table, right=(0, 1, 2, 3, 4, 6), header=True, indent=2)
    page.blank()
    for row in rows:
        if row.best is not None:
            page.label(f"{row.num_devices:>8,}", describe_placed(row.best), "bold")
    page.blank()
    last = next((row.best for row in reversed(rows) if row.best is not None), None)
    assumptions(page, tuple(dict.fromkeys((*notes, *assumed(case, last)))))
    page.blank()
    if command:
        command_lines(page, "AGAIN", command)
    return page


def _cells(row: ScalingRow) -> tuple[str, ...]:
    if row.best is None or row.efficiency is None:
        return (f"{row.num_devices:,}", "-", "-", "-", "-", "", "nothing fits")
    best = row.best
    bar = FULL * min(_BAR, round(_BAR * row.efficiency))
    rate = f"{best.tokens_per_second_per_gpu:,.0f}"
    shares = f"{best.mfu:.1%}", f"{row.efficiency:.1%}", bar
    return (f"{row.num_devices:,}", show_seconds(best.step_seconds), rate, *shares, show_bytes(best.device_bytes))
