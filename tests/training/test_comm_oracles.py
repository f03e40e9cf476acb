"""Messages of the communication report, against those that torch's dispatcher saw in whole training steps.

Recorded with a TorchDispatchMode over the fake process group of torch 2.13.0 and transformers 5.23.0: calls, and bytes
of the largest tensor of each call, on one rank and in one step.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.hardware import Cluster
from shardwise.models import model_from_config
from shardwise.plans import Plan, Stack, Training, find_stack
from shardwise.training import CommReport, TrainingOptions, comm

HERE = Path(__file__).parents[1] / "data/training"
DATA = json.loads((HERE / "step_memory.json").read_text(encoding="utf-8"))
TRACED: list[dict[str, Any]] = json.loads((HERE / "torch_messages.json").read_text(encoding="utf-8"))
# torchtitan's units, and those of a root unit (layers, wrapping) -> gathers, scatters. Traced with torch 2.13.0.
UNITS = [(4, "apart", 11, 6), (4, "root", 9, 5), (7, "apart", 17, 9), (7, "root", 15, 8)]
# (layers, world, sequence) -> collective -> (calls, bytes), one micro-batch of one sequence.
FSDP = [
    (2, 8, 4096, {"all_gather": (5, 1_011_912_704), "reduce_scatter": (3, 1_537_253_376)}),
    (16, 8, 4096, {"all_gather": (33, 4_417_916_928), "reduce_scatter": (17, 4_943_257_600)}),
]
TENSOR = [
    (2, 8, 4096, {"all_reduce": (14, 234_881_024)}),
    (16, 8, 4096, {"all_reduce": (112, 1_879_048_192)}),
    (2, 4, 2048, {"all_reduce": (14, 117_440_512)}),
]


def predicted(layers: int, seq_len: int, plan: Plan, options: tuple[str | Stack, str]) -> CommReport:
    """Return the report of Llama 3.2 1B with so many layers, one sequence on each replica."""
    model = model_from_config(DATA["configs"][f"llama3.2-1b-{layers}"], name="llama-3.2-1b")
    stack, precision = options
    job = Training(seq_len=seq_len, global_batch=plan.dp, precision=precision)
    cluster = Cluster.parse(f"{plan.num_devices}xa100-sxm-80gb")
    return comm(model, cluster, plan, job, TrainingOptions(stack=stack))


def by_verb(found: CommReport, axis: str) -> dict[str, tuple[float, float]]:
    """Return calls and bytes of each collective of an axis on one rank."""
    seen: dict[str, Any] = {}
    for flow in found.on(axis, 0):
        calls, size = seen.get(flow.message.verb, (0, 0))
        seen[flow.message.verb] = calls + flow.per_step, size + flow.bytes_per_step
    return seen


@pytest.mark.parametrize(("layers", "world", "seq_len", "seen"), FSDP)
def test_fsdp_messages_are_those_recorded(layers: int, world: int, seq_len: int, seen: dict[str, Any]) -> None:
    """FSDP2, a unit a layer and the root: gathers in bf16 (the root once), gradients scattered in fp32.

    Recorded with a policy that reduces in fp32; accelerate's own reduces in the type of mixed precision.
    """
    plan = Plan(dp=world, micro_batch=1, sharding="fsdp")
    found = predicted(layers, seq_len, plan, (replace(find_stack("accelerate"), scatter_bytes=4.0), "amp-bf16"))
    assert by_verb(found, "dp") == seen
    assert set(found.axes) == {"dp"}
    assert found.axes["dp"].messages_per_step == sum(calls for calls, _ in seen.values())
    assert found.axes["dp"].bytes_per_step == sum(size for _, size in seen.values())


@pytest.mark.parametrize(("layers", "ends", "gathers", "scatters"), UNITS)
def test_units_are_those_of_the_framework(layers: int, ends: Any, gathers: int, scatters: int) -> None:
    """The units of torchtitan send 2 L + 3 gathers and L + 2 scatters, a root unit 2 L + 1 and L + 1."""
    run = next(r for r in TRACED if r["mode"] == "fsdp" and r["config"]["num_hidden_layers"] == layers)
    model, plan = model_from_config(run["config"], name="traced"), Plan(dp=run["world"], sharding="fsdp")
    job = Training(seq_len=run["seq_len"], global_batch=plan.dp)
    found = {
        way: by_verb(
            comm(model, Cluster.parse(f"{plan.dp}xa100-sxm-80gb"), plan, job, TrainingOptions(stack=stack)), "dp"
        )
        for way in ("apart", "root")
        for stack in [replace(find_stack("fsdp2"), fsdp_ends=way)]
    }
    assert (found[ends]["all_gather"][0], found[ends]["reduce_scatter"][0]) == (gathers, scatters)
    table = 2 * run["config"]["vocab_size"] * run["config"]["hidden_size"]
    assert found["apart"]["all_gather"][1] - found["root"]["all_gather"][1] == table
    assert found["apart"]["reduce_scatter"][1] == found["root"]["reduce_scatter"][1]


@pytest.mark.parametrize(("layers", "world", "seq_len", "seen"), TENSOR)
def test_tensor_parallel_messages_are_those_recorded(
    layers: int, world: int, seq_len: int, seen: dict[str, Any]
) -> None:
    """DTensor's column and row plan: two all-reduces forward, five backward: q, k, v, gate and up reduce apart.

    Recorded with a plan of the layers alone, head and embedding on every rank.
    """
    plan = Plan(tp=world, micro_batch=1, sequence_parallel=False)
    found = predicted(layers, seq_len, plan, (replace(find_stack("transformers"), vocabulary="whole"), "bf16-pure"))
    assert by_verb(found, "tp") == seen
    assert found.axes["tp"].messages_per_step == seen["all_reduce"][0]
    assert found.axes["tp"].bytes_per_step == seen["all_reduce"][1]
    assert {f.message.shape for f in found.on("tp", 0)} == {(1, seq_len, 2048)}


def test_a_head_that_is_gathered_sends_its_logits_and_the_gradient_of_its_input() -> None:
    """ColwiseParallel(output_layouts=Replicate()): all logits are gathered, one all-reduce in backward (2.14.1)."""
    plan = Plan(tp=4, micro_batch=1, sequence_parallel=False)
    gathered, whole = (
        by_verb(predicted(2, 2048, plan, (replace(find_stack("transformers"), vocabulary=way), "bf16-pure")), "tp")
        for way in ("gathered", "whole")
    )
    assert gathered["all_gather"] == (1, 2 * 2048 * 128256)
    assert gathered["all_reduce"] == (whole["all_reduce"][0] + 1, whole["all_reduce"][1] + 2 * 2048 * 2048)


def traced_plan(run: dict[str, Any]) -> tuple[Plan, tuple[str | Stack, str]]:
    """Return the plan of a traced step, and its stack and precision; `fully_shard` of the model is its root unit.

    Its policy reduces in fp32, which accelerate's own does not.
    """
    mode, world = run["mode"], run["world"]
    tp = run.get("tp", world if mode.startswith("tp") else 1)
    fsdp = "fsdp" if run.get("reshard", True) else "shard-grad-op"
    sharding: Any = {"fsdp": fsdp, "hsdp": "hsdp", "tp_fsdp": "fsdp"}.get(mode, "none")
    split = mode in ("tp_sp", "tp_fsdp")
    plan = Plan(tp=tp, dp=world // tp, micro_batch=run["batch"], sharding=sharding, shard=run.get("shard", 1),
                sequence_parallel=split)  # fmt: skip
    own = replace(find_stack("transformers"), scatter_bytes=4.0, vocabulary="whole")
    stack = find_stack("fsdp2-2024") if split else own
    return plan, (stack, "bf16-pure" if sharding == "none" else "amp-bf16")


def traced_messages(run: dict[str, Any]) -> dict[str, list[float]]:
    """Return the predicted calls and bytes of a traced step by verb and size of the group."""
    model, (plan, (stack, precision)) = model_from_config(run["config"], name="traced"), traced_plan(run)
    batch = plan.dp * plan.micro_batch * run.get("micro", 1)
    job = Training(seq_len=run["seq_len"], global_batch=batch, precision=precision)
    found = comm(model, Cluster.parse(f"{run['world']}xa100-sxm-80gb"), plan, job, TrainingOptions(stack=stack))
    seen: dict[str, list[float]] = {}
    for name, axis in found.axes.items():
        for verb, (calls, size) in by_verb(found, name).items():
            sums = seen.setdefault(f"{verb}@{axis.size}", [0, 0])
            sums[0], sums[1] = sums[0] + calls, sums[1] + size
    return seen


@pytest.mark.parametrize("run", TRACED, ids=lambda run: run["id"])
def test_messages_are_those_that_torch_sent(run: dict[str, Any]) -> None:
    """FSDP2, hybrid sharding and DTensor's tensor and sequence parallelism send exactly the traced calls and bytes.

    Traced on transformers' classes, units as accelerate wraps them; mixtures have their experts fused in one tensor.
    """
    assert traced_messages(run) == run["seen"]
