"""No setting is lost: an export that is accepted is read back as a case of the same bytes and seconds."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from command_line import run
from shardwise.errors import InputError
from shardwise.formats import SYSTEMS, ExportCase, ImportContext, Imported, import_file, import_server
from shardwise.formats._exported import unsaid
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Plan, Serving, Settings, Training, find_stack, sharding_stack, stack_names
from shardwise.plans.fields import PLAN, SERVING, SETTINGS, TRAINING, Field
from shardwise.serving import InferReport, ServingOptions, infer
from shardwise.training import TrainingOptions, train

# What a plan starts from where a system needs more than replicas: its sharding, and fields that it always has.
STARTS: dict[str, dict[str, Any]] = {
    "deepspeed": {"sharding": "zero3"}, "fsdp": {"sharding": "fsdp"}, "torchtitan": {"sharding": "fsdp"},
    "transformers": {"sharding": "fsdp"}, "axolotl": {"sharding": "fsdp"}, "llamafactory": {"sharding": "fsdp"},
    "llamafactory_v1": {"sharding": "fsdp"},
    "torchtune": {"sharding": "fsdp"}, "trl": {"sharding": "fsdp"}, "verl": {"sharding": "fsdp"},
    "megatron": {"sharding": "distributed-optimizer"}, "nanotron": {"sharding": "zero1"},
    "maxtext": {"sharding": "fsdp", "recompute": "full"},
    "nemo": {"sharding": "distributed-optimizer"},
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {
    "verl": {"method": "grpo", "rollout": "asleep"}, "reference": {"method": "dpo"}, "epochs": {"token_budget": 1e9},
    "optimizer_rank": {"optimizer": "galore"}, "shard": {"sharding": "hsdp"}, "tp2": {"layout": "summa", "tp": 2},
    "rollout_bytes": {"rollout": "awake"}, "fp8_param_gather": {"precision": "fp8"},
    "recompute_layers": {"recompute": "full"},
}  # fmt: skip
OTHERS: dict[str, Any] = {
    "adapter_precision": "fp32", "trains": ("head",), "targets": ("q_proj",), "precision": "fp32", "optimizer": "lion",
    "modules": ("mlp",), "offload": ("activations",), "stage_layers": (15, 17),
    "order": ("tp", "cp", "tp2", "pp", "dp"), "fast": (2, 1, 1, 2, 1), "sharding": "zero2", "seq_len": 1024,
    "global_batch": 32, "reference": "none", "rollout": "awake", "rollout_bytes": 2.0**30,
}  # fmt: skip
ADAPTED = ("rank", "oft_block_size", "targets", "adapter_alpha", "adapter_dropout", "adapter_precision", "base")


def other(row: Field, name: str) -> Any:
    """Return a value that a field is not left at."""
    if name in OTHERS:
        return OTHERS[name]
    usual = {f.name: f.default for kind in (Plan, Training, Settings) for f in fields(kind)}[name]
    if row.choices:
        return next(one for one in row.choices if one not in (usual, "", "none"))
    if row.type == "switch":
        return not usual
    return 4 if row.type == "whole" else 0.05 if row.type in ("part", "share") else 1e6


def case_of(target: str, **changed: Any) -> ExportCase:
    """Return a small case of a system with some fields changed."""
    stack = find_stack(next(name for name in stack_names() if find_stack(name).runs.exporter == target))
    stack = find_stack("accelerate") if target == "fsdp" else stack
    asked = STARTS[target] | BESIDE.get(target, {}) | changed
    own = {
        kind: {f.name: asked[f.name] for f in fields(kind) if f.name in asked} for kind in (Plan, Training, Settings)
    }
    plan = Plan(**{"dp": 8, "sequence_parallel": False} | own[Plan])
    plan = replace(plan, dp=max(plan.dp // (plan.tp * plan.tp2 * plan.cp * plan.pp), 1))
    job = Training(**{"seq_len": 2048, "global_batch": 64} | own[Training])
    settings = replace(stack.settings, **own[Settings])
    cluster = Cluster.parse(f"{plan.num_devices}xh100-sxm-80gb")
    stack = replace(sharding_stack(stack, plan.sharding), settings=settings)
    return ExportCase(model=load_model("llama-3.1-8b"), cluster=cluster, plan=plan, job=job, stack=stack)


def predicted(case: ExportCase, back: Imported | None = None) -> tuple[float, ...]:
    """Return bytes, seconds and steps of a case, or of what its files say with what those leave to a script."""
    plan, job, stack, model = case.plan, case.job, case.stack, case.model
    if back is not None:
        lent = {name for row in TRAINING if not row.exported for name in row.names}
        lent |= set() if back.job.seq_len else {"seq_len", "optimizer", "token_budget", "sample_budget", "epochs"}
        lent |= set() if back.job.global_batch else {"global_batch"}
        job = replace(back.job, **{f.name: getattr(job, f.name) for f in fields(Training) if f.name in lent})
        plan = replace(back.plan, micro_batch=back.plan.micro_batch or plan.micro_batch)
        plan = plan if back.model else replace(plan, recompute=case.plan.recompute)
        stack, model = back.stack, back.model or model
    found = train(model, case.cluster, plan, job, TrainingOptions(stack=stack))
    steps = round(job.run_tokens / job.tokens_per_step) if case.job.run_tokens else 0
    return found.device_bytes, found.step_seconds, steps


TOLD = [(row, name) for table in (PLAN, TRAINING, SETTINGS) for row in table if row.exported for name in row.names]


@pytest.mark.parametrize("target", SYSTEMS)
def test_every_setting_comes_back_or_is_refused(target: str, tmp_path: Path) -> None:
    """One field after the other set otherwise: an export refuses what it cannot say, or its files mean the same."""
    export = import_module(f"shardwise.formats.{target}").export
    for row, name in TOLD:
        beside = {"adapter": "oft" if name == "oft_block_size" else "lora"} if name in ADAPTED else {}
        case = case_of(target, **{**BESIDE.get(name, {}), **beside, name: other(row, name)})
        try:
            if case.plan.pp > 1:
                case = replace(case, plan=train(case.model, case.cluster, case.plan, case.job).plan)
            files, asked = export(case).files, predicted(case)
        except InputError:
            continue
        for file, text in files.items():
            (tmp_path / file).write_text(text)
        back = import_file(tmp_path / next(iter(files)), around=ImportContext(num_devices=case.plan.num_devices))
        assert predicted(case, back) == pytest.approx(asked, rel=1e-4), name


ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt-llm", "llamacpp": "llama.cpp", "dynamo": "vllm"}
SERVED: dict[str, dict[str, Any]] = {
    "weights": {"weights": "fp8"}, "kv_cache": {"kv_cache": "fp8"}, "compute": {"compute": "fp8", "weights": "fp8"},
    "memory_fraction": {"memory_fraction": 0.5}, "max_batched_tokens": {"max_batched_tokens": 300},
    "captured_sequences": {"captured_sequences": 4}, "captured_sizes": {"captured_sizes": (1, 4, 12)},
    "adapters": {"adapters": 3, "adapter_rank": 16}, "stage_layers": {"stage_layers": (15, 17), "pp": 2},
    "speculative_method": {"speculative_method": "ngram", "num_speculative_tokens": 2, "acceptance_rate": 0.5},
    "num_speculative_tokens": {"speculative_method": "ngram", "num_speculative_tokens": 5, "acceptance_rate": 0.5},
    "draft_model": {"speculative_method": "draft_model", "num_speculative_tokens": 2, "acceptance_rate": 0.5,
                    "draft_model": "llama-3.2-1b"},
    "order": {"order": ("dp", "tp", "tp2", "cp", "pp"), "tp": 2, "dp": 8},
    "fast": {"fast": (1, 1, 1, 8, 1), "tp": 2, "dp": 8}, "ep": {"ep": 2, "tp": 2}, "etp": {"etp": 2, "tp": 2},
    "gpu_layers": {"gpu_layers": 8, "host": "cpu-generic"}, "cpu_experts": {"cpu_experts": 4, "host": "cpu-generic"},
}  # fmt: skip
LAUNCHED = [(row, name) for row in (*PLAN, *SERVING) for name in row.names if row in SERVING or "infer" in row.taken_by]


def served(target: str, name: str, **changed: Any) -> InferReport:
    """Return the answer for a server of a system with some fields changed."""
    own = [Plan(**{k: v for k, v in changed.items() if hasattr(Plan(), k)})]
    plan = replace(own[0], dp=own[0].dp or 1)
    job = Serving(**{"batch": 8} | {k: v for k, v in changed.items() if not hasattr(Plan(), k)})
    model = "mixtral-8x7b" if name in ("ep", "etp", "cpu_experts", "expert_imbalance") else "llama-3.1-8b"
    cluster = Cluster.parse(f"{plan.num_devices}xh100-sxm-80gb")
    return infer(load_model(model), cluster, plan, job, ServingOptions(engine=ENGINES[target]))


def figures(report: InferReport) -> tuple[float, ...]:
    """Return bytes, tokens and seconds of an answer."""
    return report.memory.needed, report.kv_cache_tokens, report.ttft_seconds, report.tpot_seconds


@pytest.mark.parametrize("target", ENGINES)
def test_every_setting_of_a_server_comes_back_or_is_refused_or_said(target: str, tmp_path: Path) -> None:
    """One field after the other set otherwise: a launch is refused by its name, or means the same when it is read."""
    export = import_module(f"shardwise.formats.{target}").export
    for row, name in LAUNCHED:
        usual = {f.name: f.default for kind in (Plan, Serving) for f in fields(kind)}[name]
        value = not usual if row.type == "switch" else 2 if row.type in ("whole", "ratio") else 0.5
        changed = SERVED.get(name, {name: value})
        try:
            report = served(target, name, **changed)
        except InputError:
            continue  # no question of this engine
        if not row.exported:
            assert unsaid((SERVING, report.job)), name
        try:
            files = export(report).files
        except InputError as error:
            assert {problem.field for problem in error.problems} & changed.keys(), (name, str(error))
            continue
        for file, text in files.items():
            (tmp_path / file).write_text(text)
        back = import_server(tmp_path / next(iter(files))).values
        dp = {"dp": max(back.get("dp", 1), report.plan.dp)}
        facts = {one: changed[one] for row in SERVING if not row.exported for one in row.names if one in changed}
        known = {one: back[one] for row, one in LAUNCHED if row.exported and one in back and one != "memory_fraction"}
        again = served(target, name, **known | facts | dp | {"memory_fraction": report.memory_share})
        assert figures(again) == pytest.approx(figures(report), rel=1e-3), name


@pytest.mark.parametrize("target", ["vllm", "sglang", "dynamo", "trtllm"])
def test_stages_of_unequal_layers_come_back_from_a_launch(target: str, tmp_path: Path) -> None:
    """Layers of every stage stand in a launch, most as a variable before its command, and are read from it."""
    words = ["mixtral-8x7b", "--on", "4xh100", "--pp", "2", "--tp", "2", "--stage-layers", "15,17", "--batch", "4"]
    done = run("export", target, *words, "--json")
    assert done.status == 0, done.err
    for name, text in done.tree["files"].items():
        (tmp_path / name).write_text(text)
    found = import_server(tmp_path / next(iter(done.tree["files"])))
    assert found.values["stage_layers"] == (15, 17)


@pytest.mark.parametrize("target", ["fsdp", "deepspeed"])
def test_attention_that_a_launcher_s_file_cannot_say_is_named_by_its_flag(target: str) -> None:
    """Files of accelerate and DeepSpeed say nothing of attention; the remedy is one that can be followed."""
    sharding = "zero3" if target == "deepspeed" else "fsdp"
    words = ["--micro-batch", "1", "--global-batch", "8", "--seq-len", "512", "--sharding", sharding]
    done = run("export", target, "llama-3.2-1b", "--on", "8xh100", *words, "--attn-implementation", "eager", "--json")
    assert done.fields == ["attn_implementation"]
    remedy = done.tree["error"]["problems"][0]["remedy"]
    assert remedy == "leave it out, or export trl, axolotl or llamafactory, which write it"
    words += ["--attn-implementation", "eager"]
    assert all(
        run("export", t, "llama-3.2-1b", "--on", "8xh100", *words[:6], *words[8:]).status == 0
        for t in ("trl", "axolotl")
    )
