"""Every model of the catalogue has an answer that keeps the laws."""

from __future__ import annotations

import pytest

from laws.helpers import evaluated, report
from laws.strategies import problems_of
from shardwise.hardware import Cluster
from shardwise.models import all_models, load_model, model_names
from shardwise.ops import count_parameters
from shardwise.plans import Plan, Training, find_stack
from shardwise.records import replace
from shardwise.search._remedies import evaluate_columns
from shardwise.training import TrainingCase
from shardwise.training._parts import owned

NODE = Cluster.parse("8xh100-sxm-80gb")


def case_of(name: str, stack: str, plan: Plan) -> TrainingCase:
    """Return a short job of a model on one node."""
    model = load_model(name)
    job = Training(seq_len=min(model.positions or 512, 512), global_batch=8)
    return TrainingCase(model=model, cluster=NODE, job=job, stack=find_stack(stack), plan=plan)


@pytest.mark.parametrize("name", model_names())
def test_a_model_of_the_catalogue_is_held_once(name: str) -> None:
    """One stage owns exactly the parameters of the model, shared weights once; memory and time are positive."""
    case = case_of(name, "pytorch", Plan(dp=8, sharding="zero1", sequence_parallel=False))
    assert not problems_of(case)
    without = evaluated(replace(case, model=replace(case.model, mtp=())))
    assert sum(s.count * sum(owned(without.parts, s)) for s in without.stages) == count_parameters(case.model)
    assert without.peak > 0
    assert without.step.total > 0


@pytest.mark.parametrize(
    "name", sorted({one["config"]["model_type"]: name for name, one in all_models().items()}.values())
)
def test_a_model_of_every_type_is_the_same_in_columns_and_traces(name: str) -> None:
    """Split over two ranks, columns and traces of a model of each type of the catalogue equal its numbers."""
    case = case_of(name, "megatron", Plan(tp=2, dp=4, sharding="distributed-optimizer"))
    if problems_of(case):
        pytest.skip("two ranks do not divide the model")
    answer = report(case)
    columns = evaluate_columns(case, [case.plan, case.plan])
    assert columns.peak == pytest.approx([answer.evaluation.peak] * 2, rel=1e-9)
    assert columns.step.total == pytest.approx([answer.step_seconds] * 2, rel=1e-9)
    assert float(answer.explain("step")) == answer.step_seconds
    assert float(answer.explain("memory")) == answer.evaluation.peak
