"""What each framework runs: the table is complete and sourced, and what it does not run is refused by name."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from shardwise import Cluster, InputError, Training, load_model, train
from shardwise.plans import Plan, default_stack, find_stack, stack_names
from shardwise.plans._stack import _extended, stack_table
from shardwise.plans.laws import field_problems, stack_problems
from shardwise.serving._engine import engine_tables
from shardwise.training import TrainingOptions


@pytest.mark.parametrize("name", stack_names())
def test_every_word_that_a_stack_runs_is_a_word_of_plans(name: str) -> None:
    """Layouts, schedules, shardings, modules, orders and the rest are fields that a plan can have, in known words."""
    runs = find_stack(name).runs
    for field in ("layout", "cp_kind", "schedule", "sharding", "recompute", "sequence_parallel"):
        for value in getattr(runs, field):
            assert not field_problems(replace(Plan(), **{field: value})).items, (field, value)
    assert not field_problems(Plan(modules=runs.modules)).items
    assert not any(field_problems(Plan(order=order)).items for order in runs.orders)  # type: ignore[arg-type]
    assert all(rule.source and rule.where and rule.needs for rule in runs.rules)
    assert runs.sharding and runs.schedule and runs.order


REFUSED: tuple[tuple[str, dict[str, Any], set[str]], ...] = (
    ("megatron", {"pp": 4, "schedule": "dualpipe"}, {"schedule"}),
    ("megatron", {"layout": "summa", "tp": 2, "tp2": 2}, {"layout", "tp2"}),
    ("megatron", {"recompute": "attention"}, {"recompute"}),
    ("megatron", {"dp": 4, "pp": 2, "sharding": "fsdp"}, {"pp"}),
    ("megatron", {"dp": 4, "tp": 2, "order": ("dp", "tp", "tp2", "cp", "pp")}, {"order"}),
    ("megatron", {"dp": 16, "tp": 2, "fast": (1, 1, 1, 8, 1)}, {"fast"}),
    ("deepspeed", {"pp": 2, "cp": 2, "tp": 2, "cp_kind": "ring"}, {"pp", "cp_kind", "tp", "sequence_parallel"}),
    ("fsdp2", {"dp": 2, "tp": 2}, {"tp"}),
    ("fsdp2", {"dp": 2, "tp": 2, "sequence_parallel": False, "sharding": "fsdp"}, {"sequence_parallel"}),
    ("fsdp2", {"dp": 8, "tp": 4, "ep": 2, "etp": 2, "sharding": "fsdp"}, {"etp"}),
    ("transformers", {"dp": 2, "sharding": "zero1"}, {"sharding"}),
    ("pytorch", {"dp": 2, "tp": 2}, {"tp", "sequence_parallel"}),
    ("trl", {"pp": 2, "dp": 2}, {"schedule", "dp"}),
    ("transformers", {"pp": 2, "schedule": "sequential"}, {"pp", "schedule"}),
    ("maxtext", {"pp": 2, "recompute": "full"}, {"schedule"}),
    ("maxtext", {"dp": 2, "recompute": "none"}, {"recompute"}),
    ("maxtext", {"dp": 4, "ep": 4, "recompute": "full"}, {"sharding"}),
    ("maxtext", {"dp": 2, "cp": 4, "ep": 8, "sharding": "fsdp", "recompute": "full"}, {"ep"}),
)


@pytest.mark.parametrize(("name", "fields", "named"), REFUSED)
def test_what_a_stack_does_not_run_is_refused_by_field(name: str, fields: dict[str, Any], named: set[str]) -> None:
    """Each field that a framework does not run is named with the framework and a value that will do."""
    found = stack_problems(find_stack(name), Plan(**fields))
    assert {problem.field for problem in found} == named
    assert all(problem.rule.startswith(name) and problem.remedy.startswith("use ") for problem in found)


IN_PLACE = {"loss": "vocab-parallel-in-place"}
TILED, EARLY = {"tile_mlp": "8"}, {"updates_in_backward": "true", "optimizer": "adam"}
# What each framework's sources have of a tiled MLP and of an optimizer in backward: the fields that are refused.
SAVERS: tuple[tuple[str, dict[str, str], dict[str, Any], set[str]], ...] = (
    ("megatron", TILED, {}, {"tile_mlp"}),
    ("megatron-bridge", EARLY, {}, {"updates_in_backward"}),
    ("nanotron", EARLY, {}, {"updates_in_backward"}),
    ("transformers", TILED, {}, {"tile_mlp"}),
    ("transformers", EARLY, {}, {"optimizer"}),
    ("transformers", {**EARLY, "optimizer": "apollo"}, {}, set()),
    ("axolotl", {**EARLY, "optimizer": "galore"}, {"dp": 2, "sharding": "fsdp"}, {"dp"}),
    ("torchtune", EARLY, {}, set()),
    ("torchtune", {**EARLY, "adapter": "lora"}, {}, {"adapter"}),
    ("torchtitan", EARLY, {"dp": 2, "sharding": "fsdp"}, set()),
    ("torchtitan", EARLY, {"pp": 2}, {"pp"}),
    ("torchtitan-0.3", EARLY, {"dp": 2, "sharding": "fsdp"}, {"updates_in_backward"}),
    ("torchtitan-0.3", {}, {"cp": 2, "cp_kind": "ring", "sharding": "fsdp"}, {"cp_kind"}),
    ("deepspeed", {**TILED, **EARLY}, {}, {"updates_in_backward"}),
    ("fsdp-2024", EARLY, {}, {"updates_in_backward"}),
    ("pytorch", EARLY, {}, set()),
    # github.com/modelscope/ms-swift pull 7090, which was never merged.
    ("ms-swift", TILED, {}, {"tile_mlp"}),
    ("unsloth", TILED, {}, set()),
    ("unsloth-2024", TILED, {}, {"tile_mlp"}),
    # megatron/training/arguments.py asserts that --cross-entropy-fusion-impl is not te, which Megatron-Bridge sets.
    ("megatron", IN_PLACE, {}, {"loss"}),
    ("megatron", {"loss": "vocab-parallel-compiled"}, {}, set()),
    ("megatron-bridge", IN_PLACE, {}, set()),
    ("nanotron", IN_PLACE, {}, {"loss"}),
    ("xla", IN_PLACE, {}, {"loss"}),
    ("maxtext", IN_PLACE, {"recompute": "full"}, {"loss"}),
)


@pytest.mark.parametrize(("name", "words", "fields", "named"), SAVERS)
def test_savers_of_few_frameworks(name: str, words: dict[str, str], fields: dict[str, Any], named: set[str]) -> None:
    """A tiled MLP and an update in backward are refused where the framework has none, with one that has it."""
    stack = find_stack(name)
    found = stack_problems(stack, Plan(sequence_parallel=stack.runs.sequence_parallel[0], **fields), **words)
    assert {problem.field for problem in found} == named
    assert all(" or stack " in p.remedy for p in found if p.field in words)


@pytest.mark.parametrize("name", ["fsdp2", "maxtext"])
def test_experts_are_split_as_all_else_is(name: str) -> None:
    """Beside tp alone torchtitan and MaxText split experts over its ranks; a dense model has none to split."""
    stack, plan = find_stack(name), Plan(tp=2, dp=2, sharding="fsdp", recompute="full")
    (found,) = stack_problems(stack, plan, experts="true")
    assert found.field == "etp" and not stack_problems(stack, plan, experts="false")
    assert not stack_problems(stack, replace(plan, etp=2), experts="true")


def test_torchtitan_recomputes_every_second_layer_or_third_and_so_on() -> None:
    """Its default is every second layer; numbers that no such count gives are refused with those nearest."""
    stack, layers = find_stack("torchtitan"), {"layers": "32"}
    for limit in (16, 10, 8, 32):
        assert stack_problems(stack, Plan(recompute="full", recompute_layers=limit), **layers) == ()
    assert stack_problems(stack, Plan(pp=2, sharding="fsdp", recompute="full", recompute_layers=8), **layers) == ()
    (found,) = stack_problems(stack, Plan(recompute="full", recompute_layers=12), **layers)
    assert found.field == "recompute_layers" and found.remedy.startswith("use one of 10, 16, or stack megatron")
    (found,) = stack_problems(find_stack("accelerate"), Plan(recompute="full", recompute_layers=16), **layers)
    assert "all layers of a stage or none" in found.rule


def test_a_refusal_names_first_who_runs_the_whole_plan() -> None:
    """Who splits over an axis in another schedule alone is not named beside who runs the plan as it is."""
    (pp,) = (
        p for p in stack_problems(find_stack("transformers"), Plan(pp=2, schedule="sequential")) if p.field == "pp"
    )
    assert pp.remedy == "use 1, or stack trl or trl-2026"


@pytest.mark.parametrize(
    ("name", "job", "named", "remedy"),
    [
        ("torchtune", {"adapter": "vera"}, {"adapter"}, "use one of lora, rslora, dora, or stack"),
        ("torchtune", {"adapter": "dora", "base": "nf4"}, set(), ""),
        ("torchtune", {"adapter": "lora", "base": "gptq4"}, {"base"}, "use one of bf16, fp16, nf4, nf4-dq"),
        ("megatron-bridge", {"adapter": "oft"}, {"adapter"}, "use one of lora, rslora, dora, or stack"),
        ("litgpt", {"adapter": "dora"}, {"adapter"}, "use one of lora, rslora"),
        ("xla", {"adapter": "lora", "base": "nf4"}, set(), ""),
        ("xla", {"adapter": "lora", "base": "awq4"}, {"base"}, "use one of bf16, fp16, fp8, int8, nf4"),
        ("trl", {"adapter": "vera", "base": "awq4"}, set(), ""),
    ],
)
def test_methods_and_formats_of_a_framework_are_its_own(
    name: str, job: dict[str, str], named: set[str], remedy: str
) -> None:
    """Those with adapters of their own have few methods and formats; those around peft have all of them."""
    problems = stack_problems(find_stack(name), Plan(sequence_parallel=False), **{"base": "", **job})
    assert {problem.field for problem in problems} == named
    assert all(problem.remedy.startswith(remedy) for problem in problems)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("transformers", "use parameters,gradients,optimizer,"),
        ("fsdp-2024", "use parameters,gradients,optimizer,"),
        ("litgpt", "use none,"),
        ("composer", "use activations,"),
    ],
)
def test_a_remedy_of_offload_is_a_plan_that_is_lawful(name: str, remedy: str) -> None:
    """Weights leave with their gradients, and these go where the optimizer is; LitGPT and Composer keep them."""
    plan = Plan(dp=2, sharding="fsdp", recompute="full", offload=("parameters",))
    (problem,) = stack_problems(find_stack(name), plan)
    assert problem.field == "offload" and problem.remedy.startswith(remedy)
    offload = () if name == "litgpt" else tuple(remedy.removeprefix("use ").rstrip(",").split(","))
    assert not stack_problems(find_stack(name), replace(plan, offload=offload))
    assert not field_problems(replace(plan, offload=offload, micro_batch=1)).items


def test_litgpt_quantises_on_one_device() -> None:
    """It refuses 4 bits on several devices."""
    job = {"adapter": "lora", "base": "nf4"}
    assert {p.field for p in stack_problems(find_stack("litgpt"), Plan(dp=2, sharding="fsdp"), **job)} == {"base"}
    assert not stack_problems(find_stack("litgpt"), Plan(), **job)


def test_what_is_released_now_is_named_before_what_was() -> None:
    """NeMo of 2024 had experts, ranks of them and NF4, and JAX has all, which is no trainer: it is never named."""
    plan = Plan(dp=8, ep=4)
    (base,) = stack_problems(find_stack("megatron-bridge"), plan, adapter="lora", base="nf4", precision="bf16")
    assert base.remedy.endswith("or stack nemo-2024")
    (experts,) = (p for p in stack_problems(find_stack("torchtune"), plan) if p.field == "ep")
    assert experts.remedy == "use 1, or stack megatron or megatron-lm"


RUN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("megatron", {"tp": 8, "pp": 4, "vpp": 2, "dp": 2, "schedule": "interleaved", "sharding": "distributed-optimizer"}),
    ("megatron", {"dp": 8, "sharding": "zero3"}),
    ("megatron", {"pp": 2, "vpp": 2, "schedule": "interleaved", "stage_layers": (1, 2, 1, 0)}),
    ("megatron", {"pp": 2, "dp": 4, "order": ("pp", "dp", "cp", "tp", "tp2")}),
    ("fsdp2", {"dp": 4, "tp": 2, "cp": 2, "pp": 2, "sharding": "fsdp", "cp_kind": "all-gather"}),
    ("fsdp2", {"dp": 8, "tp": 4, "ep": 2, "etp": 4, "sharding": "fsdp"}),
    ("deepspeed", {"dp": 8, "cp": 2, "cp_kind": "all-to-all", "sharding": "zero3"}),
    ("pytorch", {"dp": 8, "schedule": "dualpipe"}),
    ("trl", {"pp": 8, "schedule": "sequential"}),
)


@pytest.mark.parametrize(("name", "fields"), RUN)
def test_what_a_stack_runs_is_not_refused(name: str, fields: dict[str, Any]) -> None:
    """Plans in other words of the same meaning, and values without effect, are no ground for a refusal."""
    assert stack_problems(find_stack(name), Plan(**fields)) == ()


DEFAULTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "megatron"),
    ({"sharding": "zero1", "dp": 8}, "deepspeed"),
    *(({"sharding": "zero1", axis: 2}, "megatron") for axis in ("tp", "cp", "pp", "ep")),
    ({"sharding": "zero1", "pp": 2, "vpp": 2, "schedule": "interleaved"}, "megatron"),
    ({"sharding": "zero3", "dp": 8}, "deepspeed"),
    ({"sharding": "zero3", "dp": 8, "pp": 2}, "fsdp2"),
    ({"sharding": "fsdp", "dp": 8, "tp": 2}, "fsdp2"),
    ({"sharding": "zero1", "pp": 16, "dp": 128, "ep": 64, "schedule": "dualpipe"}, "hai-llm"),
    ({"sharding": "fsdp", "pp": 4, "dp": 2, "schedule": "dualpipe-v"}, "fsdp2"),
    ({"pp": 4, "schedule": "zb-h1"}, "zero-bubble"),
    ({"pp": 1, "schedule": "dualpipe"}, "megatron"),
)


@pytest.mark.parametrize(
    ("fields", "asked", "name"),
    [
        ({}, {"adapter": "lora"}, "transformers"),
        ({"offload": ("activations",)}, {"adapter": "lora"}, "trl"),
        ({"sharding": "zero3", "dp": 8}, {"adapter": "lora"}, "deepspeed"),
        ({"tp": 2}, {"adapter": "lora"}, "megatron-bridge"),
        *(
            ({"sharding": "fsdp", "dp": 8}, {"method": word}, "transformers")
            for word in ("dpo", "kto", "reward", "ppo")
        ),
        ({"dp": 8}, {"method": "grpo"}, "transformers"),
        ({"dp": 8}, {"method": "sft"}, "megatron"),
        ({"tp": 8}, {"method": "ppo"}, "megatron"),
    ],
)
def test_fine_tuning_without_a_stack_has_one_of_its_own(fields: dict[str, Any], asked: Any, name: str) -> None:
    """Adapters, preferences and rewards run where people run them: on transformers, or on TRL what that offloads."""
    assert default_stack(Plan(**fields), **asked) == name


@pytest.mark.parametrize(("fields", "name"), DEFAULTS)
def test_a_plan_without_a_stack_has_one_that_runs_it(fields: dict[str, Any], name: str) -> None:
    """ZeRO-1 beside axes that split the model is Megatron's distributed optimizer, and not DeepSpeed."""
    assert default_stack(Plan(**fields)) == name


