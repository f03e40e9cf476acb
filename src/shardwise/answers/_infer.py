"""`shardwise infer`: one serving plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from shardwise.answers import _case
from shardwise.answers._answer import Answer, whole_bytes
from shardwise.answers._described import describe_served
from shardwise.answers._energy import Energy, asked_energy, energy_lines, energy_tree
from shardwise.answers._evidence import evidence_lines, evidence_tree, fits_at, interval_tree, show_band
from shardwise.answers._files import command_words
from shardwise.answers._inputs import Inputs
from shardwise.answers._limits import limited
from shardwise.answers._page import (
    DARK,
    DOT,
    FULL,
    LIGHT,
    MEDIUM,
    Page,
    Segment,
    assumptions,
    command_lines,
    legend,
    mark_limit,
    show_chance,
    show_verdict,
)
from shardwise.answers._plot import check_drawable, plotted
from shardwise.answers._replica import fewest_devices
from shardwise.answers._waves import waves_lines, waves_of
from shardwise.errors import InputError, check_finite
from shardwise.records import dataclass, replace
from shardwise.serving import InferReport, ServingOptions, StageBytes, StepCost, infer, overstates, time_tree
from shardwise.units import show_bytes, show_count, show_seconds, show_usd, significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def ask(inputs: Inputs) -> InferReport:
    """Return the report of a serving case; raises `InputError` with every problem."""
    from shardwise.serving import ServingOptions, infer

    _check_at_once(inputs)
    model, cluster = _case.load_the_model(inputs), _case.load_the_cluster(inputs)
    if model is not None and cluster is not None:
        plan = replace(_case.make_plan(inputs), micro_batch=1)
        options = ServingOptions(engine=_case.engine_of(inputs, cluster), efficiencies=_case.make_efficiencies(inputs))
        try:
            job = _case.make_serving(inputs, model)
            report = infer(model, cluster, plan, job, options)
            wider = fewest_devices(inputs, report, cluster, lambda other: infer(model, cluster, other, job, options))
            report = report if wider == report.plan else infer(model, cluster, wider, job, options)
        except InputError as error:
            inputs.merge(error, dtype="compute" if "compute" in inputs.values else "weights")
        else:
            inputs.problems.raise_if_any()
            notes = (*inputs.notes, *_usual_sizes(inputs, report), *report.assumptions)
            return replace(report, assumptions=tuple(dict.fromkeys(notes)))
    else:
        _check_alone(inputs)
    raise InputError(dict.fromkeys(inputs.problems.items))


def _usual_sizes(inputs: Inputs, report: InferReport) -> list[str]:
    """Return the batch and the lengths that nobody gave, on which every figure and the cost of a token rest."""
    sizes = ("batch", "input_tokens", *(["output_tokens"] if report.case.model.generates else []))
    return [f"{key} {getattr(report.job, key)}: not given" for key in sizes if key not in inputs.values]


def _check_at_once(inputs: Inputs) -> None:
    """Record that an engine is told to run fewer sequences at once than a batch has."""
    batch, most = inputs.get("batch", 1), inputs.get("max_sequences", 0)
    if most and batch > most:
        rule = f"is fewer at once than the batch of {batch}, which runs together"
        inputs.fail("max_sequences", most, rule, f"use --batch {most}, or --max-sequences {batch}")


def _check_alone(inputs: Inputs) -> None:
    """Record what is wrong with names of formats and engines whatever the model and the cluster are."""
    from shardwise.serving import find_engine, find_format

    for key, find in (("engine", find_engine), ("weights", find_format)):
        if key in inputs.values:
            try:
                find(inputs.values[key])
            except InputError as error:
                inputs.merge(error)


def words(inputs: Inputs, report: InferReport) -> list[str]:
    """Return the command that gives the same report, every deduction written out."""
    plan, job = report.plan, report.job
    fixed: dict[str, Any] = {key: getattr(plan, key) for key in ("tp", "pp", "dp")}
    fixed |= {key: getattr(job, key) for key in ("batch", "input_tokens", "output_tokens")}
    if not report.case.model.generates:
        del fixed["output_tokens"]
    fixed |= {"weights": job.weights or report.case.format.name, "engine": report.case.engine.name}
    return command_words("infer", {**inputs.values, **fixed})


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise infer`."""
    check_drawable(inputs)
    report, risk = ask(inputs), inputs.get("risk", 0.0)
    check_finite({"request_seconds": report.request_seconds, "usd": report.usd_per_million_output_tokens or 0.0})

    used = asked_energy(inputs, report)

    def tree() -> dict[str, Any]:
        return infer_tree(report, risk) | energy_tree(used)

    def page() -> Page:
        return infer_page(report, words(inputs, report), width, risk, used)

    def draw() -> Figure:
        from shardwise.answers._plots_bars import infer_figure

        return infer_figure(report)

    done = limited(inputs.values, Answer(0 if fits_at(report, risk) else 1, tree, page), report)
    return plotted(inputs, done, draw)


