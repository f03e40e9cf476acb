"""A search proposes what its framework launches: every plan that it returns is accepted by the framework's exporter."""

from __future__ import annotations

from importlib import import_module
from itertools import combinations, product
from typing import Any

import pytest

import brute_force as brute
from shardwise import Cluster, Training, load_model, plan_training
from shardwise.errors import InputError
from shardwise.formats import ExportCase
from shardwise.plans import OFFLOADS, Plan, find_stack
from shardwise.plans.laws import plan_problems, stack_problems
from shardwise.plans.partition import shifted
from shardwise.search import SearchOptions, SearchSpace, upto, work_of

# Each stack that has an exporter, with a small question.
QUESTIONS: tuple[tuple[str, str, str], ...] = (
    ("megatron", "llama-3.2-1b", "16xa100-sxm-80gb"),
    ("megatron-lm", "qwen2.5-0.5b", "8xa100-sxm-80gb"),
    ("megatron", "gpt-oss-20b", "16xh200-sxm-141gb"),
    ("megatron", "deepseek-v2-lite", "16xh200-sxm-141gb"),
    ("megatron-bridge", "llama-3.2-1b", "8xh100-sxm-80gb"),
    ("deepspeed", "qwen2.5-0.5b", "8xa100-sxm-80gb"),
    ("deepspeed", "qwen3-30b-a3b", "16xh200-sxm-141gb"),
    ("fsdp2", "qwen2.5-0.5b", "16xa100-sxm-80gb"),
    ("fsdp2", "qwen3-30b-a3b", "32xh200-sxm-141gb"),
    ("transformers", "llama-3.2-1b", "8xh100-sxm-80gb"),
    ("pytorch", "qwen2.5-0.5b", "8xa100-sxm-80gb"),
    ("accelerate", "qwen2.5-0.5b", "8xa100-sxm-80gb"),
    ("trl", "qwen2.5-0.5b", "8xa100-sxm-80gb"),
    ("axolotl", "qwen2.5-0.5b", "8xa100-sxm-80gb"),
    ("llama-factory", "qwen2.5-0.5b", "8xa100-sxm-80gb"),
    ("llama-factory-v1", "qwen2.5-0.5b", "8xa100-sxm-80gb"),
    ("torchtune", "qwen2.5-0.5b", "8xa100-sxm-80gb"),
    ("nanotron", "qwen2.5-0.5b", "8xa100-sxm-80gb"),
    ("maxtext", "llama-3.2-1b", "16xh100-sxm-80gb"),
    ("maxtext", "qwen3-30b-a3b", "32xh200-sxm-141gb"),
)


@pytest.mark.parametrize(("stack", "name", "on"), QUESTIONS)
def test_what_a_search_returns_is_accepted_by_the_exporter(stack: str, name: str, on: str) -> None:
    """Every best plan and every plan of the front is written by the exporter of its framework, which reads it back."""
    model, cluster, job = load_model(name), Cluster.parse(on), Training(seq_len=1024, global_batch=64)
    found = plan_training(model, cluster, job, SearchSpace(micro_batch=upto(4)), SearchOptions(stack=stack, top=10))
    framework = find_stack(stack)
    exporter = import_module(f"shardwise.formats.{framework.runs.exporter}")
    assert found.best
    for report in (*found.best, *found.front):
        exporter.export(ExportCase(model=model, cluster=cluster, plan=report.plan, job=job, stack=framework))
        assert not report.unlaunched


