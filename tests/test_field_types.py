"""What Python callers pass: values of other types are bad input with field and remedy, those of numpy are numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.field_types import _checks

MODEL, CLUSTER = sw.Model.load("llama-3.2-1b"), sw.Cluster.parse("2xh100-sxm-80gb")
JOB = sw.Training(seq_len=512, global_batch=4)
SERVED = sw.Serving(batch=2, input_tokens=64, output_tokens=8)


def loaded(**changes: Any) -> sw.Workload:
    """Return a small load with changes."""
    lengths = {"input_tokens": sw.Length(mean=64), "output_tokens": sw.Length(mean=8)}
    return sw.Workload(**{**lengths, "arrivals": sw.Arrivals(rate=1.0), "count": 20, **changes})


def under_load(options: sw.LoadOptions | None = None, **changes: Any) -> sw.ServeReport:
    """Return the report of a small load with changes."""
    return sw.serve(MODEL, CLUSTER, sw.Plan(dp=2), loaded(**changes), None, options)


def limited(**changes: Any) -> sw.LoadOptions:
    """Return options with one limit with changes."""
    return sw.LoadOptions(limits=(sw.Limit(**{"metric": "ttft", "quantile": "mean", "seconds": 1.0, **changes}),))


ASKED: dict[str, tuple[Callable[[Any], object], Any, str]] = {
    "names for a model": (lambda v: sw.train(v, CLUSTER, sw.Plan(dp=2), JOB), "llama-3.2-1b", "model"),
    "names for a cluster": (lambda v: sw.train(MODEL, v, sw.Plan(dp=2), JOB), "2xh100", "cluster"),
    "a name among clusters": (lambda v: sw.plan_training(MODEL, v, JOB), "2xh100", "cluster"),
    "another job": (lambda v: sw.infer(MODEL, CLUSTER, sw.Plan(dp=2), v), JOB, "job"),
    "text for a degree": (lambda v: sw.train(MODEL, CLUSTER, sw.Plan(tp=v), JOB), "2", "tp"),
    "nothing for a degree": (lambda v: sw.infer(MODEL, CLUSTER, sw.Plan(ep=v), SERVED), None, "ep"),
    "text for layers": (lambda v: sw.train(MODEL, CLUSTER, sw.Plan(recompute_layers=v), JOB), "2", "recompute_layers"),
    "text for a list": (lambda v: sw.train(MODEL, CLUSTER, sw.Plan(offload=v), JOB), "optimizer", "offload"),
    "no number": (lambda v: sw.infer(MODEL, CLUSTER, sw.Plan(), sw.Serving(misc_bytes=v)), float("nan"), "misc_bytes"),
    "text for options": (lambda v: under_load(sw.LoadOptions(serving=v)), "vllm", "serving"),
    "an unknown router": (lambda v: under_load(sw.LoadOptions(router=v)), "least_loaded", "router"),
    "a chance above one": (lambda v: under_load(sw.LoadOptions(risk=v)), 2.0, "risk"),
    "unknown arrivals": (lambda v: under_load(arrivals=sw.Arrivals(kind=v, rate=1.0)), "bursty", "kind"),
    "an unknown metric": (lambda v: under_load(limited(metric=v)), "tttf", "metric"),
    "an unknown percentile": (lambda v: under_load(limited(quantile=v)), "p42", "quantile"),
    "an unknown class": (lambda v: under_load(limited(of=v)), "chat", "of"),
    "half a request": (lambda v: under_load(count=v), 20.5, "count"),
    "text for a batch": (lambda v: sw.count(MODEL, sw.Counting(batch=v)), "2", "batch"),
    "text for a space": (lambda v: sw.plan_serving(MODEL, CLUSTER, SERVED, v), "tp=2", "space"),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_values_of_other_types_are_bad_input(name: str) -> None:
    """The field is named, and nothing is taken for what it is not."""
    ask, value, field = ASKED[name]
    with pytest.raises(sw.InputError) as raised:
        ask(value)
    assert [problem.field for problem in raised.value.problems] == [field]
    assert all(problem.rule and problem.remedy for problem in raised.value.problems)


def test_every_problem_of_every_record_is_named_at_once() -> None:
    """A plan and a job that are both wrong are refused together."""
    with pytest.raises(sw.InputError) as raised:
        sw.train(MODEL, CLUSTER, sw.Plan(tp="x", pp=1.5), sw.Training(seq_len="8k", global_batch=4))  # type: ignore[arg-type]
    assert {problem.field for problem in raised.value.problems} == {"tp", "pp", "seq_len"}


def test_numbers_of_numpy_are_numbers_and_lists_are_tuples() -> None:
    """A row of a table asks what plain numbers ask, and answers what JSON can hold."""
    plain = sw.infer(MODEL, CLUSTER, sw.Plan(tp=2), SERVED)
    row = sw.Serving(batch=np.int64(2), input_tokens=np.int32(64), output_tokens=np.uint8(8))  # type: ignore[arg-type]
    given = sw.infer(MODEL, CLUSTER, sw.Plan(tp=np.int16(2), sequence_parallel=np.True_), row)  # type: ignore[arg-type]
    assert given.tpot_seconds == plain.tpot_seconds and type(given.plan.tp) is int
    one = sw.train(MODEL, CLUSTER, sw.Plan(dp=2, offload=("optimizer",)), JOB)
    assert sw.train(MODEL, CLUSTER, sw.Plan(dp=2, offload=["optimizer"]), JOB).plan == one.plan  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind", [sw.Plan, sw.Training, sw.Serving, sw.LoadOptions, sw.Workload, sw.Arrivals, sw.Length, sw.Limit,
             sw.TrainingOptions, sw.ServingOptions, sw.Efficiencies, sw.SearchOptions, sw.SearchSpace, sw.Counting]
)  # fmt: skip
def test_every_field_of_what_callers_make_is_checked(kind: Any) -> None:
    """No annotation is of a type that the check does not know."""
    assert {name for name, *_ in _checks(kind)} == set(kind.__dataclass_fields__)
