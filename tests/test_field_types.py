"""What Python callers pass: values of other types are bad input with field and remedy, those of numpy are numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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


def under_load_of(job: sw.Serving) -> sw.ServeReport:
    """Return the report of a small load on an engine that is set up so."""
    return sw.serve(MODEL, CLUSTER, sw.Plan(dp=2), loaded(), job)


def planned(space: sw.LoadSpace) -> sw.LoadResult:
    """Return the best deployment of a space for a small load."""
    return sw.plan_serve(MODEL, CLUSTER, loaded(), None, None, (space, "devices", 1))


def search(space: sw.SearchSpace) -> sw.TrainingResult:
    """Return the best plans of a space."""
    return sw.plan_training(MODEL, CLUSTER, JOB, space)


def of_sizes(**sizes: Any) -> sw.Model:
    """Return a small model with one size more."""
    return sw.Model.from_sizes(num_layers=2, hidden_size=64, **sizes)


def trained(**rates: Any) -> sw.TrainReport:
    """Return the report of a small training at some rates."""
    options = sw.TrainingOptions(efficiencies=sw.Efficiencies(**rates))
    return sw.train(MODEL, CLUSTER, sw.Plan(dp=2), JOB, options)


def set_to(**settings: Any) -> sw.TrainReport:
    """Return the report of a small training on a framework with some settings."""
    stack = replace(sw.find_stack("fsdp2"), settings=sw.Settings(**settings))
    return sw.train(MODEL, CLUSTER, sw.Plan(dp=2, sharding="fsdp"), JOB, sw.TrainingOptions(stack=stack))


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
    "a number for a model's name": (lambda v: sw.load_model(v), 3, "name_or_path"),
    "text for overrides": (lambda v: sw.Model.load("gpt2", v), "num_layers=2", "overrides"),
    "a number for a cluster": (lambda v: sw.Cluster.parse(v), 8, "text"),
    "options of no names": (lambda v: sw.Cluster.parse("8xh100", v), {3: 1}, "overrides"),
    "a number for a file": (lambda v: sw.Cluster.load(v), 8, "path"),
    "no file of a device": (lambda v: sw.load_device(v), None, "path"),
    "a number for a framework": (lambda v: sw.find_stack(v), 3, "stack"),
    "a number for a script": (lambda v: sw.import_file(v), 8, "path"),
    "a number for folders": (lambda v: sw.use_catalogue(v), 3, "catalogue"),
    "a number for arguments": (lambda v: sw.from_megatron_args(v), 3, "args"),
    "words for ranges": (lambda v: sw.IntRanges.parse(v), "auto", "values"),
    "ranges that fall": (lambda v: sw.IntRanges.parse(v), "4..2", "values"),
    "a range without numbers": (lambda v: search(sw.SearchSpace(tp=sw.IntRanges(((v, 1),)))), 2, "tp"),
    "no clusters": (lambda v: sw.plan_training(MODEL, v, JOB), (), "cluster"),
    "no counts of devices": (lambda v: sw.strong_scaling(MODEL, CLUSTER, JOB, v), [], "counts"),
    "text for counts": (lambda v: sw.strong_scaling(MODEL, CLUSTER, JOB, v), "1..2", "counts"),
    "a model for an answer": (lambda v: sw.runners_up(v), MODEL, "result"),
    "text for an answer": (lambda v: sw.energy(v), "train", "report"),
    "text for a PUE": (lambda v: sw.energy(trained(), v), "1.2", "pue"),
    "a name for a roofline": (lambda v: sw.roofline(v), "train", "report"),
    "a model for a plot": (lambda v: sw.plot(v, "model.svg"), MODEL, "answer"),
    "a number for a plot": (lambda v: sw.plot(trained(), v), 3, "path"),
    "a list to be explained": (lambda v: trained().explain(v), ["step"], "what"),
    "an unknown axis": (lambda v: sw.comm(MODEL, CLUSTER, sw.Plan(dp=2), JOB).groups(v), "x", "axis"),
    "a rank beyond the last": (lambda v: sw.comm(MODEL, CLUSTER, sw.Plan(dp=2), JOB).place(v), 2, "rank"),
    "an unknown latency": (lambda v: under_load().why(v), "tttf", "metric"),
    "lengths of nothing": (lambda v: under_load(input_tokens=sw.Length(kind="empirical", mean=9.0)), 0, "input_tokens"),
    "prompts of no tokens": (lambda v: under_load(pairs=((v, 8),)), -3, "pairs"),
    "a step too large": (lambda v: under_load_of(sw.Serving(max_batched_tokens=v)), 10**9, "max_batched_tokens"),
    "steps below none": (lambda v: planned(sw.LoadSpace(step_tokens=(v,))), -5, "step_tokens"),
    "more than is computed": (lambda v: sw.infer(MODEL, CLUSTER, sw.Plan(), sw.Serving(batch=v)), 10**40, "batch"),
    "seconds beyond numbers": (lambda v: trained(memory_bytes_per_second=v), 1e-308, "step_seconds"),
    "settings of other types": (lambda v: set_to(blas_workspace_bytes=v), (1,), "blas_workspace_bytes"),
    "no size of experts": (lambda v: of_sizes(experts_per_token=v), np.array([]), "experts_per_token"),
    "no batch to count": (lambda v: sw.count(MODEL, sw.Counting(batch=v)), 0, "batch"),
    "an unknown recompute": (lambda v: sw.count(MODEL, sw.Counting(recompute=v)), "some", "recompute"),
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


def test_a_space_without_devices_is_that_of_all() -> None:
    """A layout space that says nothing of devices is tried on those that a load is tried on unasked."""
    assert planned(sw.LoadSpace(layouts=sw.ServingSpace())).layouts == planned(sw.LoadSpace()).layouts


@pytest.mark.parametrize(
    ("plan", "settings", "field"),
    [
        (sw.Plan(pp=0), sw.Settings(), "pp"),
        (sw.Plan(), sw.Settings(rollout_tp=0), "rollout_tp"),
        (sw.Plan(), sw.Settings(loss={}), "loss"),  # type: ignore[arg-type]
        (sw.Plan(), sw.Settings(checkpoint_policy={}), "checkpoint_policy"),  # type: ignore[arg-type]
    ],
)
def test_what_nothing_is_divided_by_is_bad_input(plan: sw.Plan, settings: sw.Settings, field: str) -> None:
    """No stage, no rank of an engine and no word are refused by name: all were tracebacks."""
    stack = replace(sw.find_stack("trl"), settings=settings)
    with pytest.raises(sw.InputError) as error:
        sw.train(MODEL, CLUSTER, replace(plan, dp=0), JOB, sw.TrainingOptions(stack=stack))
    assert field in {one.field for one in error.value.problems}
