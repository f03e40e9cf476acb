"""`shardwise count`: parameters, FLOPs and operators of a model."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import TYPE_CHECKING, Any

from shardwise.answers import _case, _precision
from shardwise.answers._answer import Answer
from shardwise.answers._counting import Counting, CountPart, CountReport, CountRow, count, count_tree
from shardwise.answers._files import command_words
from shardwise.answers._from import settled
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import DARK, FULL, LIGHT, MEDIUM, Page, Segment, assumptions, command_lines, legend
from shardwise.answers._train_page import tuning_lines
from shardwise.errors import InputError
from shardwise.records import replace
from shardwise.units import show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from shardwise.models import Model
    from shardwise.plans import Plan, Training


def job_of(inputs: Inputs, model: Model) -> Training:
    """Return the job whose tokens and adapters are counted."""
    from shardwise.training import job_problems

    job = replace(_case.make_job(inputs, model), global_batch=1)
    inputs.merge(InputError(job_problems(job, model).items))
    return job


def replicas_for(plan: Plan) -> int:
    """Return the least replicas over which the experts' ranks fit: a count has no cluster that says how many."""
    inside = plan.tp * plan.tp2 * plan.cp
    return lcm(inside, plan.ep * plan.etp) // inside


def ask(inputs: Inputs) -> CountReport:
    """Return the counts of a model; raises `InputError` with every problem."""
    model, cluster = _case.load_the_model(inputs), _case.load_the_cluster(inputs)
    stack = _case.make_stack(inputs, "pytorch")
    _precision.take_dtype(inputs, "precision")
    plan = replace(_case.make_plan(inputs), dp=1, micro_batch=1)
    if cluster is None:
        plan = replace(plan, dp=replicas_for(plan))
    if model is not None and stack is not None and (cluster is not None or "on" not in inputs.values):
        precision = inputs.get("precision", stack.precision)
        if cluster is not None:
            _precision.check_precision(inputs, cluster, precision)
        seq_len = _case.seq_len_of(inputs, model)
        plan = settled(inputs, None, model, plan, seq_len)
        job = job_of(inputs, model)
        tuned = bool(job.adapter or job.base or job.trains or job.rank or job.targets)
        counting = Counting(
            batch=inputs.get("batch", 1),
            seq_len=seq_len,
            token_budget=job.run_tokens,
            recompute=inputs.get("recompute", "none"),
            precision=precision,
            stack=stack.name,
            job=job if tuned else None,
        )
        try:
            report = count(model, counting, plan, cluster, _case.make_efficiencies(inputs))
        except InputError as error:
            inputs.merge(error)
        else:
            inputs.problems.raise_if_any()
            return report
    raise InputError(dict.fromkeys(inputs.problems.items))


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise count`."""
    report = ask(inputs)
    fixed = {"batch": report.counting.batch, "seq_len": report.counting.seq_len}
    words = command_words("count", {**inputs.values, **fixed})

    def tree() -> dict[str, Any]:
        return count_tree(report)

    def page() -> Page:
        return count_page(report, words, width)

    return Answer(0, tree, page)


_SQUARES = {
    "full_attention": "attention over the full square",
    "causal": "half the square",
    "masked": "what masks leave",
}
_GLYPHS = (
    (FULL, "blue"),
    (DARK, "cyan"),
    (MEDIUM, "magenta"),
    (LIGHT, "green"),
    ("\u2573", "yellow"),
    ("\u2571", "red"),
)


def count_page(report: CountReport, command: Sequence[str], width: int = 80) -> Page:
    """Return counts as a page."""
    page = Page(width)
    _parameters(page, report)
    page.blank()
    if report.trained is not None:
        tuning_lines(page, report.trained)
        page.blank()
    _flops(page, report)
    for part in report.parts:
        page.blank()
        _operators(page, report, part)
    page.blank()
    assumptions(page, report.assumptions)
    page.blank()
    command_lines(page, "AGAIN", command)
    return page


def _parameters(page: Page, report: CountReport) -> None:
    total, active = report.parameters, report.active_parameters
    page.label("COUNT", f"{report.model.name}: {show_count(total)} parameters ({total:,})", "bold", "bold")
    if active != total:
        page.note(f"a token meets {show_count(active)} of them ({active:,})")
    ordered = sorted(report.components.items(), key=lambda row: -row[1])
    segments = [Segment(name.replace("_", " "), n, *_GLYPHS[i % len(_GLYPHS)]) for i, (name, n) in enumerate(ordered)]
    page.bar("", segments, total, show_count(total))
    legend(page, segments, total, show_count)
    if report.predictions:
        page.note(f"and {show_count(report.predictions)} in multi-token-prediction layers, not counted above", "dim")
    if towers := report.model.tower_parameters:
        page.note(f"and {show_count(towers)} in towers beside the language model, not counted above", "dim")


def _flops(page: Page, report: CountReport) -> None:
    c, forward = report.counting, report.forward
    page.label("FLOPS", f"of a forward pass of {c.batch:,} x {c.seq_len:,} tokens", "bold", "bold")
    page.table([[_SQUARES[name], show_count(value, "FLOP")] for name, value in forward.items()], right=(1,))
    page.blank()
    head = ["of training, a token, by convention", "a token"]
    budget = c.token_budget
    rows = [[*head, f"{show_count(budget)} tokens"] if budget else head]
    for name, value in report.per_token.items():
        rows.append([name, show_count(value, "FLOP"), *([f"{value * budget:.3e} FLOP"] if budget else [])])
    if c.recompute != "none":
        value = report.hardware_per_token
        more = [f"{value * budget:.3e} FLOP"] if budget else []
        rows.append([f"model-full with recompute {c.recompute}", show_count(value, "FLOP"), *more])
    page.table(rows, right=(1, 2), header=True)


def _operators(page: Page, report: CountReport, part: CountPart) -> None:
    plural = "s, each" if part.times > 1 else ""
    title = f"{part.times} {part.name}{plural}" if "layer" in part.name else part.name
    page.add((title.upper(), "bold"), (_aside(report, part), "dim"))
    priced = report.cluster is not None
    head = ["operator", "m x k x n", "params", "saved", "FLOPs", "FLOP/B"]
    rows = [head, *(_counts(row) for row in part.rows)]
    if len(part.rows) > 1:
        rows.append(_sum(part.rows))
    page.table(rows, right=(2, 3, 4, 5), header=True, indent=0)
    if priced:
        page.blank()
        times = ["seconds", "forward", "backward", "compute", "memory", "messages"]
        page.table([times, *(_times(row) for row in part.rows)], right=(1, 2, 3, 4, 5), header=True, indent=0)


def _aside(report: CountReport, part: CountPart) -> str:
    shared = f"  {part.copies} of their weights" if part.copies != part.times else ""
    return shared + ("  on one rank" if report.plan.tp * report.plan.ep > 1 else "")


def _counts(row: CountRow) -> list[str]:
    shape = "x".join(f"{n:g}" if n < 1e6 else f"{n:.0f}" for n in row.shape)
    return [row.name, shape, *_amounts(row.parameters, row.activation_bytes, row.forward_flops), _ratio(row.intensity)]


def _amounts(parameters: float, saved: float, flops: float) -> list[str]:
    return [
        show_count(parameters) if parameters else "-",
        show_bytes(saved) if saved else "-",
        show_count(flops, "F") if flops else "-",
    ]


def _ratio(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value else "-"


def _sum(rows: Sequence[CountRow]) -> list[str]:
    sums = [float(sum(getattr(r, name) for r in rows)) for name in ("parameters", "activation_bytes", "forward_flops")]
    moved = sum(r.forward_bytes for r in rows)
    return ["together", "", *_amounts(*sums), _ratio(sums[2] / moved if moved else 0.0)]


def _times(row: CountRow) -> list[str]:
    if row.seconds is None:
        return [row.name]
    names = ("forward", "backward", "compute", "memory", "communication")
    return [row.name, *(show_seconds(v) if (v := getattr(row.seconds, n)) else "-" for n in names)]
