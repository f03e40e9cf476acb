"""`shardwise plan infer`: the best ways to serve a model under limits, and why the others are not among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.answers import _case
from shardwise.answers._answer import Answer
from shardwise.answers._described import describe_deployment, placement
from shardwise.answers._evidence import show_band
from shardwise.answers._files import command_words, save_best
from shardwise.answers._infer import infer_changes, infer_tree
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page, assumptions, command_lines, show_chance
from shardwise.answers._plan_page import command_of, next_best, rejected, result_tree, with_notes, wrapped
from shardwise.answers._plot import plotted
from shardwise.answers._search_flags import SERVE_LIMITS, SERVE_WHOLES, SERVE_WORDS, serve_search_flags
from shardwise.answers._ties import explain_ties, ties_line
from shardwise.answers._value_lists import on_count, on_devices, order_of
from shardwise.cost import WANTED_CHANCE
from shardwise.errors import InputError
from shardwise.plans import AXES
from shardwise.records import replace
from shardwise.search import ServingResult, TiedPlan, runners_up, tokens_per_second_per_gpu
from shardwise.serving import InferReport, stages_together
from shardwise.units import counted, show_bytes, show_seconds, show_usd

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.hardware import Cluster
    from shardwise.search import IntRanges, SearchOptions, ServingSpace
    from shardwise.serving import ServingCase


def space_of(inputs: Inputs, cluster: Cluster) -> ServingSpace:
    """Return the space that the flags restrict, with the engine that people run on such devices if none is named."""
    from shardwise.search import IntRanges, ServingSpace, upto

    given: dict[str, Any] = {key: IntRanges.parse(inputs.values[key]) for key in SERVE_WHOLES if key in inputs.values}
    given |= {key: inputs.values[key] for key in (*SERVE_WORDS, "batch_step") if key in inputs.values}
    if most := inputs.get("max_sequences", 0):
        given["batch"] = _at_once(inputs, given.get("batch", ServingSpace().batch), most)
    if "engine" not in inputs.values:
        given["engine"] = (_case.engine_of(inputs, cluster),)
    if "order" in inputs.values:
        given["orders"] = (order_of(inputs.values["order"]),)
    if inputs.get("at_most", False):
        given["devices"] = upto(cluster.num_devices)
    return ServingSpace(**given)


def _at_once(inputs: Inputs, asked: IntRanges, most: int) -> IntRanges:
    """Return the batches of no more sequences than the engine is told to run at once."""
    from shardwise.search import IntRanges

    kept = tuple((low, min(high, most)) for low, high in asked.ranges if low <= most)
    if not kept and asked.ranges:
        least = min(low for low, _ in asked.ranges)
        rule = f"is fewer at once than every batch that is asked for, of {least} or more"
        inputs.fail("max_sequences", most, rule, f"use --batch 1..{most}, or leave it out")
    return IntRanges(kept or asked.ranges)


def options_of(inputs: Inputs) -> SearchOptions:
    """Return what is wanted: the objective and the limits."""
    from shardwise.search import SearchOptions

    limits = {name: inputs.values[key] for name, key in SERVE_LIMITS.items() if key in inputs.values}
    return SearchOptions(
        objective=inputs.get("objective", "throughput"),
        top=inputs.get("top", 10),
        risk=inputs.get("risk", WANTED_CHANCE),
        efficiencies=_case.make_efficiencies(inputs),
        **limits,
    )


def _of_most(inputs: Inputs) -> Inputs:
    """Return what was asked, of as many devices as `--at-most N` says."""
    most, text = inputs.get("at_most", False), str(inputs.get("on", ""))
    if isinstance(most, bool) or not text:
        return inputs
    return replace(inputs, values={**inputs.values, **on_count(text, most)})


def ask(inputs: Inputs) -> ServingResult:
    """Return the answer of a search; raises `InputError` with every problem."""
    from shardwise.plans import Serving
    from shardwise.search import plan_serving

    model, cluster = _case.load_the_model(inputs), _case.load_the_cluster(_of_most(inputs))
    if model is None or cluster is None:
        raise InputError(dict.fromkeys(inputs.problems.items))
    # Batch and formats are searched, so the job is silent about them.
    searched = Inputs(values={key: v for key, v in inputs.values.items() if key not in (*SERVE_WORDS, "batch")})
    job: Serving = _case.make_serving(searched, model)
    inputs.notes += searched.notes
    try:
        result = plan_serving(model, cluster, job, space_of(inputs, cluster), options_of(inputs))
    except InputError as error:
        inputs.merge(error, dtype="compute" if "compute" in inputs.values else "weights")
        raise InputError(dict.fromkeys(inputs.problems.items)) from None
    inputs.problems.raise_if_any()
    sizes = ("input_tokens", *(["output_tokens"] if model.generates else []))
    usual = [f"{key} {getattr(job, key)}: not given" for key in sizes if key not in inputs.values]
    inputs.notes += [note for note in usual if note not in inputs.notes]
    return result


def case_of(inputs: Inputs, report: InferReport) -> dict[str, Any]:
    """Return the case of `infer` that one plan of the answer is."""
    plan, job = report.plan, report.job
    own = {key for key, flag in serve_search_flags().items() if flag.group in ("search", "space", "limits")}
    kept = {
        key: value for key, value in inputs.values.items() if key not in own | {"what", "order", "save", "num_devices"}
    }
    fixed: dict[str, Any] = on_devices(inputs, report.case.cluster.device.name, plan.num_devices)
    fixed |= {key: getattr(plan, key) for key in ("tp", "pp", "dp")}
    fixed |= {key: getattr(plan, key) for key in ("ep", "etp") if getattr(plan, key) > 1}
    unsaid = stages_together(replace(plan, order=AXES)).order
    fixed |= {"order": plan.order} if plan.order != unsaid else {}
    fixed |= {key: getattr(job, key) for key in ("batch", "input_tokens", "output_tokens")}
    if not report.case.model.generates:
        del fixed["output_tokens"]
    fixed |= {"weights": job.weights or report.case.format.name, "engine": report.case.engine.name}
    # The search tells the engine to run its batch at most, for which memory is set aside.
    fixed |= {key: getattr(job, key) for key in ("kv_cache", "compute", "max_sequences") if getattr(job, key)}
    return {**kept, **fixed}


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise plan infer`."""
    result = ask(inputs)
    save_best(inputs, "infer", case_of(inputs, result.best[0]) if result.best else None)

    def words(report: InferReport) -> list[str]:
        return command_words("infer", case_of(inputs, report))

    def tree() -> dict[str, Any]:
        return with_notes(serve_tree(result, [words(report) for report in result.best]), inputs.notes)

    def page() -> Page:
        report = result.best[0] if result.best else result.nearest
        return serve_page(result, words(report) if report is not None else [], (tuple(inputs.notes), width))

    def draw() -> Figure:
        from shardwise.answers._plots_serving import serving_figure

        return serving_figure(result)

    return plotted(inputs, Answer(0 if result.best else 1, tree, page), draw)


