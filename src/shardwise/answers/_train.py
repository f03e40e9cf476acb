"""`shardwise train`: one training plan."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwise.answers import _case, _precision
from shardwise.answers._answer import Answer, whole_bytes
from shardwise.answers._energy import asked_energy, energy_tree
from shardwise.answers._evidence import fits_at
from shardwise.answers._files import command_words
from shardwise.answers._from import settled
from shardwise.answers._inputs import Inputs
from shardwise.answers._limits import limited
from shardwise.answers._plot import check_drawable, plotted, timed
from shardwise.answers._train_page import savers_table, train_page
from shardwise.answers._train_tree import train_tree
from shardwise.answers._whole_steps import whole
from shardwise.errors import InputError, check_finite
from shardwise.records import replace
from shardwise.training import TrainReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.answers._page import Page


def ask(inputs: Inputs) -> TrainReport:
    """Return the report of a training case with its rollouts, where these are timed; raises `InputError`."""
    return whole(trained(inputs))


def trained(inputs: Inputs) -> TrainReport:
    """Return the report of a training case, rollouts left out; raises `InputError` with every problem."""
    from shardwise.training import TrainingOptions, train

    model, cluster = _case.load_the_model(inputs), _case.load_the_cluster(inputs)
    stack = _case.make_stack(inputs, cluster=cluster)
    plan, job = _case.make_plan(inputs), _case.make_job(inputs, model)
    if model is not None:
        plan = settled(inputs, stack, model, plan, job.seq_len)
    if cluster is not None and stack is not None and "precision" not in inputs.bad:
        job = _precision.with_precision(inputs, cluster, stack, job)
    if model is not None and cluster is not None and stack is not None:
        options = TrainingOptions(
            stack=stack,
            efficiencies=_case.make_efficiencies(inputs),
            accumulation=inputs.get("accumulation", 0),
            overlap=inputs.get("overlap", True),
        )
        try:
            report = train(model, cluster, plan, job, options)
        except InputError as error:
            inputs.merge(error)
        else:
            inputs.problems.raise_if_any()
            return replace(report, assumptions=tuple(dict.fromkeys((*inputs.notes, *report.assumptions))))
    else:
        _check_alone(inputs, plan)
    raise InputError(dict.fromkeys(inputs.problems.items))


def _check_alone(inputs: Inputs, plan: Any) -> None:
    """Record what is wrong with a plan whatever the model and the cluster are."""
    from shardwise.plans.laws import field_problems

    problems = field_problems(replace(plan, dp=plan.dp or 1, micro_batch=plan.micro_batch or 1))
    inputs.merge(InputError(problems.items))


def words(inputs: Inputs, report: TrainReport) -> list[str]:
    """Return the command that gives the same report, every deduction written out."""
    if inputs.imported is not None or inputs.get("savers"):
        # What is written out stays as it is: savers may change what was left open, the framework with it.
        return command_words("train", inputs.values)
    plan, job = report.plan, report.job
    fixed: dict[str, Any] = {
        "tp": plan.tp,
        "pp": plan.pp,
        "dp": plan.dp,
        "micro_batch": plan.micro_batch,
        "global_batch": job.global_batch,
        "seq_len": job.seq_len,
        "precision": report.case.recipe.precision.name,
        "stack": report.case.stack.name,
    }
    if not job.precision:
        # The framework's own: stated, it would stay where a change that NEXT tells brings another framework's, and
        # beside frozen weights it may be no recipe that a word names.
        del fixed["precision"]
    if plan.vpp > 1:
        fixed["schedule"] = plan.schedule
    if plan.tp > 1 and plan.layout == "1d" and not plan.sequence_parallel:
        fixed["sequence_parallel"] = False
    if inputs.get("accumulation"):
        # What was stated stays, and what follows from it is not: a change of the plan changes it too.
        follows = "micro_batch" if "global_batch" in inputs.values else "global_batch"
        fixed = {key: value for key, value in fixed.items() if key != follows or key in inputs.values}
    return command_words("train", {**inputs.values, **fixed})


def _batch_flags(inputs: Inputs, report: TrainReport, flags: str = "") -> str:
    """Return batches and recomputation that were left open, as flags beside a saver's, which might choose others."""
    chosen: dict[str, Any] = {"micro_batch": report.plan.micro_batch, "global_batch": report.job.global_batch}
    if inputs.get("recompute") == "auto":
        plan = report.plan
        settled: dict[str, Any] = {"recompute": plan.recompute, "recompute_layers": plan.recompute_layers}
        settled["modules"] = ",".join(plan.modules)
        if "--recompute" in flags.split():  # of all layers again where it is by other words, and of as many
            settled = {"recompute_layers": plan.recompute_layers if "--recompute full" in flags else 0}
        chosen = {name: value for name, value in settled.items() if value} | chosen
    stated = {"global_batch"} if inputs.get("accumulation") else set()
    stated |= {"micro_batch"} if inputs.get("accumulation") and inputs.get("global_batch") else set()
    left = [name for name in chosen if name not in stated and inputs.values.get(name) in (None, "auto")]
    names = {name: "--" + name.replace("_", "-") for name in left}
    return " ".join(f"{flag} {chosen[name]}" for name, flag in names.items() if flag not in flags.split())


