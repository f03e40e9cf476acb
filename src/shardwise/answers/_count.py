"""`shardwise count`: parameters, FLOPs and operators of a model."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Any

from shardwise.answers import _case
from shardwise.answers._answer import Answer
from shardwise.answers._case import Inputs
from shardwise.answers._settled import settled
from shardwise.answers._words import command_words
from shardwise.errors import InputError

if TYPE_CHECKING:
    from shardwise.answers._counting import CountReport
    from shardwise.answers._page import Page
    from shardwise.models import Model
    from shardwise.plans import Plan


def budget_of(inputs: Inputs, model: Model) -> float:
    """Return the tokens of the whole run, 0 where none are asked for."""
    from shardwise.training._resolve import job_problems

    job = replace(_case.make_job(inputs, model), global_batch=1)
    inputs.merge(InputError(job_problems(job, model).items))
    return job.run_tokens


def replicas_for(plan: Plan) -> int:
    """Return the least replicas over which the experts' ranks fit: a count has no cluster that says how many."""
    inside = plan.tp * plan.tp2 * plan.cp
    return lcm(inside, plan.ep * plan.etp) // inside


def ask(inputs: Inputs) -> CountReport:
    """Return the counts of a model; raises `InputError` with every problem."""
    from shardwise.answers._counting import Counting, count

    model, cluster = _case.load_the_model(inputs), _case.load_the_cluster(inputs)
    stack = _case.make_stack(inputs, "pytorch")
    _case.take_dtype(inputs, "precision")
    plan = replace(_case.make_plan(inputs), dp=1, micro_batch=1)
    if cluster is None:
        plan = replace(plan, dp=replicas_for(plan))
    if model is not None and stack is not None and (cluster is not None or "on" not in inputs.values):
        precision = inputs.get("precision", stack.precision)
        if cluster is not None:
            _case.check_precision(inputs, cluster, precision)
        seq_len = _case.seq_len_of(inputs, model)
        plan = settled(inputs, None, model, plan, seq_len)
        counting = Counting(
            batch=inputs.get("batch", 1),
            seq_len=seq_len,
            token_budget=budget_of(inputs, model),
            recompute=inputs.get("recompute", "none"),
            precision=precision,
            stack=stack.name,
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
        from shardwise.answers._counting import count_tree

        return count_tree(report)

    def page() -> Page:
        from shardwise.answers._count_view import count_page

        return count_page(report, words, width)

    return Answer(0, tree, page)