def serve_tree(result: ServingResult, commands: Sequence[Sequence[str]] = ()) -> dict[str, Any]:
    """Return the answer of a search as plain values; `commands` are the words that evaluate each of the best."""
    best = [
        {
            **infer_tree(report, result.options.risk),
            "tokens_per_second_per_gpu": tokens_per_second_per_gpu(report),
            "group": result.group_of(place),
            "placement": placement(report),
            **command_of(commands, place),
        }
        for place, report in enumerate(result.best)
    ]
    limits = {name: getattr(result.options, name) for name in SERVE_LIMITS if getattr(result.options, name)}
    return result_tree(result, best, short_serve_tree, {"limits": limits, "risk": result.options.risk})


def short_serve_tree(report: InferReport) -> dict[str, Any]:
    """Return a deployment with its headlines."""
    names = ("fits", "chance_to_fit", "ttft_seconds", "tpot_seconds", "request_seconds", "request_ttft_seconds",
             "request_tpot_seconds", "output_tokens_per_second")  # fmt: skip
    job = {name: getattr(report.job, name) for name in ("batch", "weights", "kv_cache", "compute")}
    return {
        **{name: getattr(report, name) for name in names},
        "tokens_per_second_per_gpu": tokens_per_second_per_gpu(report),
        "usd_per_million_output_tokens": report.usd_per_million_output_tokens,
        "devices": report.plan.num_devices,
        "plan": {**asdict(report.plan), "engine": report.case.engine.name},
        "job": {**job, "weights": job["weights"] or report.case.format.name},
    }


_FRONT = 12
_SAID = {
    "max_ttft_seconds": "TTFT up to {}",
    "max_tpot_seconds": "TPOT up to {}",
    "max_latency_seconds": "requests up to {}",
    "max_usd": "up to ${:,} per million tokens",
    "min_tokens_per_second": "at least {:,} tokens/s in all",
}


