"""`shardwise infer`: one serving plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.answers import _case, _figures
from shardwise.answers._answer import Answer, check_finite
from shardwise.answers._case import Inputs
from shardwise.answers._words import command_words
from shardwise.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.answers._page import Page
    from shardwise.serving import InferReport


def ask(inputs: Inputs) -> InferReport:
    """Return the report of a serving case; raises `InputError` with every problem."""
    from shardwise.serving import ServingOptions, infer

    model, cluster = _case.load_the_model(inputs), _case.load_the_cluster(inputs)
    if model is not None and cluster is not None:
        plan = replace(_case.make_plan(inputs), micro_batch=1)
        options = ServingOptions(engine=inputs.get("engine", "vllm"), efficiencies=_case.make_efficiencies(inputs))
        try:
            report = infer(model, cluster, plan, _case.make_serving(inputs, model), options)
        except InputError as error:
            inputs.merge(error, dtype="weights")
        else:
            inputs.problems.raise_if_any()
            return replace(report, assumptions=tuple(dict.fromkeys((*inputs.notes, *report.assumptions))))
    else:
        _check_alone(inputs)
    raise InputError(dict.fromkeys(inputs.problems.items))


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
    _figures.check(inputs)
    report = ask(inputs)
    check_finite({"request_seconds": report.request_seconds, "usd": report.usd_per_million_output_tokens or 0.0})

    def tree() -> dict[str, Any]:
        from shardwise.answers._infer_view import infer_tree

        return infer_tree(report)

    def page() -> Page:
        from shardwise.answers._infer_view import infer_page

        return infer_page(report, words(inputs, report), width)

    def draw() -> Figure:
        from shardwise.answers._plots_bars import infer_figure

        return infer_figure(report)

    return _figures.plotted(inputs, Answer(0 if report.fits else 1, tree, page), draw)
