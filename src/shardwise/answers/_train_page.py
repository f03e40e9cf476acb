"""A training report as a page: the verdict, memory, time, what was assumed and the command to copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise.answers._described import describe
from shardwise.answers._energy import Energy, energy_lines
from shardwise.answers._evidence import evidence_lines, show_band
from shardwise.answers._page import (
    DARK,
    DOT,
    FULL,
    LIGHT,
    MEDIUM,
    Page,
    Segment,
    assumptions,
    label_width,
    legend,
    mark_limit,
    show_chance,
    show_verdict,
)
from shardwise.answers._train_tree import peak_parts, step_tree
from shardwise.plans import OBJECTIVES
from shardwise.records import replace
from shardwise.training import Change, TrainReport, TuningSummary, leaner
from shardwise.units import SECONDS_A_DAY, counted, show_bytes, show_count, show_hours, show_seconds, show_usd

_MEMORY = {
    "weights": ("weights", FULL, "blue"),
    "gradients": ("gradients", DARK, "cyan"),
    "optimizer": ("optimizer state", MEDIUM, "magenta"),
    "buffers": ("gathered weights", "\u2573", "bright_blue"),
    "activations": ("activations", LIGHT, "green"),
    "logits": ("logits and loss", "\u25aa", "yellow"),
    "recomputed": ("recomputed layer", "\u25b2", "bright_green"),
    "temporaries": ("temporaries", "\u2571", "bright_yellow"),
    "allocator": ("allocator reserve", "\u2502", "white"),
    "context": ("context, communicators", "\u2502", "bright_black"),
}
_AXES = {
    "tp": "tensor parallel",
    "tp2": "tensor parallel, 2nd axis",
    "cp": "context parallel",
    "ep": "expert parallel",
    "etp": "expert tensor parallel",
    "pp": "between stages",
    "dp": "data parallel",
    "host": "host link",
}


def train_page(
    report: TrainReport,
    width: int = 80,
    risk: float = 0.0,
    used: Energy | None = None,
    batches: str = "",
    more: Callable[[Page], None] = lambda page: None,
) -> Page:
    """Return a report as a page, with the energy where it was asked for.

    `risk` is the chance to fit that was asked, `batches` flags of what the plan chose, which a change of it might
    choose otherwise; `more` appends what else was asked, ahead of the evidence. Its command comes last.
    """
    page, parts = Page(width), peak_parts(report)
    _verdict(page, report, risk, parts)
    if batches and not report.fits and (report.changes or report.proposals):
        page.note(_batch_note(batches))
    page.blank()
    if report.tuning is not None:
        tuning_lines(page, report.tuning)
    page.items(report.surprises, "yellow")
    if report.tuning is not None or report.surprises:
        page.blank()
    _speed(page, report)
    energy_lines(page, used, "a step")
    page.blank()
    _memory(page, report, parts)
    page.blank()
    _time(page, report)
    page.blank()
    if report.phases:
        _phases(page, report)
        page.blank()
    more(page)
    evidence_lines(page, report)
    page.blank()
    assumptions(page, report.assumptions)
    page.blank()
    return page


def _phases(page: Page, report: TrainReport) -> None:
    """Append the phases of a step of preferences or rewards; rollouts are asked of `infer` and `serve`."""
    without = ", without its rollouts" if OBJECTIVES[report.job.method].rollout else ""
    page.label("PHASES", f"of {report.job.method}{without}", "bold", "bold")
    for phase in report.phases:
        page.note(f"{phase.name:28s} {show_seconds(phase.seconds):>10s}  {show_bytes(phase.peak_bytes)} of tensors")


def tuning_lines(page: Page, summary: TuningSummary) -> None:
    """Add what a fine-tuning trains, by linear layer."""
    share = f"{show_count(summary.trainable_parameters)} of {show_count(summary.parameters)} parameters"
    page.label("TRAINS", f"{share} ({summary.trainable_share:.2%}), beside {summary.base} weights", "bold", "bold")
    if summary.adapter:
        where = f" on {', '.join(summary.targets)}" if summary.targets else ""
        kept = f"{show_bytes(summary.adapter_bytes)} in {summary.adapter_precision}"
        rank = f" of rank {summary.rank}" if summary.rank else ""
        page.note(f"{summary.adapter}{rank}{where}: {kept}")
    ordered = sorted(summary.trainable_by_module.items(), key=lambda row: -row[1])
    page.note(", ".join(f"{name} {show_count(n)}" for name, n in ordered), "dim")


def _verdict(page: Page, report: TrainReport, risk: float, parts: Mapping[str, float]) -> None:
    verdict, cluster = report.verdict, report.case.cluster
    word, style = show_verdict(verdict.fits and report.generation.fits, report.chance_to_fit, risk)
    words = describe(report.plan, report.case.stack.settings.checkpoint_policy)
    title = f"{report.case.model.name} on {cluster.num_devices} x {cluster.device.name}: {words}"
    page.label(word, title, style, "bold")
    gap = show_bytes(abs(verdict.short_by_bytes))
    more = f"{gap} to spare" if verdict.short_by_bytes <= 0 else f"{gap} too much"
    page.note(
        f"{show_bytes(verdict.needed_bytes)} of {show_bytes(verdict.limit_bytes)} on the fullest device, {more}", style
    )
    if verdict.host_short_by_bytes:
        needed, limit = show_bytes(verdict.host_needed_bytes), show_bytes(verdict.host_limit_bytes)
        page.note(
            f"{needed} of {limit} on the host of a node: {show_bytes(verdict.host_short_by_bytes)} too much", style
        )
    if not report.generation.fits:
        page.note("the engine of rollouts has no room beside it", style)
    _reach(page, report, risk)
    for problem in report.unlaunched[:3]:
        page.note(f"no launch: {problem}", "bold yellow")
    largest = max(parts, key=lambda name: parts[name])
    page.note(
        f"{_MEMORY[largest][0]} dominate{'' if largest.endswith('s') else 's'} "
        f"({show_bytes(parts[largest])}) at the peak: {_moment(report)}"
    )
    if not report.fits:
        page.note(_nearest(report), "bold")
        if not any(c.fits for c in report.changes):
            proposals(page, report)


def _reach(page: Page, report: TrainReport, risk: float) -> None:
    """Append the chance to fit, and the band of the bytes of the device where it crosses the limit."""
    chance, limit = report.chance_to_fit, report.verdict.limit_bytes
    wanted = f", too risky for the {risk:.0%} that was asked" if chance < risk else ""
    low, high = report.interval["device_bytes"]
    style = "bold yellow" if wanted or low < limit < high else "dim"
    page.note(f"chance to fit {show_chance(chance)}{wanted}: {show_band(report, 'device_bytes', show_bytes)}", style)


def _moment(report: TrainReport) -> str:
    words = {
        "forward": "end of forward",
        "loss": "logits and loss",
        "backward": "start of backward",
        "ends reduced": "reduction of the embedding's gradients",
    }
    return f"{words.get(report.peak_moment, report.peak_moment)}, {_stages(report)}"


def _stages(report: TrainReport) -> str:
    run = report.evaluation.stages[report.peak_stage]
    first, last = int(run.position), int(run.position + run.count - 1)
    if report.plan.pp == 1:
        return "every device alike"
    return f"stage {first} of {report.plan.pp}" if first == last else f"stages {first} to {last} of {report.plan.pp}"


def savers_table(page: Page, report: TrainReport, batches: str = "") -> None:
    """Append every memory saver: the bytes that it saves, the seconds that it adds, or the rule that it breaks.

    `batches` are flags of what the plan chose, which a saver alone might choose otherwise.
    """
    rows = [("", "saved", "added", "host", "")]
    for one in report.savers:
        if not one.problem:
            host = show_bytes(one.host_bytes) if one.host_bytes else ""
            figures = _signed(one.saved_bytes, show_bytes), _signed(one.added_seconds, show_seconds), host
            batch = f" (global batch {one.global_batch})" if one.global_batch else ""
            rows.append((one.flags.removeprefix("--") + batch, *figures, "fits" if one.fits else ""))
    page.label("SAVERS", "each evaluated against the plan above: bytes saved, seconds added")
    page.table(rows, (1, 2, 3), header=True)
    if batches:
        page.note(_batch_note(batches))
    page.items((f"{one.flags}: {one.problem}" for one in report.savers if one.problem), "dim")
    page.blank()


def _batch_note(batches: str) -> str:
    return f"computed with {batches}; without these the change may pick others"


def _signed(value: float, show: Callable[[float], str]) -> str:
    return f"-{show(-value)}" if value < 0 else show(value)


def proposals(page: Page, report: TrainReport, to: str = "") -> None:
    """Append savers that together make a plan fit, with what they cost; `to` says which plan they are added to."""
    savers = report.proposals
    if not savers:
        return
    fits = savers[0].fits
    page.label("NEXT", ("memory savers that fit together" if fits else "no savers fit; the least is") + to)
    for one in savers[:4]:
        host = f", {show_bytes(one.host_bytes)} on the host" if one.host_bytes else ""
        page.note(f"{one.flags} ({show_bytes(one.device_bytes)}{host}, step {show_seconds(one.step_seconds)})")


def _nearest(report: TrainReport) -> str:
    fitting = [c for c in report.changes if c.fits]
    if fitting:
        return (
            f"nearest change that fits: {say_change(report, fitting[0])}, step {show_seconds(fitting[0].step_seconds)}"
        )
    host = report.verdict.host_short_by_bytes > 0
    if not report.changes and host:
        return "no single change of the plan keeps less on the host; use more nodes, or keep less there"
    together = any(one.fits for one in report.proposals)
    if not report.changes and report.verdict.fits and not together:
        return "no single change gives the engine room; use more devices, or --rollout apart with devices of its own"
    if not report.changes:
        else_use = "use more devices, another precision or a smaller job"
        return f"no change of the plan alone saves memory; {'savers together fit (NEXT)' if together else else_use}"
    best = report.changes[0]
    nearest = f"no single change tried fits; nearest is {say_change(report, best)}"
    if together:
        return f"{nearest}; several together do (NEXT), and `shardwise plan train` tries every plan"
    if report.plan.num_devices == 1:
        device = report.case.cluster.device
        fewer = ", ".join(f"--{field} {value}" for field, value in reversed(leaner(device).items()))
        return f"{nearest}; keep fewer bytes ({fewer}), or use more devices"
    return f"{nearest}; `shardwise plan train` tries every plan"


def say_change(report: TrainReport, change: Change) -> str:
    """Return a change as the flags that make it and the memory it then takes.

    A sharding brings its own framework, so the one that the report is of is named where that is another.
    """
    value = ",".join(map(str, change.value)) if isinstance(change.value, tuple) else change.value
    flags = f"--{change.field.replace('_', '-')} {value}" if value != "" else f"without --{change.field}"
    if change.field in ("tp", "pp", "cp"):
        # Replicas that are stated, as AGAIN does, would not leave the devices.
        flags += f" --dp {report.plan.dp * getattr(report.plan, change.field) // int(str(change.value))}"
    flags += f" --offload {','.join(change.offload)}" if change.offload else ""
    flags += f" --stack {change.stack}" if change.stack else ""
    host = f", {show_bytes(change.host_needed_bytes)} on the host" if report.verdict.host_short_by_bytes else ""
    batch = f", global batch {change.global_batch}" if change.global_batch else ""
    return f"{flags} ({show_bytes(change.needed_bytes)}{host}{batch})"


def _speed(page: Page, report: TrainReport) -> None:
    rate, devices = report.tokens_per_second_per_gpu, report.plan.num_devices
    tokens = f"{show_seconds(report.step_seconds)} for {report.job.tokens_per_step:,} tokens"
    page.label("STEP", f"{tokens}; {rate:,.0f} tokens/s per device, {rate * devices:,.0f} in all")
    work = show_count(report.model_flops_per_second_per_gpu, "FLOP/s")
    hfu = f", HFU {report.hfu:.1%} with recompute" if report.hfu != report.mfu else ""
    page.note(f"{work} of model work per device, MFU {report.mfu:.1%} of {report.case.recipe.precision.compute}{hfu}")
    if report.mfu > 1:
        page.note("above 100%: it counts attention over the full square, of which windows and documents leave a part")
    _measured(page, report)
    cost_lines(page, report)


def _measured(page: Page, report: TrainReport) -> None:
    """Append the band of the step, from published runs."""
    least, most = report.interval["mfu"]
    page.note(f"{show_band(report, 'step_seconds', show_seconds)}, MFU {least:.1%} to {most:.1%}", "dim")
    typical = report.job.tuning == "typical"
    tuning = "as typical published runs, which take longer than records" if typical else "as a run tuned for a record"
    page.note(f"{tuning}; --tuning {'record' if typical else 'typical'} changes that", "dim")


def cost_lines(page: Page, report: TrainReport) -> None:
    """Append days and dollars of the whole run, each with its band."""
    if not report.job.run_tokens:
        return
    time = f"{days(report.training_seconds)}, {show_hours(report.device_hours)} device hours"
    job = report.job
    passes = f" ({job.epochs:g} times {show_count(job.run_tokens / job.epochs)})" if job.epochs != 1 else ""
    samples = f", {show_count(job.run_tokens / job.seq_len)} samples" if job.sample_budget else ""
    text = f"{show_count(job.run_tokens)} tokens{passes}{samples}: {time}"
    price = report.case.cluster.usd_per_device_hour
    if report.usd is not None and price is not None:
        text += f", {show_usd(report.usd)} at ${price:.2f} an hour"
    if report.generation.seconds:
        text += f"; {show_seconds(report.whole_step_seconds)} a step, rollouts included"
    if report.goodput < 1:
        text += f"; {report.goodput:.1%} of the time trains, the rest saves, fails or restarts"
    page.label("COST", text)
    (low, high), typical = report.interval["training_seconds"], report.typical["training_seconds"]
    band = f"typical {days(typical)}, {days(low)} to {days(high)}"
    if report.usd is not None:
        dear = (report.typical["usd"], *report.interval["usd"])
        band += "; typical {}, {} to {}".format(*map(show_usd, dear))
    page.note(band, "dim")


def days(seconds: float) -> str:
    """Return a long time as people plan it: days, or shorter units below two days.

    >>> days(86400 * 2509.7), days(86400 * 12.34), days(7200)
    ('2,510 days', '12.3 days', '2.00 h')
    """
    count = seconds / SECONDS_A_DAY
    if count < 2:
        return show_seconds(seconds)
    return f"{count:,.0f} days" if count >= 100 else f"{count:.1f} days"


def _memory(page: Page, report: TrainReport, parts: Mapping[str, float]) -> None:
    verdict = report.verdict
    free = Segment("free", max(0.0, -verdict.short_by_bytes), DOT, "dim")
    segments = [*(Segment(_MEMORY[n][0], parts[n], *_MEMORY[n][1:]) for n in _MEMORY), free]
    scale, shown = max(verdict.needed_bytes, verdict.limit_bytes), show_bytes(verdict.needed_bytes)
    page.bar("MEMORY", segments, scale, shown)
    if verdict.short_by_bytes > 0:
        mark_limit(page, verdict.limit_bytes / scale, f"limit {show_bytes(verdict.limit_bytes)}", len(shown))
    legend(page, segments, verdict.limit_bytes, show_bytes)
    if report.host_bytes:
        page.note(f"{show_bytes(report.host_bytes)} on the host for each device", "dim")
    if paged := max(report.evaluation.resident, report.evaluation.moved):
        where = "all cross the host link each way in an update" if report.evaluation.moved else "all on the device"
        page.note(f"{show_bytes(paged)} of optimizer state in pages: {where}", "dim")
    if report.plan.pp > 1:
        page.note(f"{counted(report.memory.in_flight, 'micro-batch')} in flight on this stage", "dim")


def _time(page: Page, report: TrainReport) -> None:
    step = step_tree(report)
    exposed, hidden = step["exposed_seconds"], step["hidden_seconds"]
    whole = report.step_seconds
    label = "other passes of the method" if report.phases else "overhead of the framework"
    segments = [
        Segment("compute", step["compute_seconds"], FULL, "green"),
        Segment("exposed communication", sum(exposed.values()), DARK, "red"),
        Segment("pipeline bubble", step["bubble_seconds"], LIGHT, "yellow"),
        Segment("optimizer step", step["optimizer_seconds"], MEDIUM, "magenta"),
        Segment(label, step["overhead_seconds"], "\u2571", "bright_black"),
    ]
    page.bar("TIME", segments, whole, show_seconds(whole))
    covered = Segment("overlapped by compute", sum(hidden.values()), "\u2500", "cyan")
    if covered.amount:
        page.bar("overlap", [replace(covered, amount=min(covered.amount, whole))], whole, show_seconds(covered.amount))
    for s in segments:
        legend(page, [s], whole, show_seconds)
        if s.label == "compute" and step["recompute_seconds"]:
            _under(page, "recompute and its messages", step["recompute_seconds"], whole)
        if s.label.startswith("exposed"):
            _by_axis(page, exposed, whole)
    legend(page, [covered], whole, show_seconds)
    _by_axis(page, hidden, whole)


def _by_axis(page: Page, seconds: dict[str, float], whole: float) -> None:
    for axis, value in sorted(seconds.items(), key=lambda row: -row[1]):
        _under(page, _AXES.get(axis, axis), value, whole)


def _under(page: Page, label: str, seconds: float, whole: float) -> None:
    row = f"{label:<{label_width(page) + 2}}{show_seconds(seconds):>9}{seconds / whole:>9.1%}"
    page.add((" " * 14, ""), (row, "dim"))