def test_a_model_split_over_the_devices_of_a_process_is_launched() -> None:
    """Asked for, layers over devices of one node are proposed and written as device_map; over two nodes none are."""
    model, job, framework = load_model("qwen2.5-0.5b"), Training(seq_len=1024, global_batch=16), find_stack("trl")
    space = SearchSpace(schedule=("sequential",), micro_batch=upto(4))
    for on, most in (("8xa100-sxm-80gb", 8), ("16xa100-sxm-80gb", 1)):
        cluster = Cluster.parse(on)
        found = plan_training(model, cluster, job, space, SearchOptions(stack="trl", top=20))
        assert max(report.plan.pp for report in found.best) == most
        for report in found.best:
            case = ExportCase(model=model, cluster=cluster, plan=report.plan, job=job, stack=framework)
            written = import_module("shardwise.formats.trl").export(case)
            assert (
                ("device_map: auto" in written.files["trl.yaml"])
                == (report.plan.pp > 1)
                == (written.launch.startswith("python"))
            )


WRITTEN = sorted({stack for stack, _, _ in QUESTIONS} | {"verl"})


@pytest.mark.parametrize("stack", WRITTEN)
def test_what_a_stack_keeps_on_the_host_is_written(stack: str) -> None:
    """Whatever a framework's table lets lie in the host's memory, with any sharding, its exporter writes."""
    model, cluster, framework = load_model("llama-3.2-1b"), Cluster.parse("8xh100-sxm-80gb"), find_stack(stack)
    job = Training(seq_len=1024, global_batch=16, method="grpo" if stack == "verl" else "sft")
    exporter, runs, seen = import_module(f"shardwise.formats.{framework.runs.exporter}"), framework.runs, set[str]()
    hosts = [words for n in range(len(OFFLOADS) + 1) for words in combinations(OFFLOADS, n)]
    for sharding, recompute, offload in product(runs.sharding, runs.recompute, hosts):
        fields: Any = {"sharding": sharding, "shard": 4 if sharding == "hsdp" else 1, "recompute": recompute}
        plan = Plan(dp=8, offload=offload, sequence_parallel=False, **fields)
        if not plan_problems(model, plan, 8) and not stack_problems(
            framework, plan, optimizer="adam", precision=framework.precision, full_training="true"
        ):
            exporter.export(ExportCase(model=model, cluster=cluster, plan=plan, job=job, stack=framework))
            seen |= set(offload)
    assert seen == set(runs.offload)


@pytest.mark.parametrize("stack", ["megatron", "megatron-bridge", "fsdp2"])
def test_a_last_piece_of_the_head_alone_is_launched(stack: str) -> None:
    """With a layer a chunk the last one can give its layer away; both frameworks build chunks of no layer."""
    framework, model, cluster = find_stack(stack), load_model("llama-3.2-1b"), Cluster.parse("8xh100-sxm-80gb")
    torch = stack == "fsdp2"
    plan = Plan(
        pp=4, vpp=4, dp=2, schedule="interleaved", stage_layers=shifted((1,) * 16, "last-1"), sequence_parallel=torch,
        sharding="fsdp" if torch else "distributed-optimizer",
    )  # fmt: skip
    assert plan.stage_layers[-2:] == (2, 0)
    assert not plan_problems(model, plan, 8) and not stack_problems(framework, plan)
    exporter, job = (
        import_module(f"shardwise.formats.{framework.runs.exporter}"),
        Training(seq_len=512, global_batch=64),
    )
    exporter.export(ExportCase(model=model, cluster=cluster, plan=plan, job=job, stack=framework))


@pytest.mark.parametrize("stack", ["fsdp2", "deepspeed", "transformers", "megatron"])
def test_plans_left_out_are_those_that_the_stack_does_not_run(stack: str) -> None:
    """Legal plans are those of brute force that break no rule of the framework, and the others are counted under it."""
    model, cluster = load_model("llama-3.2-1b"), Cluster.parse("8xa100-sxm-80gb")
    space = SearchSpace(micro_batch=upto(2), recompute=("none",))
    work = work_of(model, cluster, Training(seq_len=1024, global_batch=16), space, SearchOptions(stack=stack))
    # What FSDP trains is fp32 under transformers alone, whose plans without it are a grid of their own.
    grids = [one.grid for one in work.tasks]
    every = [(g, p) for g in grids for p in brute.plans(g.case, g.space) if brute.is_legal(g.case, p)]
    launched = [p for g, p in every if not stack_problems(g.case.stack, p, **g.job)]
    found = plan_training(model, cluster, work.grid.case.job, space, SearchOptions(stack=stack, prune=False))
    assert found.counts.legal == len(launched) > 0
    assert (len(launched) < len(every)) == any(row.name == "stack" for row in found.rejected)


