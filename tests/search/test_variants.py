"""What a search tries several of beside the fields of a grid: plans, counts and optimum are those of brute force."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import pytest

import brute_force as brute
from shardwise import Cluster, Plan, Training, load_model
from shardwise.formats import ExportCase
from shardwise.plans import find_stack
from shardwise.search import (
    OBJECTIVES,
    IntRanges,
    ProcessExecutor,
    SearchOptions,
    SearchSpace,
    SerialExecutor,
    TrainingResult,
    searched,
    upto,
    work_of,
)
from shardwise.training._evaluate import PricedBlocks

pytestmark = pytest.mark.usefixtures("kept_recordings")

DENSE, SPARSE = load_model("llama-3.2-1b"), load_model("qwen3-30b-a3b")
A100, H100, H200 = (Cluster.parse(f"8x{name}") for name in ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb"))
JOB = Training(seq_len=1024, global_batch=16)
SMALL: dict[str, Any] = {"micro_batch": upto(1), "recompute": ("none",), "cp": upto(1), "tp": upto(2)}
# Model, clusters, stack, space: every field that a grid has one of, alone and beside another.
CASES: dict[str, tuple[Any, tuple[Cluster, ...], str, dict[str, Any]]] = {
    "stages": (DENSE, (A100,), "megatron", {**SMALL, "tp": upto(1), "pp": upto(4), "vpp": upto(2),
                                            "stage_layers": ("usual", "first-1", "last-1", "ends-1")}),
    "modules": (DENSE, (A100,), "megatron", {**SMALL, "tp": upto(1), "pp": upto(4),
                                             "recompute": ("none", "selective", "full"),
                                             "modules": ((), ("layernorm",), ("core_attn", "layernorm"))}),
    "some layers": (DENSE, (A100,), "megatron", {**SMALL, "tp": upto(1), "pp": upto(4), "vpp": upto(2),
                                                 "sharding": ("none",), "recompute": ("none", "full"),
                                                 "recompute_layers": (0, 3, 4, 8)}),
    "groups": (DENSE, (A100,), "fsdp2", {**SMALL, "pp": upto(2), "sharding": ("fsdp", "hsdp"),
                                          "shard": IntRanges.parse("1..4")}),
    "experts in groups": (SPARSE, (H200,), "fsdp2", {**SMALL, "pp": upto(1), "sharding": ("hsdp",),
                                                     "shard": IntRanges.parse("2..4")}),
    "groups of an optimizer": (SPARSE, (H200,), "megatron", {**SMALL, "pp": upto(2), "tp": upto(1),
                                                             "shard": IntRanges.parse("1,2")}),
    "optimizer on the host": (DENSE, (A100,), "megatron", {**SMALL, "offload": ((), ("optimizer",)), "tp": upto(1)}),
    "offload": (DENSE, (A100,), "fsdp2", {**SMALL, "pp": upto(2),
                                           "offload": ((), ("optimizer", "gradients", "parameters"))}),
    "activations": (DENSE, (A100,), "transformers", {**SMALL, "tp": upto(1), "recompute": ("none", "full"),
                                                     "sharding": ("none", "fsdp"), "offload": ((), ("activations",))}),
    "jobs": (DENSE, (A100, H100), "megatron", {**SMALL, "tp": upto(1), "pp": upto(2), "precision": ("bf16", "fp8"),
                                               "optimizer": ("adam", "sgd")}),
    "batches": (DENSE, (A100,), "megatron", {**SMALL, "pp": upto(2), "global_batch": (8, 16, 32)}),
}  # fmt: skip


def _work(kind: str, **options: Any) -> Any:
    model, clusters, stack, space = CASES[kind]
    return work_of(model, clusters, JOB, SearchSpace(**space), SearchOptions(stack=stack, top=5, **options))


@cache
def _found(kind: str, objective: Any = "step") -> TrainingResult:
    return searched(_work(kind, objective=objective), SerialExecutor())


def _named(case: Any, plan: Plan) -> tuple[Any, ...]:
    return case.cluster.device.name, case.job, plan


@pytest.mark.parametrize("kind", list(CASES))
def test_all_that_is_asked_is_searched_as_brute_force_does(kind: str) -> None:
    """Plans, the legal and the feasible ones, in parts, and the best of all objectives are those of brute force."""
    work = _work(kind, prune=False, rows=3)
    every = list(brute.together(work))
    assert len({_named(*one) for one in every}) == len(every) == work.num_plans
    legal = [(case, plan) for case, plan in every if _legal(case, plan)]
    found = searched(work, SerialExecutor())
    assert found.counts.legal == len(legal) == found.counts.evaluated
    priced = {id(task.grid.case): PricedBlocks() for task in work.tasks}
    fitting = [r for r in (brute.report(case, plan, priced[id(case)]) for case, plan in legal) if brute.fits(r)]
    assert found.counts.fitting == len(fitting) > 0
    for objective in ("step", "throughput", "memory"):
        quick = _found(kind, objective)
        least: dict[Any, float] = {}
        for r in fitting:
            weight = work.grid.case.job.global_batch / r.job.global_batch
            value = OBJECTIVES[objective](r.step_seconds * weight, r.device_bytes, r.plan.num_devices)
            p = r.plan
            key = (r.case.cluster.device.name, r.job, p.tp, p.cp, p.pp, p.dp, p.ep, p.etp)
            least[key] = min(least.get(key, value), value)
        values = [quick.value(report) for report in quick.best]
        assert values == pytest.approx(sorted(least.values())[:5], rel=1e-9)


def _legal(case: Any, plan: Plan) -> bool:
    from shardwise.plans.laws import stack_problems

    return brute.is_legal(case, plan) and not stack_problems(case.stack, plan, **case.job_words)


@pytest.mark.parametrize("kind", list(CASES))
def test_what_is_found_is_launched_and_is_what_train_says(kind: str) -> None:
    """The exporter of its framework writes every plan that is returned, and `train` gives it the same numbers."""
    import shardwise as sw

    found = searched(_work(kind), ProcessExecutor(2)) if kind == "jobs" else _found(kind)
    assert found.best
    for report in (*found.best, *found.front):
        case = report.case
        stack = find_stack(CASES[kind][2])
        exporter = import_module(f"shardwise.formats.{stack.runs.exporter}")
        exporter.export(ExportCase(model=case.model, cluster=case.cluster, plan=report.plan, job=case.job, stack=stack))
        assert not report.unlaunched
        again = sw.train(case.model, case.cluster, report.plan, case.job, sw.TrainingOptions(stack=stack.name))
        assert again.step_seconds == pytest.approx(report.step_seconds, rel=1e-12)
        assert again.device_bytes == pytest.approx(report.device_bytes, rel=1e-12)


def test_shardings_that_know_no_groups_are_tried_beside_any_size_of_one() -> None:
    """FSDP that is asked for with HSDP in groups of 2 and 4 is searched too; without it the sizes restrict."""
    space = {**CASES["groups"][3], "shard": IntRanges.parse("2..4")}
    for words, shards in ((("fsdp", "hsdp"), [1, 2, 4]), (("hsdp",), [2, 4])):
        asked = SearchSpace(**{**space, "sharding": words})
        tasks = work_of(DENSE, A100, JOB, asked, SearchOptions(stack="fsdp2")).tasks
        assert [task.grid.case.plan.shard for task in tasks] == shards


def test_a_frame_has_all_that_is_asked() -> None:
    """Every legal plan of all grids is a row, with the device and the job that it is of."""
    found = searched(_work("jobs"), SerialExecutor())
    frame = found.frame()
    assert len(frame) == found.counts.legal
    assert set(frame["device"]) == {A100.device.name, H100.device.name} and set(frame["precision"]) == {"bf16", "fp8"}