def _saver_trees(inputs: Inputs, report: TrainReport) -> dict[str, Any]:
    """Return every saver where they are asked for, and the bundles that fit, each with what belongs beside its flags.

    Bundles are told where no single change makes a plan fit, too, as on a page.
    """
    if not inputs.get("savers") and (report.fits or any(change.fits for change in report.changes)):
        return {}
    return {
        kind: whole_bytes(
            [asdict(one) | {"batches": _batch_flags(inputs, report, one.flags)} for one in getattr(report, kind)]
        )
        for kind in (("savers", "proposals") if inputs.get("savers") else ("proposals",))
    }


def _rollout(inputs: Inputs, report: TrainReport) -> tuple[TrainReport, Any, dict[str, Any] | None]:
    """Return the report with its rollouts, these and a phase that is asked; loads serving for one of them."""
    if not (inputs.get("phase") or report.case.stack.settings.times_rollouts):
        return report, None, None
    from shardwise.answers._rollout import phase_tree
    from shardwise.search import rollout_of, with_rollouts

    rollout = rollout_of(report)
    report = report if rollout is None else with_rollouts(report, rollout)
    phase = phase_tree(report, rollout, inputs.get("phase")) if inputs.get("phase") else None
    return report, rollout, phase


def _rollout_tree(report: TrainReport, rollout: Any) -> dict[str, Any]:
    if rollout is None:
        return {}
    from shardwise.answers._rollout import rollout_tree

    return rollout_tree(report, rollout)


def train_values(report: TrainReport) -> dict[str, Any]:
    """Return a training plan as plain values, with its rollouts and what fits where no single change does."""
    case = report.case
    known = dict(zip(("micro_batch", "global_batch"), case.stated_batches, strict=True))
    values = {"micro_batch": case.plan.micro_batch, "global_batch": case.job.global_batch}
    inputs = Inputs(values={name: value for name, value in values.items() if known[name]})
    if case.accumulation:
        inputs.values["accumulation"] = case.accumulation
    report, rollout, _ = _rollout(inputs, report)
    return train_tree(report) | _rollout_tree(report, rollout) | _saver_trees(inputs, report)


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise train`."""
    check_drawable(inputs)
    report = trained(inputs)
    check_finite({"step_seconds": report.step_seconds, "device_bytes": report.device_bytes, "usd": report.usd or 0.0})

    report, rollout, phase = _rollout(inputs, report)
    used = asked_energy(inputs, report)

    def tree() -> dict[str, Any]:
        answer_tree = train_tree(report, inputs.get("risk", 0.0)) | energy_tree(used) | _rollout_tree(report, rollout)
        if phase is not None:
            answer_tree["phase"] = phase
        return answer_tree | _saver_trees(inputs, report)

    def page() -> Page:
        batches = _batch_flags(inputs, report)

        def more(made: Page) -> None:
            if rollout is not None or phase is not None:
                from shardwise.answers._rollout import rollout_page

                rollout_page(made, report, rollout, phase)
            if inputs.get("savers"):
                savers_table(made, report, batches)

        from shardwise.answers._page import command_lines

        whole = train_page(report, width, inputs.get("risk", 0.0), used, batches, more)
        command_lines(whole, "AGAIN", words(inputs, report))
        return whole

    def draw() -> Figure:
        from shardwise.answers._plots_bars import train_figure

        return train_figure(report)

    fits = fits_at(report, inputs.get("risk", 0.0)) if phase is None else phase["fits"]
    done = limited(inputs.values, Answer(0 if fits else 1, tree, page), report)
    done = timed(inputs, done, report)
    return plotted(inputs, done, draw)