NOT_RUN: tuple[tuple[str, dict[str, Any], set[str]], ...] = (
    ("megatron", {"schedule": ("1f1b", "dualpipe"), "layout": ("summa",)}, {"schedule", "layout"}),
    ("fsdp2", {"sharding": ("zero1",)}, {"sharding"}),
    ("deepspeed", {"pp": upto(8), "cp_kind": ("ring",)}, {"cp_kind"}),
    ("megatron", {"orders": (("dp", "tp", "tp2", "cp", "pp"),)}, {"order"}),
)


@pytest.mark.parametrize(("stack", "space", "named"), NOT_RUN)
def test_asking_for_what_a_stack_does_not_run_is_refused(stack: str, space: dict[str, Any], named: set[str]) -> None:
    """Choices that were asked for and that the framework does not run are named, with the way to search them still."""
    model, cluster = load_model("llama-3.2-1b"), Cluster.parse("8xa100-sxm-80gb")
    with pytest.raises(InputError) as caught:
        plan_training(
            model, cluster, Training(seq_len=1024, global_batch=16), SearchSpace(**space), SearchOptions(stack=stack)
        )
    assert {problem.field for problem in caught.value.problems} == named
    assert all(problem.remedy.endswith("or --explore") for problem in caught.value.problems)


# What is asked of a search, and what it is told: the value as its flag takes it, and one that the framework runs.
REMEDIES: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("deepspeed", {"offload": (("optimizer",),)}, "optimizer", "use optimizer+gradients"),
    ("fsdp2", {"offload": (("optimizer",),)}, "optimizer", "use optimizer+parameters+gradients"),
    (
        "fsdp2",
        {"offload": (("optimizer", "parameters"),)},
        "optimizer+parameters",
        "use optimizer+parameters+gradients",
    ),
    ("zero-bubble", {"stage_layers": ("usual", "first-1")}, "first-1", "use equal stages"),
)


@pytest.mark.parametrize(("stack", "space", "value", "remedy"), REMEDIES)
def test_a_refused_choice_is_named_as_it_was_written(
    stack: str, space: dict[str, Any], value: str, remedy: str
) -> None:
    """Choices are named as their flags take them, and what is to be used instead is whole: the search accepts it."""
    model, cluster, job = (
        load_model("llama-3.2-1b"),
        Cluster.parse("8xa100-sxm-80gb"),
        Training(seq_len=1024, global_batch=16),
    )
    with pytest.raises(InputError) as caught:
        plan_training(model, cluster, job, SearchSpace(**space), SearchOptions(stack=stack))
    (problem,) = caught.value.problems
    assert problem.value == value
    assert problem.remedy.startswith(remedy + ",")
    if "offload" in space:
        words = tuple(remedy.removeprefix("use ").split("+"))
        found = plan_training(model, cluster, job, SearchSpace(offload=(words,)), SearchOptions(stack=stack))
        assert found.counts.legal > 0


def test_exploring_finds_what_nothing_launches_and_marks_it() -> None:
    """With `explore` layouts that the framework has not are searched, and a plan says what of it has no launch."""
    model, cluster = load_model("llama-3.2-1b"), Cluster.parse("8xa100-sxm-80gb")
    job, space = (
        Training(seq_len=1024, global_batch=16),
        SearchSpace(layout=("summa",), tp=upto(2), micro_batch=upto(1)),
    )
    found = plan_training(model, cluster, job, space, SearchOptions(explore=True, top=3))
    marked = [report for report in found.best if report.plan.layout == "summa"]
    assert marked and all("layout" in {problem.field for problem in report.unlaunched} for report in marked)