_MEMORY = {
    "weights": ("weights", FULL, "blue"),
    "working": ("activations or sampling", LIGHT, "green"),
    "kv_cache": ("KV cache of the batch", DARK, "cyan"),
    "context": ("context", "\u2571", "bright_black"),
    "communicators": ("communicators", "\u2571", "bright_black"),
    "graphs": ("captured graphs", "\u2571", "bright_black"),
}


@dataclass(frozen=True, slots=True)
class ServingChange:
    """A change of one flag of a serving plan and what it would do."""

    field: str
    value: object
    short_by_bytes: float
    tpot_seconds: float
    fits: bool
    dp: int
    """Replicas that are left."""


def infer_tree(report: InferReport, risk: float = 0.0) -> dict[str, Any]:
    """Return a serving report as plain values: bytes, seconds, tokens per second, dollars."""
    cluster, waves = report.case.cluster, waves_of(report)
    tree = {
        **report.own_values(),
        "fits": fits_at(report, risk),
        "waves": waves and asdict(waves),
        "risk": risk or None,
        "interval": interval_tree(report),
        "evidence": evidence_tree(report),
        "model": report.case.model.name,
        "cluster": {"name": cluster.name, "device": cluster.device.name, "num_devices": cluster.num_devices},
        "plan": {**asdict(report.plan), "engine": report.case.engine.name},
        "job": asdict(report.job),
        "changes": [asdict(c) for c in infer_changes(report)],
    }
    return cast(dict[str, Any], whole_bytes(tree))