def serve_page(result: ServingResult, command: Sequence[str], notes_and_width: tuple[Sequence[str], int]) -> Page:
    """Return the answer of a search as a page; `command` evaluates the best plan, or the nearest without one."""
    notes, width = notes_and_width
    page = Page(width)
    _verdict(page, result)
    page.blank()
    if result.best:
        _best(page, result)
        page.blank()
        _front(page, result.front)
        page.blank()
        near = [(one, report) for one in runners_up(result) if isinstance(report := one.report, InferReport)]
        next_best(page, [(runner_up, describe_deployment(report)) for runner_up, report in near])
        page.blank()
    rejected(page, result.rejected)
    page.blank()
    shown = result.best[0] if result.best else result.nearest
    assumptions(page, (*notes, *(shown.assumptions if shown is not None else ())))
    page.blank()
    if command:
        command_lines(page, "AGAIN" if result.best else "NEAREST", command)
    return page


def _verdict(page: Page, result: ServingResult) -> None:
    rows, job = result.grid, result.grid.job
    title = f"{rows.model.name} on {rows.cluster.num_devices} x {rows.cluster.device.name}"
    if result.best:
        best = result.best[0]
        each, what = tokens_per_second_per_gpu(best), "output tokens/s" if best.job.output_tokens else "tokens/s"
        rate = f"{each:,.0f} {what} per device, {each * best.plan.num_devices:,.0f} in all"
        page.label("BEST", f"{title}: {rate}", "bold green", "bold")
        page.note(describe_deployment(best), "bold")
        _times(page, best)
        if best.job.output_tokens:
            page.note(f"rate {show_band(best, 'output_tokens_per_second', '{:,.0f} tokens/s'.format)}", "dim")
        price, name = _price(best), f"usd_per_million_{'output' if best.job.output_tokens else 'input'}_tokens"
        if price is not None:
            page.note(f"{show_usd(price)} a million tokens: {show_band(best, name, show_usd)}", "dim")
        needed = f"{show_bytes(best.memory.needed)} of {show_bytes(best.memory.limit)}"
        chance = show_chance(best.chance_to_fit)
        page.note(f"{needed}, chance to fit {chance} (--risk {result.options.risk:.0%})", "dim")
    else:
        page.label("NONE", f"{title}: no plan of the space is feasible", "bold red", "bold")
        _beyond(page, result.nearest)
    out = f"{job.output_tokens:,} out" if rows.model.generates else "none out: one pass"
    page.note(f"{job.input_tokens:,} tokens in and {out}{_limits(result)}")
    does = "feasible" if _limits(result) else f"fit with a chance of {result.options.risk:.0%}"
    page.note(
        f"{result.num_plans:,} plans, {result.counts.evaluated:,} legal and evaluated, "
        f"{result.counts.fitting:,} {does}, "
        f"in {show_seconds(result.seconds)}"
    )


_BATCH = {"ttft_seconds": "TTFT", "tpot_seconds": "TPOT", "request_seconds": "request"}


def _times(page: Page, best: InferReport) -> None:
    """Append what limits speak of, a request while the batch stays full, then a batch whose requests come at once."""
    if best.job.batch > 1:
        times = f"TTFT {show_seconds(best.request_ttft_seconds)}"
        if best.job.output_tokens:
            times += f", TPOT {show_seconds(best.request_tpot_seconds)}, {show_seconds(best.request_seconds)} in all"
        page.note(f"a request while the batch stays full: {times}")
        page.note(f"of all {best.job.batch:,} at once:", "dim")
    for name, word in _BATCH.items():
        if getattr(best, name):
            page.note(f"{word} {show_seconds(getattr(best, name))}: {show_band(best, name, show_seconds)}", "dim")


def _beyond(page: Page, nearest: InferReport | None) -> None:
    """Append the single change beyond the space that makes the nearest plan fit, where one does."""
    if nearest is not None and not nearest.fits:
        fitting = [change for change in infer_changes(nearest) if change.fits]
        for change in fitting[:1]:
            flag = f"{change.field.replace('_', ' ')} {change.value}"
            page.note(
                f"beyond the space, the nearest fits with {flag}: a token every {show_seconds(change.tpot_seconds)}"
            )


def _limits(result: ServingResult) -> str:
    limits = []
    for name, text in _SAID.items():
        value = getattr(result.options, name)
        if value:
            limits.append(text.format(show_seconds(value) if name.endswith("_seconds") and "{}" in text else value))
    return "; " + ", ".join(limits) if limits else ""