def test_the_same_plan_retyped_without_its_stack_takes_as_long() -> None:
    """A plan of Megatron with ZeRO-1 keeps its framework, its word for it and its seconds where none is named."""
    model, cluster = load_model("llama-3.1-8b"), Cluster.parse("16xh100-sxm-80gb")
    plan, job = Plan(tp=2, pp=2, dp=4, sharding="zero1"), Training(seq_len=4096, global_batch=64)
    named, bare = train(model, cluster, plan, job, TrainingOptions(stack="megatron")), train(model, cluster, plan, job)
    assert bare.step_seconds == named.step_seconds
    assert (bare.case.stack.name, bare.plan.sharding) == ("megatron", "distributed-optimizer")
    assert "sharding distributed-optimizer: what megatron calls zero1" in bare.assumptions
    assert not bare.unlaunched


@pytest.mark.parametrize("words", [{"keeps_gatherd": True}, {"runs": {"scedule": ["1f1b"]}}], ids=str)
def test_a_key_that_no_stack_has_is_an_error(words: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt key of the table, or of what it runs, is refused rather than left to the stack that it extends."""
    table = {**stack_table(), "megatron": {**stack_table()["megatron"], **words}}
    table["megatron"]["runs"] = {**stack_table()["megatron"]["runs"], **words.get("runs", {})}
    monkeypatch.setattr("shardwise.plans._stack.stack_table", lambda: table)
    with pytest.raises(TypeError, match=r"keeps_gatherd|scedule"):
        find_stack.__wrapped__("megatron")


def test_a_stack_that_states_no_source_has_those_of_what_it_extends() -> None:
    """A table that only names what it extends is that stack under another name, whatever else it runs."""
    table = {"own": {"sources": {"loss": "its code"}, "runs": {"exporter": "x"}, "loss": "fused"},
             "like": {"extends": "own", "runs": {"exporter": ""}}}  # fmt: skip
    found = _extended(table, "like")
    assert (found["sources"], found["loss"], found["runs"]["exporter"]) == ({"loss": "its code"}, "fused", "")


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("torchtitan", "fsdp2"),
        ("transformers-4", "transformers-2025"),
        ("NeMo", "megatron-bridge"),
        ("megatron_core", "megatron"),
        ("hf", "transformers"),
    ],
)
def test_the_words_that_people_have_for_a_framework_name_it(word: str, name: str) -> None:
    """What someone calls their framework is it, whatever its case and signs; a near miss is told the near ones."""
    assert find_stack(word).name == name
    with pytest.raises(InputError, match="use deepspeed or deepspeed-2025; known are megatron,"):
        find_stack("deepspede")


def test_a_word_for_a_framework_or_an_engine_is_one_ones_alone() -> None:
    """No word stands for two frameworks or two engines, nor for one while it is the name of another."""
    for table in (stack_table(), engine_tables()["engines"]):
        words = [re.sub("[^a-z0-9]", "", one) for name, row in table.items() for one in (name, *row.get("also", ()))]
        assert len(words) == len(set(words))