def infer_changes(report: InferReport) -> tuple[ServingChange, ...]:
    """Return changes of one flag that may need less memory, those that fit first, the fastest first.

    None are sought for a plan that fits. A replica over more devices leaves fewer replicas, so `tp` and `pp` grow by
    what divides them.
    """
    if report.fits:
        return ()
    plan, job = report.plan, report.job
    options: list[tuple[str, object, dict[str, Any], dict[str, Any]]] = [
        (axis, wider, {axis: wider, "dp": plan.dp // times, "etp": 1}, {})
        for axis in ("tp", "pp")
        for times in (2, 4, 8, 16)
        if plan.dp % times == 0
        for wider in (times * getattr(plan, axis),)
    ]
    options.append(("weights", "fp8", {}, {"weights": "fp8"}))
    if report.kv_cache_bytes_per_gpu:
        options.append(("kv_cache", "fp8", {}, {"kv_cache": "fp8"}))
    most = report.max_concurrency
    if 0 < most < job.batch:
        options.append(("batch", most, {}, {"batch": most}))
    if report.case.profiled.sequences > job.batch:
        options.append(("max_sequences", job.batch, {}, {"max_sequences": job.batch}))
    if not report.case.step_tokens:
        options.append(("max_batched_tokens", 8192, {}, {"max_batched_tokens": 8192}))
    # The largest cache that fits costs nothing: to whole MiB, as what is left is known to no more than that.
    left = int(report.kv_cache_budget_bytes_per_gpu // 2**20)
    if left and overstates(report.case, left * 2**20):
        options.append(("kv_cache_memory", f"{left}MiB", {}, {"kv_cache_memory": left * 2.0**20}))
    changes = [_change(report, field, value, (p, j)) for field, value, p, j in options]
    kept = [c for c in changes if c is not None]
    return tuple(sorted(kept, key=_order))


def _order(change: ServingChange) -> tuple[bool, int, float]:
    """Return what changes are sorted by: those that fit first, fewer requests, which are another question, last."""
    rank = {"kv_cache_memory": 0, "batch": 2}.get(change.field, 1)
    return not change.fits, rank if change.fits else 0, change.tpot_seconds if change.fits else change.short_by_bytes


def _change(
    report: InferReport, field: str, value: object, new: tuple[dict[str, Any], dict[str, Any]]
) -> ServingChange | None:
    """Return what a change of (plan, job) fields would do; None where it is no change or not legal."""
    case = report.case
    if new[1] and getattr(report.job, field) == value:
        return None
    options = ServingOptions(engine=case.engine, efficiencies=case.efficiencies)
    plan = replace(report.plan, **{"stage_layers": (), **new[0]})
    try:
        tried = infer(case.model, case.cluster, plan, replace(report.job, **new[1]), options)
    except InputError:
        return None
    return ServingChange(field, value, tried.short_by_bytes, tried.tpot_seconds, tried.fits, plan.dp)


def infer_page(
    report: InferReport, command: Sequence[str], width: int = 80, risk: float = 0.0, used: Energy | None = None
) -> Page:
    """Return a serving report as a page, with the energy where it was asked for; `command` reproduces it."""
    page = Page(width)
    _verdict(page, report, risk)
    page.blank()
    if not report.fits:
        waves_lines(page, waves_of(report))
    (_speed if report.job.output_tokens else _pass)(page, report)
    energy_lines(page, used, "the batch")
    page.blank()
    _memory(page, report)
    evaluation = report.evaluation
    decodes = report.job.output_tokens
    phases = [("PREFILL" if decodes else "PASS", evaluation.prefill)]
    phases += [("DECODE", evaluation.decode)] if decodes else []
    for word, cost in phases:
        page.blank()
        _phase(page, word, cost)
    page.blank()
    evidence_lines(page, report)
    page.blank()
    assumptions(page, report.assumptions)
    page.blank()
    command_lines(page, "AGAIN", command)
    return page


def _verdict(page: Page, report: InferReport, risk: float) -> None:
    cluster, job = report.case.cluster, report.job
    word, style = show_verdict(report.fits, report.chance_to_fit, risk)
    title = f"{report.case.model.name} on {cluster.num_devices} x {cluster.device.name}: {describe_served(report)}"
    page.label(word, title, style, "bold")
    gap = f"{show_bytes(abs(report.short_by_bytes))} {'to spare' if report.fits else 'too much'}"
    memory = report.memory
    place = "in the host's memory" if memory is report.on_host else "on the fullest device"
    page.note(f"{show_bytes(memory.needed)} of {show_bytes(memory.limit)} {place}, {gap}", style)
    _reach(page, report, risk)
    where = " on each replica" if report.plan.dp > 1 else ""
    out = f"{job.input_tokens:,} tokens in and {job.output_tokens:,} out"
    out = out if job.output_tokens else f"{job.input_tokens:,} tokens each, in one pass"
    page.note(f"{job.batch:,} {'request' if job.batch == 1 else 'requests'} at once{where}, {out}")
    if not report.fits:
        page.note(nearest_change(report), "bold")


def _reach(page: Page, report: InferReport, risk: float) -> None:
    """Append the chance to fit, and the band of the tokens that the cache holds."""
    chance = report.chance_to_fit
    wanted = f", too risky for the {risk:.0%} that was asked" if chance < risk else ""
    band = report.interval.get("kv_cache_tokens")
    tokens = "; the cache holds {} to {} tokens in 8 of 10 published runs".format(*map(_about, band)) if band else ""
    page.note(f"chance to fit {show_chance(chance)}{wanted}{tokens}", "bold yellow" if wanted else "dim")


def _about(tokens: float) -> str:
    """Return a number of tokens to three digits, which is more than a band knows.

    >>> _about(4827.4), _about(446_210), _about(4.68e6)
    ('4,830', '446,000', '4.68 M')
    """
    return show_count(tokens) if tokens >= 1e6 else f"{float(f'{tokens:.3g}'):,.0f}"


def nearest_change(report: InferReport) -> str:
    """Return the nearest change of one flag that fits, in words, or how far the nearest is from it."""
    changes = infer_changes(report)
    if not changes:
        return "no change of one flag takes less; use more devices, or a smaller job"
    near = changes[0]
    flag = f"--{near.field.replace('_', '-')} {near.value}"
    if near.field in ("tp", "pp"):
        # Replicas that are stated, as AGAIN does, would not leave the devices.
        flag += f" --dp {near.dp}"
    if not near.fits:
        nearest = f"nearest is {flag}, {show_bytes(near.short_by_bytes)} too much"
        return f"no single change tried fits; {nearest}; `shardwise plan infer` tries every plan"
    rate = f", a token every {show_seconds(near.tpot_seconds)}" if report.job.output_tokens else ""
    return f"nearest change that fits: {flag}{rate}"


def _pass(page: Page, report: InferReport) -> None:
    """Append latency and rates of a pass after which nothing is generated."""
    page.label("LATENCY", f"a pass over the batch takes {show_seconds(report.ttft_seconds)}")
    page.note(show_band(report, "ttft_seconds", show_seconds), "dim")
    rate = report.samples_per_second
    each = f"{rate / 1e3:,.1f}k" if rate >= 1e4 else significant(rate, 4)
    tokens = report.prefill_tokens_per_second
    per_device = tokens / report.plan.num_devices
    page.label("RATE", f"{each} samples/s, {tokens:,.0f} tokens/s in all, {per_device:,.0f} per device")
    page.label("ROOM", f"a batch of {report.max_concurrency:,} such samples on each replica")
    price = report.usd_per_million_input_tokens
    if price is not None:
        page.label("COST", f"{show_usd(price)} per million input tokens")
        page.note(show_band(report, "usd_per_million_input_tokens", show_usd), "dim")


def _speed(page: Page, report: InferReport) -> None:
    page.label(
        "LATENCY",
        f"first tokens after {show_seconds(report.ttft_seconds)} (TTFT), then one every "
        f"{show_seconds(report.tpot_seconds)} (TPOT); a request takes {show_seconds(report.request_seconds)}",
    )
    times = report.request_ttft_seconds, report.request_tpot_seconds
    if times != (report.ttft_seconds, report.tpot_seconds):
        first, gap = map(show_seconds, times)
        page.note(f"of one request while the batch stays full: first token after {first}, then one every {gap}")
    for word, name in (("TTFT", "ttft_seconds"), ("TPOT", "tpot_seconds"), ("request", "request_seconds")):
        page.note(f"{word} {show_band(report, name, show_seconds)}", "dim")
    rate, each = report.output_tokens_per_second, 1 / report.tpot_seconds
    per_device = rate / report.plan.num_devices
    page.label("RATE", f"{rate:,.0f} output tokens/s in all, {per_device:,.0f} per device, prompts included")
    page.note(f"{each:,.1f} tokens/s for each request once it decodes")
    page.note(show_band(report, "output_tokens_per_second", "{:,.0f} tokens/s".format), "dim")
    tokens = report.kv_cache_tokens
    room = f"{show_count(tokens) if tokens >= 1e6 else f'{tokens:,}'} tokens of cache a replica"
    full = f"{room}: a batch of {report.max_concurrency:,} such requests"
    none = "none for cache: weights and working memory fill the budget"
    if overstates(report.case, report.kv_cache_budget_bytes_per_gpu):
        none = f"none: {report.case.engine.brand} would not start"
    if not report.job.use_kv_cache:
        full = none = f"no cache: a batch of {report.max_concurrency:,} such requests"
    page.label("ROOM", full if report.kv_cache_tokens else none)
    price = report.usd_per_million_output_tokens
    if price is not None:
        page.label("COST", f"{show_usd(price)} per million output tokens, the whole request charged to them")
        page.note(show_band(report, "usd_per_million_output_tokens", show_usd), "dim")


def _memory(page: Page, report: InferReport) -> None:
    host = report.on_host
    if host is None:
        return _memory_lines(page, "MEMORY", report, report.memory)
    _memory_lines(page, "DEVICE", report, report.on_devices[0])
    page.blank()
    return _memory_lines(page, "HOST", report, host)


def _memory_lines(page: Page, word: str, report: InferReport, memory: StageBytes[float]) -> None:
    names = {name: word for name, (word, *_) in _MEMORY.items()}
    if overstates(report.case, float(memory.cache_budget)):
        names["kv_cache"] = "KV cache as stated"
    segments = [Segment(names[n], float(getattr(memory, n)), *_MEMORY[n][1:]) for n in _MEMORY]
    free = max(0.0, memory.limit - memory.needed)
    shown = show_bytes(memory.needed)
    scale = max(memory.needed, memory.limit)
    left = Segment("free for cache" if report.job.use_kv_cache else "free", free, DOT, "dim")
    page.bar(word, [*segments, left], scale, shown)
    if not report.fits and memory is report.memory:
        mark_limit(page, memory.limit / scale, f"limit {show_bytes(memory.limit)}", len(shown))
    legend(page, [*segments, left], memory.limit, show_bytes)


def _phase(page: Page, word: str, cost: StepCost[float]) -> None:
    parts, time = cost.groups, time_tree(cost)
    exposed = {axis: row["exposed"] for axis, row in time["axes"].items() if row["exposed"]}
    segments = [
        Segment("GEMMs", parts["products"], FULL, "green"),
        Segment("attention and cache", parts["attention"], LIGHT, "cyan"),
        Segment("embedding, head, sampling", parts["ends"], "\u25aa", "yellow"),
        Segment("norms and element-wise", parts["small"], "\u2571", "bright_black"),
        *(Segment(f"exposed messages, {axis}", s, DARK, "red") for axis, s in exposed.items()),
        Segment("host work of a step", time["overhead"], MEDIUM, "magenta"),
        Segment("overlapped", -time["overlapped"], " ", ""),
    ]
    page.bar(word, segments, time["seconds"], show_seconds(time["seconds"]))
    legend(page, segments, time["seconds"], show_seconds)