def _best(page: Page, result: ServingResult) -> None:
    rows = [("#", "tokens/s/dev", "tokens/s", "TTFT", "TPOT", "request", "$/M", "memory", "devices")]
    for i, report in enumerate((group.first for group in result.groups), 1):
        each, price = tokens_per_second_per_gpu(report), _price(report)
        rows.append(
            (
                str(i),
                f"{each:,.1f}",
                f"{each * report.plan.num_devices:,.0f}",
                show_seconds(report.request_ttft_seconds),
                show_seconds(report.request_tpot_seconds) if report.job.output_tokens else "-",
                show_seconds(report.request_seconds),
                "-" if price is None else f"{price:,.3g}" if price < 1 else f"{price:,.2f}",
                show_bytes(report.memory.needed),
                f"{report.plan.num_devices:,}",
            )
        )
    page.table(rows, right=range(9), header=True, indent=2)
    which = "TTFT and TPOT are those" if result.grid.job.output_tokens else "TTFT is that"
    page.note(f"{which} of a request while the batch stays full", "dim")
    page.blank()
    for i, group in enumerate(result.groups, 1):
        page.label(f"{i:>3}", describe_deployment(group.first), "bold")
        chance = show_chance(group.first.chance_to_fit)
        page.note(f"chance to fit {chance}; request {show_band(group.first, 'request_seconds', show_seconds)}", "dim")
        ties_line(page, group.ties, partial(_formats, group.first.case))
    explain_ties(page, result.options.serving_headline)


def _formats(first: ServingCase, tie: TiedPlan[ServingCase]) -> list[str]:
    """Return what else differs between a deployment and one that ties with it: batch, formats, engine."""
    one = tie.case
    words = [f"batch {one.job.batch}"] if one.job.batch != first.job.batch else []
    words += [f"weights {one.format.name}"] if one.format.name != first.format.name else []
    words += [f"cache {one.job.kv_cache or 'usual'}"] if one.job.kv_cache != first.job.kv_cache else []
    words += [f"GEMMs in {one.compute}"] if one.compute != first.compute else []
    return words + ([one.engine.name] if one.engine.name != first.engine.name else [])


def _price(report: InferReport) -> float | None:
    """Return dollars per million tokens generated, or of input where none are; None without a price."""
    return report.usd_per_million_output_tokens if report.job.output_tokens else report.usd_per_million_input_tokens


def _shared(plans: Sequence[list[str]]) -> int:
    """Return how many words several plans end with alike, the first of each left out.

    >>> _shared([["tp 2", "batch 4", "vllm"], ["dp 2", "batch 8", "vllm"]]), _shared([["tp 2", "vllm"]])
    (1, 0)
    """
    most = min(map(len, plans)) - 1 if len(plans) > 1 else 0
    return next((n for n in range(most) if len({plan[-n - 1] for plan in plans}) > 1), most)


def _front(page: Page, front: Sequence[InferReport]) -> None:
    """Append the front with what limits speak of beside it; words that all its plans share stand once, above them."""
    generates = bool(front[0].job.output_tokens)
    what = "the time of a decode step" if generates else "time of a request"
    plans = [describe_deployment(report).split(", ") for report in front]
    shared = _shared(plans)
    alike = ", ".join(plans[0][len(plans[0]) - shared :])
    text = f"{counted(len(front), 'plan')} on the Pareto front of {what} and tokens/s per device"
    page.label("FRONT", f"{text}; {alike}" if alike else text)
    heads = ("step", "tokens/s/dev", "TTFT", "TPOT") if generates else ("request", "tokens/s/dev", "TTFT")
    rows: list[tuple[str, ...]] = [(*heads, "plan")]
    every = max(1, -(-len(front) // _FRONT))
    for at in (*range(0, len(front) - 1, every), len(front) - 1):
        report, plan = front[at], plans[at]
        rate = f"{tokens_per_second_per_gpu(report):,.1f}"
        figures = [show_seconds(report.request_seconds), rate, show_seconds(report.request_ttft_seconds)]
        if generates:
            figures = [show_seconds(report.tpot_seconds), *figures[1:], show_seconds(report.request_tpot_seconds)]
        words = ", ".join(plan[: len(plan) - shared])
        rows += wrapped(tuple(figures), words, page.width - 8 - 10 * len(heads))
    page.table(rows, right=range(len(heads)), header=True, indent=2)
    if generates:
        page.note("step: one of the whole batch; TTFT and TPOT: of a request while the batch stays full", "dim")
